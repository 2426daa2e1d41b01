"""Images named by their content: the operator's and the runtime's from the Dockerfile, and what the local cluster needs to have any.

A tag is the hash of everything that decides what is in the image (wheel, Dockerfile, pins, base), so an image that exists is right, a
second build is instant, and a Deployment that names a new image rolls by itself.
The local cluster has no registry: its base image is made of the system's own packages, wheels are fetched beforehand with the machine's own
settings, and so the build itself fetches nothing and no setting of the machine gets into an image.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from e2e.cluster import system_packages
from e2e.cluster.build import PROGRAMS, build, key
from e2e.cluster.processes import call
from e2e.cluster.progress import step
from e2e.cluster.settings import REPOSITORY
from e2e.cluster.wheel import build_wheel, source_key

TARGETS = ("operator", "runtime")
BUILD_SECONDS = 1200.0

BASE_RELEASE = "bookworm"
BASE_PACKAGES = "python3,python3-pip,ca-certificates,libgomp1,libnuma1,libstdc++6"
# archives and lists of apt, and what only people read
BASE_LEAVES_OUT = ("./var/cache/apt/*", "./var/lib/apt/lists/*", "./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*")


@dataclass(frozen=True, slots=True)
class Images:
    operator: str
    runtime: str

    def names(self) -> tuple[str, str]:
        return self.operator, self.runtime


class ImageBuilder(Protocol):
    @property
    def base(self) -> str:
        """What the base image is made of, for the tag."""
        ...

    def has(self, image: str) -> bool: ...

    def build(self, image: str, target: str, context: Path) -> None:
        """`context` holds Dockerfile, requirements/ and dist/ with one wheel."""
        ...


def image_name(target: str, base: str) -> str:
    digest = hashlib.sha256(f"{source_key()}\0{base}\0".encode())
    for file in (REPOSITORY / "Dockerfile", REPOSITORY / "requirements" / f"{target}.txt"):
        digest.update(file.read_bytes())
    return f"localhost/refit-{target}:{digest.hexdigest()[:16]}"


def ensure_images(cache: Path, builder: ImageBuilder) -> Images:
    images = Images(*(image_name(target, builder.base) for target in TARGETS))
    for target, image in zip(TARGETS, images.names(), strict=True):
        if not builder.has(image):
            with _context(cache) as context:
                builder.build(image, target, context)
    return images


@contextmanager
def _context(cache: Path) -> Iterator[Path]:
    """Not the checkout: `dist/` there may hold other wheels."""
    wheel = build_wheel(cache)
    with tempfile.TemporaryDirectory(prefix="refit-image-") as folder:
        context = Path(folder)
        shutil.copy(REPOSITORY / "Dockerfile", context)
        shutil.copytree(REPOSITORY / "requirements", context / "requirements")
        (context / "dist").mkdir()
        shutil.copy(wheel, context / "dist")
        yield context


@dataclass(frozen=True, slots=True)
class Docker:
    """docker, with the Dockerfile's own base from a registry."""

    base: str = ""

    def has(self, image: str) -> bool:
        return bool(call(["docker", "images", "--quiet", image]).strip())

    def build(self, image: str, target: str, context: Path) -> None:
        with step(f"build {image}", 60):
            call(["docker", "build", "--target", target, "--tag", image, context], seconds=BUILD_SECONDS)


def docker_answers() -> bool:
    """Being installed is not enough: its daemon may be absent."""
    try:
        return subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=30).returncode == 0
    except (subprocess.TimeoutExpired, OSError):
        return False


@dataclass(frozen=True, slots=True)
class LocalBuilder:
    """buildah in its own corner of the cache, without a registry, a daemon or a network."""

    cache: Path

    @property
    def base(self) -> str:
        text = f"{BASE_RELEASE}\0{BASE_PACKAGES}\0{BASE_LEAVES_OUT}"
        return f"localhost/refit-base:{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def has(self, image: str) -> bool:
        system_packages.ensure(["buildah"])
        words = [*self._buildah(), "inspect", "--type", "image", image]
        return subprocess.run(words, capture_output=True, check=False, timeout=60).returncode == 0

    def build(self, image: str, target: str, context: Path) -> None:
        self._ensure_base()
        wheels = self._fetch_wheels(context / "requirements" / f"{target}.txt")
        arguments = (f"BASE_IMAGE={self.base}", "PIP_NO_INDEX=1", "PIP_FIND_LINKS=/wheels", "SYSTEM_PACKAGES=")
        options = [*(word for argument in arguments for word in ("--build-arg", argument)), "--target", target, "--volume", f"{wheels}:/wheels:ro"]
        with step(f"build {image}", 30):
            self._bud(image, context, *options)

    def ensure_pause(self) -> str:
        """The image of a pod's sandbox."""
        image = f"localhost/refit-pause:{key(PROGRAMS['pause'])}"
        if not self.has(image):
            program = build(self.cache, ["pause"])["pause"]
            with tempfile.TemporaryDirectory(prefix="refit-image-") as folder, step(f"build {image}", 5):
                shutil.copy(program, folder)
                (Path(folder) / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
                self._bud(image, Path(folder))
        return image

    def export(self, image: str, archive: Path) -> None:
        call([*self._buildah(), "push", "--quiet", "--disable-compression", image, f"oci-archive:{archive}:{image}"], seconds=BUILD_SECONDS)

    def _ensure_base(self) -> None:
        if self.has(self.base):
            return
        system_packages.ensure(["debootstrap"])
        with tempfile.TemporaryDirectory(prefix="refit-base-") as folder, step("build the base image from system packages", 100):
            root, context = Path(folder) / "root", Path(folder) / "context"
            context.mkdir()
            call(["nice", "debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", BASE_RELEASE, root], seconds=BUILD_SECONDS)
            call(["tar", "-C", root, *(f"--exclude={pattern}" for pattern in BASE_LEAVES_OUT), "-cf", context / "root.tar", "."], seconds=BUILD_SECONDS)
            (context / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
            self._bud(self.base, context)

    def _fetch_wheels(self, requirements: Path) -> Path:
        place = self.cache / "wheels" / f"{requirements.stem}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]}"
        if not place.exists():
            unfinished = place.with_suffix(".unfinished")
            command = ["uv", "tool", "run", "--quiet", "--python", sys.executable, "pip", "download", "--quiet", "--only-binary=:all:"]
            with step(f"fetch the wheels of {requirements.name}", 15):
                call([*command, "--dest", unfinished, "--requirement", requirements], seconds=BUILD_SECONDS)
            unfinished.rename(place)
        return place

    def _bud(self, image: str, context: Path, *options: str) -> None:
        # the folder of networks is never used, but locked, and would be made in /etc
        settled = ("--quiet", "--layers", "--isolation", "chroot", "--cni-config-dir", self.cache / "buildah" / "networks")
        call(["nice", *self._buildah(), "bud", *settled, *options, "--tag", image, context], seconds=BUILD_SECONDS)

    def _buildah(self) -> tuple[str, ...]:
        top = self.cache / "buildah"
        # by default the driver leaves a mount behind
        driver = ("--storage-driver", "overlay", "--storage-opt", "overlay.skip_mount_home=true")
        return ("buildah", "--root", str(top / "storage"), "--runroot", str(top / "run"), *driver)

"""Programs of the cluster, built from Go modules pinned in `modules/`, once per pin.

A program lies in `cache/bin/KEY/NAME`. The key hashes everything that decides what is built (go.mod, go.sum, our own Go files, the flags),
so a program that is there is right, and changing a pin never disturbs a running cluster.
Programs are static (CGO off): they run in any image and need no C compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import call
from e2e.cluster.progress import step

MODULES = Path(__file__).with_name("modules")
BUILD_SECONDS = 1800.0
FLAGS = ("-trimpath", "-buildvcs=false")

KUBERNETES_VERSION = "v1.36.3"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
KUBERNETES_LDFLAGS = f"-X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION} -X {_VERSION_PACKAGE}.gitMajor={_MAJOR} -X {_VERSION_PACKAGE}.gitMinor={_MINOR}"


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    module: str
    package: str
    about_seconds: float
    """On two idle cores, after those before it in PROGRAMS."""
    ldflags: str = ""
    tags: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, "-tags", self.tags, "-ldflags", f"-s -w {self.ldflags}".strip())


def _kubernetes(name: str, about_seconds: float) -> Program:
    return Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", about_seconds, ldflags=KUBERNETES_LDFLAGS)


def _containerd(name: str, about_seconds: float) -> Program:
    return Program(name, "containerd", f"github.com/containerd/containerd/v2/cmd/{name}", about_seconds, tags="no_btrfs no_devmapper no_zfs")


def _plugin(name: str, kind: str) -> Program:
    return Program(name, "plugins", f"github.com/containernetworking/plugins/plugins/{kind}/{name}", 4)


PROGRAMS: Mapping[str, Program] = {
    program.name: program
    for program in (
        Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", 40),
        _kubernetes("kube-apiserver", 270),
        _kubernetes("kube-controller-manager", 100),
        _kubernetes("kube-scheduler", 10),
        _kubernetes("kubelet", 40),
        _kubernetes("kube-proxy", 15),
        _containerd("containerd", 30),
        _containerd("containerd-shim-runc-v2", 5),
        _containerd("ctr", 5),
        Program("coredns", "coredns", ".", 60),
        _plugin("bridge", "main"),
        _plugin("loopback", "main"),
        _plugin("host-local", "ipam"),
        Program("pause", "pause", ".", 2),
    )
}


def key(program: Program, modules: Path = MODULES) -> str:
    digest = hashlib.sha256()
    folder = modules / program.module
    for file in sorted([folder / "go.mod", *folder.glob("go.sum"), *folder.glob("*.go")]):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    digest.update("\0".join(program.flags).encode())
    return digest.hexdigest()[:16]


def location(cache: Path, program: Program) -> Path:
    return cache / "bin" / key(program) / program.name


def build(cache: Path, names: Iterable[str]) -> dict[str, Path]:
    """Paths of the programs; what is missing is built, by one builder at a time."""
    wanted = [PROGRAMS[name] for name in names]
    places = {program.name: location(cache, program) for program in wanted}
    if all(place.exists() for place in places.values()):
        return places
    if shutil.which("go") is None:
        raise ClusterError(
            "the cluster's programs are built from source and Go is not installed: install Go 1.21 or newer (it fetches the version that the modules ask for)"
        )
    (cache / "bin").mkdir(parents=True, exist_ok=True)
    with (cache / "bin" / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step("wait for another build"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        for program in wanted:
            if not places[program.name].exists():
                _build_one(program, places[program.name])
    return places


def _build_one(program: Program, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_name(f"{place.name}.{os.getpid()}")
    command: list[str | Path] = ["env", "CGO_ENABLED=0", "nice", "go", "build", *program.flags, "-o", unfinished, program.package]
    with step(f"build {program.name}", program.about_seconds):
        call(command, seconds=BUILD_SECONDS, cwd=MODULES / program.module)
    unfinished.replace(place)

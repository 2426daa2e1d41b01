"""Which Kubernetes to use: what was asked for, else the first that works.

The choice is pure; the facts are looked up once.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from e2e.cluster.errors import ClusterError
from e2e.cluster.existing import ExistingCluster
from e2e.cluster.images import Images, answers
from e2e.cluster.kind import KindCluster
from e2e.cluster.local import LocalCluster
from e2e.cluster.pod_packages import PodPackages
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

    def ensure_images(self) -> Images:
        """Built from this checkout and present on the nodes."""
        ...

    def ensure_packages(self) -> PodPackages: ...


@dataclass(frozen=True, slots=True)
class Facts:
    kind: bool
    engine: bool
    linux: bool
    root: bool
    go: bool


def choose(wanted: str, facts: Facts) -> ClusterKind:
    missing: dict[ClusterKind, list[str]] = {
        "existing": [],
        "kind": [what for what, there in (("the program kind", facts.kind), ("a running docker or podman", facts.engine)) if not there],
        "local": [what for what, there in (("Linux", facts.linux), ("root", facts.root), ("Go 1.21 or newer", facts.go)) if not there],
    }
    # a cluster that is merely configured may be somebody's production: it is used only when it is named
    candidates: tuple[ClusterKind, ...] = ("kind", "local") if wanted == "auto" else tuple(kind for kind in missing if kind == wanted)
    for kind in candidates:
        if not missing[kind]:
            return kind
    lacks = "; ".join(f"{kind} needs {' and '.join(missing[kind])}" for kind in candidates)
    raise ClusterError(f"REFIT_CLUSTER={wanted}: no cluster can be made here: {lacks}. With REFIT_CLUSTER=existing the current kubectl context is used")


def look_up() -> Facts:
    return Facts(
        kind=shutil.which("kind") is not None,
        engine=any(map(answers, ("docker", "podman"))),
        linux=sys.platform == "linux",
        root=os.geteuid() == 0,
        go=shutil.which("go") is not None,
    )


def resolve(settings: ClusterSettings) -> Cluster:
    makers: dict[ClusterKind, Callable[[ClusterSettings], Cluster]] = {"existing": ExistingCluster, "kind": KindCluster, "local": LocalCluster}
    return makers[choose(settings.cluster, look_up())](settings)

"""Every process of the local cluster, containers included, lives below one control group: so all of them can be found, whoever started them.

Works on the unified hierarchy and on the older one with a tree per controller, where processes are tracked in one tree and containers have a group in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import Identity, identify

ROOT = Path("/sys/fs/cgroup")
GROUP = "refit"
PODS = f"/{GROUP}/pods"


def hierarchies(root: Path = ROOT) -> list[Path]:
    if (root / "cgroup.controllers").exists():
        return [root]
    return sorted({folder.resolve() for folder in root.glob("*/") if (folder / "cgroup.procs").exists()})


def tracking(root: Path = ROOT) -> Path:
    found = hierarchies(root)
    chosen = next((one for one in found if one == root or one.name == "pids"), None)
    if chosen is None:
        raise ClusterError(
            f"{root} has no unified control groups and no pids controller (found {[one.name for one in found]}); mount one, or use REFIT_CLUSTER=existing"
        )
    return chosen


def system_group(root: Path = ROOT) -> Path:
    """Of the components; containers have theirs in PODS."""
    return tracking(root) / GROUP / "system"


def ensure(root: Path = ROOT) -> None:
    system_group(root).mkdir(parents=True, exist_ok=True)


def members(root: Path = ROOT) -> list[Identity]:
    pids = {int(pid) for folder in _groups(tracking(root) / GROUP) for pid in (folder / "cgroup.procs").read_text().split()}
    return [identity for identity in map(identify, sorted(pids)) if identity is not None]


def remove(root: Path = ROOT) -> None:
    """Of groups without processes."""
    for hierarchy in hierarchies(root):
        for folder in _groups(hierarchy / GROUP):
            folder.rmdir()


def _groups(top: Path) -> Iterator[Path]:
    """Children before parents: only an empty group can be removed."""
    if top.is_dir():
        for child in sorted(top.iterdir()):
            if child.is_dir():
                yield from _groups(child)
        yield top

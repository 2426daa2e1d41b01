"""Every process of the local cluster is in a control group of ours, so all of them can be found, whoever started them.

Components, and what they start outside containers, are in one group; containerd puts each container in a group named by its id,
which we know from containerd's state.
Works on the unified hierarchy and on the older one with a tree per controller, where processes are tracked in one tree and containers have a group in each.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import Identity, identify, wait_until

ROOT = Path("/sys/fs/cgroup")
COMPONENTS = Path("refit")
# containerd's own choice for its namespace: the kubelet names a parent only when it manages a whole tree of groups
CONTAINERS = Path("k8s.io")
REMOVE_SECONDS = 10.0


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


def components_group(root: Path = ROOT) -> Path:
    return tracking(root) / COMPONENTS


def members(containers: Iterable[str], root: Path = ROOT) -> list[Identity]:
    groups = [group for top in _ours(containers) for group in _below(tracking(root) / top)]
    pids = {int(pid) for group in groups for pid in (group / "cgroup.procs").read_text().split()}
    return [identity for identity in map(identify, sorted(pids)) if identity is not None]


def remove(containers: Iterable[str], root: Path = ROOT) -> None:
    """Of groups whose processes have been ended; the kernel may need a moment to notice."""
    tops = _ours(containers)
    for hierarchy in hierarchies(root):
        for top in tops:
            for group in _below(hierarchy / top):
                wait_until(partial(_removed, group), f"{group} to be empty", REMOVE_SECONDS)
        shared = hierarchy / CONTAINERS
        if shared.is_dir() and not list(_below(shared))[:-1]:
            shared.rmdir()


def _ours(containers: Iterable[str]) -> list[Path]:
    return [COMPONENTS, *(CONTAINERS / one for one in containers)]


def _below(top: Path) -> Iterator[Path]:
    """Children before parents: only an empty group can be removed."""
    if top.is_dir():
        for child in sorted(top.iterdir()):
            if child.is_dir():
                yield from _below(child)
        yield top


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True

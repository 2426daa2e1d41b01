"""What the node's components change on the machine outside their own folder, and taking it back.

The kubelet sets kernel switches (it makes an oops panic, for one) once, at its start, and knows no way not to: the values from before are
kept in a file until they are written back. Mounts of pods and containers appear below the state folder, in the machine's own mount table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from e2e.cluster.processes import call

SWITCHES = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)


def remember(kept: Path) -> None:
    """Values that are kept already are older, and so the right ones."""
    if not kept.exists():
        kept.write_text(json.dumps({name: _switch(name).read_text().strip() for name in SWITCHES}))


def restore(kept: Path) -> None:
    if kept.exists():
        for name, value in json.loads(kept.read_text()).items():
            if _switch(name).read_text().strip() != value:
                _switch(name).write_text(value)
        kept.unlink()


def _switch(name: str) -> Path:
    return Path("/proc/sys") / name


def mounts_below(folder: Path, table: str) -> list[str]:
    """From the text of /proc/self/mountinfo, the innermost and latest first; blanks in it are written in octal."""
    points = [line.split()[4].replace("\\040", " ") for line in table.splitlines()]
    return [point for point in reversed(points) if Path(point).is_relative_to(folder)]


def unmount_below(folder: Path) -> None:
    for point in mounts_below(folder, Path("/proc/self/mountinfo").read_text()):
        call(["umount", "--lazy", point])


def remove_leftovers(folder: Path, containers: Iterable[str]) -> None:
    """What components put into folders of the whole machine; a folder that is empty then goes as well."""
    links, results, plugins = Path("/var/log/containers"), Path("/var/lib/cni/results"), Path("/var/lib/kubelet/device-plugins")
    for link in links.glob("*.log"):
        if Path(os.readlink(link)).is_relative_to(folder):
            link.unlink()
    for record in (record for container in containers for record in results.glob(f"*-{container}-*")):
        record.unlink()
    (plugins / "kubelet.sock").unlink(missing_ok=True)
    for place in (links, results, results.parent, plugins, plugins.parent, Path("/run/containerd/s"), Path("/run/containerd")):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()

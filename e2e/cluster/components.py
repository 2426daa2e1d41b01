"""Components of the local cluster as records on disk: which process, started when, by which command line.

Invariants: a component runs at most once; a record names a process only together with its start time, and the process writes it itself
before it becomes the component, so that a caller killed at any moment leaves nothing unknown;
a component whose command line or configuration changed since its start is replaced.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.controlplane import Component
from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import Identity, alive, call, stop, tail, wait_until

STOP_SECONDS = 10.0

# Joins the control group, writes the record, and becomes the component in a clean environment: the caller's proxies and settings are not for it.
BOOT = 'echo $$ > "$1" && echo "$$ $(cut -d" " -f22 /proc/$$/stat) $2" > "$3" && path="$4:$PATH" && shift 4 && exec env -i PATH="$path" "$@"'


@dataclass(frozen=True, slots=True)
class Record:
    identity: Identity
    digest: str


@dataclass(frozen=True, slots=True)
class Components:
    """`enter` are the words before a command that bring it into the cluster's network; `procs` is its control group's file; `path` is searched first."""

    folder: Path
    enter: Sequence[str]
    procs: Path
    path: Path

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def running(self, name: str) -> Record | None:
        record = self._recorded(name)
        return record if record is not None and alive(record.identity) else None

    def ensure(self, component: Component, configuration: str = "") -> bool:
        """False when it ran already, as wanted."""
        digest = hashlib.sha256("\0".join([*component.command, configuration]).encode()).hexdigest()
        found = self.running(component.name)
        if found is not None:
            if found.digest == digest:
                return False
            stop([found.identity], STOP_SECONDS)
        self._start(component, digest)
        return True

    def require(self, name: str) -> None:
        """For one that may end itself while something else is awaited."""
        if self.running(name) is None:
            raise ClusterError(f"{name} ended{tail(self.log(name))}")

    def _start(self, component: Component, digest: str) -> None:
        log, record = self.log(component.name), self._record(component.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        with log.open("ab") as output:
            output.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S')} {' '.join(component.command)}\n".encode())
            output.flush()
            # --fork gives it to the first process of the machine: it outlives us and leaves us no zombie
            boot = ("setsid", "--fork", "sh", "-c", BOOT, "sh", self.procs, digest, record, self.path)
            call([*boot, *self.enter, *component.command], output=output, cwd=Path("/"))
        wait_until(lambda: self._recorded(component.name) is not None, f"{component.name} to start", 10, log, every=0.01)
        self.require(component.name)

    def _recorded(self, name: str) -> Record | None:
        place = self._record(name)
        words = place.read_text().split() if place.exists() else []
        return Record(Identity(int(words[0]), int(words[1])), words[2]) if len(words) == 3 else None

    def _record(self, name: str) -> Path:
        return self.folder / "run" / name

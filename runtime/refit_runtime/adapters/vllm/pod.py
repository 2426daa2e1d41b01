"""What the processes of one pod share: which API server holds the agent, whether requests are served, the wish to leave, what the ranks report.

vLLM may run several API servers in a pod, on one port. The one that locks the pod's file runs the agent and writes the state; all of them obey it.
Without a state, or with one that cannot be read, nothing is served.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

CLOSED = "no version is installed yet"


@dataclass(frozen=True, slots=True)
class State:
    """`closed`: why inference is refused; empty: it is not. `version`: what is served, or was last."""

    version: int = 0
    closed: str = CLOSED


class Pod:
    """`uid` names a folder of this machine's temporary files."""

    def __init__(self, uid: str, root: Path | None = None) -> None:
        self._folder = (root if root is not None else Path(tempfile.gettempdir())) / f"refit-{uid}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state, self._leave, self._left = self._folder / "state.json", self._folder / "leave", self._folder / "left"
        self._seen: tuple[int, State] = (0, State())

    def lead(self) -> bool:
        """True in exactly one process, until that ends: the descriptor stays open. What an earlier one left behind is void."""
        descriptor = os.open(self._folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._leave.unlink(missing_ok=True)
        self._left.unlink(missing_ok=True)
        self.write(State())
        return True

    def write(self, state: State) -> None:
        _replace(self._state, json.dumps(asdict(state)).encode())

    def write_report(self, rank: int, report: bytes) -> None:
        _replace(self._folder / f"rank-{rank}", report)

    def report(self, rank: int) -> bytes | None:
        """None: the rank is in another pod, or has written none yet."""
        try:
            return (self._folder / f"rank-{rank}").read_bytes()
        except FileNotFoundError:
            return None

    def read(self) -> State:
        """Asked for every request: the file is read again only after it was written."""
        try:
            written = os.stat(self._state).st_mtime_ns
            if written != self._seen[0]:
                self._seen = (written, State(**json.loads(self._state.read_text())))
        except (OSError, ValueError, TypeError):
            return State()
        return self._seen[1]

    def ask_to_leave(self) -> None:
        self._left.unlink(missing_ok=True)
        self._leave.touch()

    @property
    def asked_to_leave(self) -> bool:
        return self._leave.exists()

    def say_left(self, why_not: str) -> None:
        """Answers whoever asked; the next one asks again."""
        self._leave.unlink(missing_ok=True)
        self._left.write_text(why_not)

    def left(self) -> str | None:
        """None: not yet; else what kept it from leaving in order, or nothing."""
        return self._left.read_text() if self._left.exists() else None


def _replace(file: Path, content: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, file)

"""Processes that outlive the command which started them, and are ended by nobody but us.

A process is known by its pid together with its start time: a pid alone may by now belong to somebody else.
Signals go through a pidfd opened before that check, so that not even a race can hit a stranger.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from e2e.cluster.errors import ClusterError

LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Identity:
    pid: int
    started: int
    """In clock ticks since boot: field 22 of /proc/PID/stat."""


def identify(pid: int) -> Identity | None:
    """None when there is no such process, or when it is a zombie."""
    try:
        # the command name, in brackets, may itself contain spaces and brackets
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else Identity(pid, int(fields[19]))


def alive(identity: Identity) -> bool:
    return identify(identity.pid) == identity


def send(identity: Identity, number: signal.Signals) -> None:
    """A process that has ended, or whose pid is another's by now, gets nothing."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if alive(identity):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def stop(identities: Iterable[Identity], grace: float) -> None:
    """Asks them to end, all at once, and kills those that are there after `grace` seconds."""
    waiting = list(identities)
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        for identity in waiting:
            send(identity, number)
        deadline = time.monotonic() + patience
        while waiting := [identity for identity in waiting if alive(identity)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    if waiting:
        raise ClusterError(f"processes {[identity.pid for identity in waiting]} survive SIGKILL (see /proc/PID/stack); end what they wait for and try again")


def wait_until(ready: Callable[[], bool], what: str, seconds: float, log: Path | None = None, every: float = 0.05) -> None:
    """`what` completes the sentence "waited for"; `log` is quoted when the time is over."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {seconds:.0f} s for {what}{tail(log)}")
        time.sleep(every)


def tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"; the end of {log}:\n" + "\n".join(lines)


def call(command: Sequence[str | Path], *, seconds: float = 60.0, stdin: str | None = None, cwd: Path | None = None, output: IO[bytes] | None = None) -> str:
    """Runs to the end and returns stdout, unless both streams go to `output`; a failure quotes what the command said."""
    words = [str(word) for word in command]
    streams = output if output is not None else subprocess.PIPE
    try:
        done = subprocess.run(words, input=stdin, stdout=streams, stderr=streams, text=True, timeout=seconds, cwd=cwd, check=False)
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]} is not installed; install it and try again") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(words)}` did not end within {seconds:.0f} s") from error
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout or "").strip().splitlines()[-LOG_TAIL_LINES:])
        raise ClusterError(f"`{' '.join(words)}` failed with exit code {done.returncode}:\n{said}")
    return done.stdout

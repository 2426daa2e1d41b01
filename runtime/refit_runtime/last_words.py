"""What a process says before an error of ours ends it: the container's termination message, which `kubectl describe pod` and the group's conditions show.

The log would do where one process speaks; launchers and engines of several processes print their own summaries after ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from refit_api.errors import RefitError

TERMINATION_LOG = Path("/dev/termination-log")  # the kubelet's default; where it is not there, only the log has the words
MOST = 4000  # the kubelet keeps 4096 bytes


def say(reason: str, file: Path = TERMINATION_LOG) -> None:
    if os.access(file, os.W_OK):
        file.write_bytes(f"refit: {reason}\n".encode()[:MOST])


@contextmanager
def fatal(kind: type[RefitError] = RefitError, file: Path = TERMINATION_LOG) -> Iterator[None]:
    """Around what a process cannot go on without; errors of `kind` end it."""
    try:
        yield
    except kind as error:
        say(f"{type(error).__name__}: {error.message}", file)
        raise

"""A plug-in of vLLM for tests: stops at a step of a commit that a test names, and says what a rank counted.

It is loaded in every process of the server (`served._distribution`) and talks over files of the server's folder for temporary files. The agent stands
before it asks the engine for the step, outside of any deadline; the worker stands inside an install, after half of its copies.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

AGENT_STEPS = ("prepare", "pause", "install", "label", "resume")
COPIES = "copies"
LOOK_SECONDS = 0.02
FAIL = "fail"


class Steps:
    """Both ends of it. One step at a time."""

    def __init__(self, folder: Path) -> None:
        self._named, self._at, self._go, self._counted = (folder / name for name in ("step", "step-at", "step-go", "counted"))

    def name(self, step: str) -> None:
        """The next process that comes to it stands there."""
        self._at.unlink(missing_ok=True)
        self._go.unlink(missing_ok=True)
        _write(self._named, step)

    @property
    def reached(self) -> bool:
        return self._at.exists()

    def go_on(self, how: str = "") -> None:
        """`FAIL`: by a bug of the process that stands."""
        _write(self._go, how)

    @property
    def counted(self) -> dict[str, int]:
        """Of the rank, at its last install."""
        found: dict[str, int] = json.loads(self._counted.read_text())
        return found

    def count(self, counters: dict[str, int]) -> None:
        _write(self._counted, json.dumps(counters))

    def stands(self, step: str) -> bool:
        try:
            if self._named.read_text() != step:
                return False
        except FileNotFoundError:
            return False
        self._named.unlink()
        _write(self._at, str(os.getpid()))
        return True

    def told(self) -> bool:
        """Raises RuntimeError if it was told to fail."""
        if not self._go.exists():
            return False
        if self._go.read_text() == FAIL:
            raise RuntimeError("a bug, as a test wants it")
        return True


def _write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


def register() -> None:
    """Idempotent."""
    from refit_runtime.door import Door
    from refit_runtime.install import CopyList
    from refit_runtime.rank import GeneratorRank

    if hasattr(Door, "steps"):
        return
    Door.steps = steps = Steps(Path(tempfile.gettempdir()))
    for step in AGENT_STEPS:
        setattr(Door, step, _standing(steps, step, getattr(Door, step)))
    CopyList.install = _half(steps, CopyList.install)
    GeneratorRank.install = _counting(steps, GeneratorRank.install)


def _standing(steps: Steps, step: str, original: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(original)
    async def stand(*args: Any) -> Any:
        if steps.stands(step):
            while not steps.told():  # noqa: ASYNC110  a file: another process says it
                await asyncio.sleep(LOOK_SECONDS)
        return await original(*args)

    return stand


def _half(steps: Steps, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def install(self: Any, *args: Any) -> None:
        if steps.stands(COPIES):
            pairs = list(zip(self._live, self._arena, strict=True))
            for live, piece in pairs[: len(pairs) // 2]:
                live.copy_(piece)
            while not steps.told():
                time.sleep(LOOK_SECONDS)
        original(self, *args)

    return install


def _counting(steps: Steps, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def install(self: Any, *args: Any) -> Any:
        report = original(self, *args)
        steps.count(self.counters())
        return report

    return install

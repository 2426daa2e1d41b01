"""The engine as its agent reaches it: every call ends, and what goes wrong has a name.

- What an engine raises, also because it is gone, is an InstallError; no answer in time is EngineHung. Errors of ours pass as they are.
- A call without an answer is not cancelled: that would not take back what the engine was told, and an answer that comes late shows that it lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from refit_api.errors import EngineHung, InstallError, RefitError
from refit_api.wire import RankReport

from refit_runtime.ports import Clock, CommitOrder, EngineDriver, StageOrder
from refit_runtime.settings import RuntimeSettings

log = structlog.get_logger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 1.0


class Door:
    """An `EngineDriver` in front of another one. Idle engines answer in no time; a stage, a pause and a release have deadlines of their own."""

    def __init__(self, driver: EngineDriver, settings: RuntimeSettings, clock: Clock) -> None:
        self._driver, self._clock, self._seconds = driver, clock, settings.engine.pause_timeout_seconds
        self._drain_seconds = settings.versions.drain_seconds + settings.versions.lease_seconds
        self._late: dict[asyncio.Task[Any], float] = {}

    @property
    def silent_since(self) -> float | None:
        """When the oldest call was made that has no answer yet, beyond its deadline."""
        return min(self._late.values(), default=None)

    def close(self) -> None:
        """Nobody waits for late answers any more."""
        for task in self._late:
            task.cancel()

    async def status(self) -> tuple[RankReport, ...]:
        return await self._ask("report", self._driver.status(), self._seconds)

    async def stage(self, order: StageOrder) -> None:
        await self._ask("stage", self._driver.stage(order), order.deadline_seconds)

    async def prepare(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return await self._ask("prepare", self._driver.prepare(order), self._seconds)

    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None:
        await self._ask("pause", self._driver.pause(mode, clear_cache, timeout), 2 * timeout)

    async def install(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return await self._ask("install", self._driver.install(order), self._seconds)

    async def label(self, number: int) -> None:
        await self._ask("label", self._driver.label(number), self._seconds)

    async def resume(self) -> None:
        await self._ask("resume", self._driver.resume(), self._seconds)

    async def discard(self) -> None:
        await self._ask("discard", self._driver.discard(), self._seconds)

    async def release(self, number: int) -> None:
        await self._ask("release", self._driver.release(number), self._drain_seconds + self._seconds)

    async def fence(self, reason: str) -> None:
        await self._ask("fence", self._driver.fence(reason), self._seconds)

    async def end(self, reason: str) -> None:
        await self._driver.end(reason)

    async def _ask(self, call: str, work: Coroutine[Any, Any, T], seconds: float) -> T:
        began, task = self._clock.monotonic(), asyncio.ensure_future(work)
        try:
            await asyncio.wait((task,), timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            self._late[task] = began
            task.add_done_callback(self._answered)
            raise EngineHung(f"the engine gave no answer to {call} in {seconds:g} s: a rank or an engine core hangs", retry_after=RETRY_SECONDS, call=call)
        try:
            return task.result()
        except RefitError:
            raise
        except Exception as error:
            raise InstallError(f"the engine failed at {call} ({type(error).__name__}: {error}): its log says why", call=call) from error

    def _answered(self, task: asyncio.Task[Any]) -> None:
        began = self._late.pop(task)
        if not task.cancelled():
            log.info("the engine answered late", seconds=round(self._clock.monotonic() - began, 1), error=repr(task.exception()))

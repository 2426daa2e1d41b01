"""The fence of a generator: why it refuses requests, until a full install succeeds; and the end of its engine when nothing else helps.

It holds whatever the engine answers: the reason is set first, and what asks for it (readiness, reports, commits) asks here.
Fenced, or without an answer, for longer than progressDeadlineSeconds, the engine process ends, so that the kubelet starts it again.
"""

from __future__ import annotations

from typing import Protocol

import structlog
from refit_api.errors import RefitError

from refit_runtime.ports import Clock, CommitDriver
from refit_runtime.settings import RuntimeSettings

log = structlog.get_logger(__name__)


class Guarded(CommitDriver, Protocol):
    @property
    def silent_since(self) -> float | None: ...


class Fence:
    """`reason`: why the engine refuses requests; empty: it does not."""

    def __init__(self, settings: RuntimeSettings, engine: Guarded, clock: Clock) -> None:
        self._rollout, self._engine, self._clock = settings.rollout, engine, clock
        self._since = 0.0
        self._patient_until = 0.0
        self.reason = ""

    async def shut(self, reason: str) -> None:
        self._since = self._since if self.reason else self._clock.monotonic()
        self.reason = reason
        log.error("fenced: requests are refused until a whole version is installed", reason=reason, ends_after=self._rollout.progress_deadline_seconds)
        try:
            await self._engine.fence(reason)
        except RefitError as error:
            log.warning("the engine did not take part in its fence", error=error.message)

    def lift(self) -> None:
        self.reason = ""

    async def look(self) -> None:
        """Ends the engine in time."""
        now, limit = self._clock.monotonic(), self._rollout.progress_deadline_seconds
        since = min((at for at in (self._engine.silent_since, self._since if self.reason else None) if at is not None), default=now)
        if now > max(since + limit, self._patient_until):
            self._patient_until = now + limit
            await self.end(f"fenced for {limit:g} s: {self.reason}" if self.reason else f"the engine gave no answer for {limit:g} s")

    async def end(self, reason: str) -> None:
        """In Manual groups the framework decides: the fence is only reported."""
        if self._rollout.managed:
            await self._engine.end(reason)

"""One queue of groups: keyed, de-duplicated, delayed. Everything that happens puts a key; one pass per key runs at a time.

Invariants:
- a key put while its pass runs gets another pass after it: nothing seen late is lost;
- a key waits for the earliest of the times asked for, so that bursts coalesce and slow timers never hide fast ones;
- after a pass a key rests as long as the pass took: a large group that changes all the time gets half of the loop, not all of it;
- a failed pass comes back later, twice as late each time, with jitter, and never stops others: `retry_after` of a typed error sets the first delay;
- every key comes back after `resync` with jitter, whatever happened.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import structlog
from refit_api.errors import RefitError
from refit_api.wire import GroupRef

from refit_operator import telemetry
from refit_operator.ports import Clock

log = structlog.get_logger(__name__)

Work = Callable[[GroupRef], Awaitable[float | None]]
"""One pass; returns the seconds until the next one it wants by itself."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. `burst`: how long a key waits so that a burst of events becomes one pass."""

    burst: float = 0.2
    resync: float = 600.0
    backoff: float = 0.5
    backoff_limit: float = 60.0
    rest_limit: float = 2.0


@dataclass(slots=True)
class _Entry:
    due: float | None = None
    since: float = 0.0
    running: bool = False
    failures: int = 0
    rests_until: float = 0.0


@dataclass(slots=True)
class WorkQueue:
    """`put` may be called from any callback of the loop; `run` owns the passes."""

    work: Work
    clock: Clock
    random: Random
    pace: Pace = Pace()
    width: int = 16
    _entries: dict[GroupRef, _Entry] = field(default_factory=dict)
    _heap: list[tuple[float, int, GroupRef]] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _order: int = 0

    def put(self, key: GroupRef, delay: float | None = None) -> None:
        """Asks for a pass within `delay` seconds (the burst time when not given)."""
        now = self.clock.monotonic()
        entry = self._entries.setdefault(key, _Entry())
        due = max(now + (delay if delay is not None else self.pace.burst), entry.rests_until)
        if entry.due is not None and entry.due <= due:
            return
        entry.due, entry.since = due, now
        self._order += 1
        heapq.heappush(self._heap, (due, self._order, key))
        self._wake.set()

    def oldest(self) -> float:
        """How long the most overdue key has waited beyond its time: what the liveness probe looks at."""
        now = self.clock.monotonic()
        return max((now - entry.due for entry in self._entries.values() if entry.due is not None and not entry.running), default=0.0)

    async def run(self) -> None:
        """Until cancelled. A pass's failure is dealt with; a failure of the queue itself ends it."""
        async with asyncio.TaskGroup() as passes:
            running: set[asyncio.Task[None]] = set()
            while True:
                key = self._next(len(running))
                if key is None:
                    await self._sleep(len(running))
                    continue
                task = passes.create_task(self._pass(key))
                running.add(task)
                task.add_done_callback(running.discard)
                task.add_done_callback(lambda _: self._wake.set())

    def _next(self, running: int) -> GroupRef | None:
        now = self.clock.monotonic()
        while self._heap and self._heap[0][0] <= now and running < self.width:
            due, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.due != due or entry.running:  # replaced by an earlier time, or it will be put again when its pass ends
                continue
            entry.due, entry.running = None, True
            telemetry.QUEUE_AGE.observe(max(0.0, now - due))
            return key
        return None

    async def _sleep(self, running: int) -> None:
        self._wake.clear()
        wait = self._heap[0][0] - self.clock.monotonic() if self._heap and running < self.width else None
        with suppress(TimeoutError):
            async with asyncio.timeout(wait if wait is None else max(wait, 0.0)):  # wait_for of Python 3.11 may swallow a cancellation
                await self._wake.wait()

    async def _pass(self, key: GroupRef) -> None:
        entry, began = self._entries[key], self.clock.monotonic()
        again: float | None
        with telemetry.RECONCILE_SECONDS.time():
            try:
                again = await self.work(key)
                entry.failures = 0
            except Exception as error:  # noqa: BLE001 (one group's failure never stops the others; it is logged, counted and tried again)
                again = self._failed(key, entry, error)
        entry.running = False
        now = self.clock.monotonic()
        entry.rests_until = now + min(now - began, self.pace.rest_limit)
        self._requeue(key, entry, again)

    def _failed(self, key: GroupRef, entry: _Entry, error: Exception) -> float:
        entry.failures += 1
        telemetry.RECONCILE_ERRORS.labels(type(error).__name__).inc()
        wait: float = min(self.pace.backoff * 2 ** (entry.failures - 1), self.pace.backoff_limit) * self.random.uniform(0.8, 1.2)
        if isinstance(error, RefitError):
            wait = max(wait, error.retry_after or 0.0)
            log.warning("pass failed", group=f"{key.namespace}/{key.name}", error=type(error).__name__, message=error.message, retry_in=round(wait, 2))
        else:
            log.error("pass failed by a bug", group=f"{key.namespace}/{key.name}", retry_in=round(wait, 2), exc_info=error)
        return wait

    def _requeue(self, key: GroupRef, entry: _Entry, again: float | None) -> None:
        if again is None and entry.due is None:  # the work says that the key is gone for good
            del self._entries[key]
            return
        pending, entry.due = entry.due, None
        resync = self.pace.resync * self.random.uniform(0.8, 1.2)
        due = min(again if again is not None else resync, resync)
        if pending is not None:
            due = min(due, max(0.0, pending - self.clock.monotonic()))
        self.put(key, due)

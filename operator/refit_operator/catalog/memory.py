"""The memory store: one process, one event loop, so every call is one atomic change of a group's facts.

It lives inside the operator. Time is `clock.time()` at start plus monotonic time since: it reads as Unix seconds and never steps. While
`may_answer` is false (the operator lost its Lease) nobody is answered, and the time of such a gap, or of a stopped process, counts towards
no expiry: it ends with a new epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from refit_api import wire
from refit_api.errors import CatalogUnavailable, RefitError

from refit_operator.catalog import generators, model, phases, workers
from refit_operator.catalog.facts import GeneratorKey, Group, Moment, Pending, generator_of
from refit_operator.catalog.observed import observe
from refit_operator.decide.facts import CatalogFacts
from refit_operator.ports import Clock, Recorded, Terms

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0


class Signal:
    """Wakes everybody who waits now. Take `next` before looking at the facts: what changes after that is not missed."""

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def fire(self) -> None:
        self.next.set()
        self.next = asyncio.Event()


@dataclass(slots=True)
class _Kept:
    """The facts of a group and who waits for a change of them."""

    group: Group
    settled: bool = False
    calls: Signal = field(default_factory=Signal)
    versions: Signal = field(default_factory=Signal)
    orders: dict[GeneratorKey, Signal] = field(default_factory=dict)

    def wake_all(self) -> None:
        for signal in (self.calls, self.versions, *self.orders.values()):
            signal.fire()


class MemoryCatalog:
    """`ports.Catalog` for the reconciler, `service.Store` for the calls of pods."""

    def __init__(self, clock: Clock, may_answer: Callable[[], bool] = lambda: True) -> None:
        self._clock, self._may_answer = clock, may_answer
        self._start = clock.time() - clock.monotonic()
        self._alive = self.now()
        self._groups: dict[wire.GroupRef, _Kept] = {}
        self._subscribers: list[Callable[[wire.GroupRef], None]] = []

    def now(self) -> float:
        return self._start + self._clock.monotonic()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Time passes for the facts while this is open. If it cannot, whoever opened this ends with the reason."""
        owner = asyncio.current_task()
        assert owner is not None, "opened by a task"

        async def tick() -> None:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                self.tick()

        task = asyncio.create_task(tick(), name="catalog-time")
        task.add_done_callback(lambda ended: None if ended.cancelled() else owner.cancel())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            for kept in self._groups.values():
                kept.wake_all()

    def tick(self) -> None:
        if not self._may_answer():
            return
        self._notice_gap()
        for key, kept in list(self._groups.items()):
            self._put(key, model.tick(kept.group, self.now()))
            if kept.settled != kept.group.settled(self.now()):
                kept.settled = not kept.settled
                self._changed(key, kept)

    def _notice_gap(self) -> None:
        gap, self._alive = self.now() - self._alive, self.now()
        for key, kept in self._groups.items() if gap > 2 * TICK_SECONDS else ():
            if gap > kept.group.beat_seconds:
                self._put(key, model.resume(kept.group, gap))

    def _kept(self, key: wire.GroupRef) -> _Kept:
        if not self._may_answer():
            raise CatalogUnavailable("this catalog is not the leader at the moment", retry_after=1.0)
        if key not in self._groups:
            raise CatalogUnavailable(f"group {key.namespace}/{key.name} is not known to the catalog yet", retry_after=1.0)
        self._notice_gap()
        return self._groups[key]

    def _put(self, key: wire.GroupRef, group: Group, quiet: bool = False) -> None:
        kept = self._groups[key]
        before, kept.group = kept.group, group
        if group.versions is not before.versions:
            _tell(before, group)
            kept.versions.fire()
        if group is not before and not quiet:
            self._changed(key, kept)

    def _changed(self, key: wire.GroupRef, kept: _Kept) -> None:
        kept.calls.fire()
        for subscriber in self._subscribers:
            subscriber(key)

    # --- the calls of pods

    async def call(self, key: wire.GroupRef, method: str, request: Any, limit: float) -> Any:
        """The answer, waited for at most `limit` seconds."""
        began = self.now()
        while True:
            kept = self._kept(key)
            changed = kept.calls.next
            group, answer = model.handle(kept.group, method, request, Moment(self.now(), began))
            self._put(key, group, quiet=model.HANDLERS[method].quiet)
            if isinstance(answer, Pending):
                left = min(answer.until, began + limit) - self.now()
                if left > 0:
                    await _wait(changed, left)
                    continue
                answer = answer.otherwise
            if isinstance(answer, RefitError):
                raise answer
            return answer

    async def watch_versions(self, request: wire.ListVersions, limit: float) -> AsyncIterator[wire.Version]:
        """All that `request` lists, then each again whenever it changes."""
        sent: dict[int, wire.Version] = {}
        while True:
            changed = self._kept(request.group).versions.next
            for version in (await self.call(request.group, "WatchVersions", request, limit)).versions:
                if sent.get(version.number) != version:
                    sent[version.number] = version
                    yield version
            await changed.wait()

    async def watch_assignment(self, request: wire.WatchAssignment, limit: float) -> AsyncIterator[wire.Assignment]:
        """The caller's present order, then each newer one."""
        sent: wire.Assignment | None = None
        while True:
            changed = self._kept(request.group).orders.setdefault(generator_of(request.worker), Signal()).next
            order = await self.call(request.group, "WatchAssignment", request, limit)
            if order is not None and order != sent:
                sent = order
                yield order
            await changed.wait()

    def depart(self, key: wire.GroupRef, pod_uid: str) -> None:
        """The pod is gone."""
        if key in self._groups:
            kept = self._groups[key]
            for generator in [generator for generator in kept.orders if generator.pod_uid == pod_uid]:
                kept.orders.pop(generator).fire()
            self._put(key, workers.depart(kept.group, pod_uid))

    # --- the reconciler

    def subscribe(self, changed: Callable[[wire.GroupRef], None]) -> None:
        self._subscribers.append(changed)

    async def open(self, key: wire.GroupRef, terms: Terms, recorded: Recorded) -> None:
        kept = self._groups.get(key)
        if kept is None or kept.group.terms.uid != terms.uid:
            if kept is not None:
                await self.forget(key)
            group = model.start(key, terms, recorded, self.now())
            self._groups[key] = _Kept(group, settled=group.settled(self.now()))
        elif kept.group.terms != terms:
            self._put(key, model.retune(kept.group, terms))

    async def facts(self, key: wire.GroupRef) -> CatalogFacts:
        kept = self._groups.get(key)
        return observe(kept.group, self.now()) if kept is not None else CatalogFacts()

    async def confirm(self, key: wire.GroupRef, epoch: int, ceiling: int, records: frozenset[int]) -> None:
        self._put(key, model.confirm(self._groups[key].group, epoch, ceiling, records))

    async def protect(self, key: wire.GroupRef, numbers: frozenset[int], current: int = 0) -> None:
        self._put(key, model.protect(self._groups[key].group, numbers, current), quiet=True)

    async def assign(
        self,
        key: wire.GroupRef,
        pod_uid: str,
        instance: str,
        target: int,
        order: wire.Order,
        sources: tuple[wire.CoordinateSources, ...],
        deadline_seconds: float,
    ) -> None:
        kept, generator = self._groups[key], GeneratorKey(pod_uid, instance)
        self._put(key, generators.assign(kept.group, generator, target, order, sources, deadline_seconds), quiet=True)
        if generator in kept.orders:
            kept.orders[generator].fire()

    async def retire(self, key: wire.GroupRef, number: int, reason: str) -> None:
        self._put(key, phases.end(self._groups[key].group, number, reason, self.now()))

    async def abort(self, key: wire.GroupRef, number: int, reason: str) -> None:
        await self.retire(key, number, reason)

    async def remove(self, key: wire.GroupRef, number: int) -> None:
        self._put(key, model.remove(self._groups[key].group, number))

    async def forget(self, key: wire.GroupRef) -> None:
        kept = self._groups.pop(key, None)
        if kept is not None:
            kept.wake_all()


def _tell(before: Group, after: Group) -> None:
    """Each step in the life of a version is one line."""
    for number, entry in after.versions.items():
        version, known = entry.version, before.versions.get(number)
        if known is None or known.version.phase is not version.phase:
            place = {"namespace": after.ref.namespace, "group": after.ref.name}
            log.info("version moved", **place, version=number, step=version.step, phase=version.phase.value, reason=version.reason)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # wait_for of Python 3.11 may swallow a cancellation
            await event.wait()

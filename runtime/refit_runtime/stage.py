"""A stage of one rank, from a version's number to its verified bytes in spare memory.

    wait until it is Ready -> plan -> free a part of the arena (close, drain) -> lease -> pull and verify -> release the lease

Live parameters are not touched, requests run on. A part of the arena is reused only after the catalog said that nobody reads it (O9). What a failed
stage verified stays and is not pulled again if the same version is asked for next. Every wait ends at the order's deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from refit_api.errors import CatalogUnavailable, DigestMismatch, PeerError, PeerUnavailable, StaleOrder, TransferTimeout, VersionRetired
from refit_api.wire import CloseHolder, GetManifest, GetVersion, ListShards, Manifest, Role, Source, Timing, VersionFacts, VersionPhase, WorkerRef

from refit_runtime.arena import Arena, Holding
from refit_runtime.connections import Connections
from refit_runtime.digest import Digests, root
from refit_runtime.lease import Lease
from refit_runtime.offers import Goal
from refit_runtime.plan.plan import CoordinatePlan, Plan
from refit_runtime.planner import Planner
from refit_runtime.ports import Seams, StageOrder
from refit_runtime.pull import Pull, Stuck
from refit_runtime.settings import RuntimeSettings
from refit_runtime.worker import Worker

log = structlog.get_logger(__name__)

WAIT_SECONDS = 15.0  # of one call that waits at the catalog
STUCK_TRIES = 2
T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """Of the present or last stage, for reports."""

    number: int = 0
    plan_key: str = ""
    bytes: int = 0
    timings: list[Timing] = field(default_factory=list)
    read_from: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))


class Stager:
    """`holdings[part]` is what each part of the arena holds; the caller serialises stages, manifests are answered at any time."""

    def __init__(self, settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str, parts: int) -> None:
        self._settings, self._seams, self._worker, self._planner, self._coordinate = settings, seams, worker, planner, coordinate
        self.arena = Arena(seams.memory, seams.transport, parts)
        self.holdings: list[Holding | None] = [None] * parts
        self.progress = Progress()
        self._connections = Connections(seams.transport)

    def held(self, number: int) -> Holding | None:
        """A complete one."""
        return next((holding for holding in self.holdings if holding is not None and holding.number == number and holding.complete), None)

    def answer(self, request: GetManifest) -> Manifest:
        """To another rank that reads from us; only what is verified is offered, and nothing that is being closed."""
        if request.holder != self._worker.ref:
            raise PeerUnavailable("this process started again: ask the catalog for its present holders", seen=request.holder.incarnation)
        holding = next((each for each in self.holdings if each is not None and each.number == request.number and not each.closed), None)
        if holding is None:
            raise VersionRetired(f"version {request.number} is not held here any more: use another holder", seen=request.number)
        return holding.manifest(self.arena, self._seams.transport, self._worker.ref)

    def stage(self, order: StageOrder, serving: int, cancelled: Callable[[], bool]) -> Holding:
        """`serving`: the version to keep in the other part, if there is one. Raises the errors of the rules above."""
        deadline = self._seams.clock.monotonic() + order.deadline_seconds
        self.progress = Progress(order.number)
        with self._timed("version"):
            facts = self._ready(order.number, deadline, cancelled)
        with self._timed("plan"):
            planned = self._planner.planned(facts.version.plan_key)
            class_ = planned.class_of(self._coordinate, self._worker.layout)
            plan, mine = planned.plan, planned.plan.coordinate(class_, self._coordinate)
        self.progress.plan_key, self.progress.bytes = planned.key, mine.bytes
        if self.arena.part_bytes < mine.arena_bytes:
            for part, holding in enumerate(self.holdings):
                if holding is not None:
                    self.free(part, deadline, cancelled)
            self.arena.reserve(mine.arena_bytes)
        holding = self._holding(facts, plan, mine, serving, deadline, cancelled)
        if holding.complete:
            return holding
        digests = Digests(self._worker.registered.group_uid, order.number)
        roots = {run.index: facts.run_roots[run.index] for run in holding.runs}
        find = _Finder(self._seams, self._worker, order, class_, self._coordinate, tuple(dict.fromkeys(run.slot for run in holding.runs)))
        for attempt in range(STUCK_TRIES + 1):
            goal = Goal(holding, plan, roots, digests, self._worker.ref, self._settings.transport.chunk_bytes, deadline)
            try:
                self._pull(goal, find, cancelled)
                return holding
            except Stuck as error:
                log.warning("a read does not end: the transport agent is replaced", version=order.number, error=error.message)
                self._connections.clear()
                self.arena.register_again()
                self._worker.renew()
                if attempt == STUCK_TRIES or cancelled():
                    raise
        raise AssertionError("unreachable")

    def _pull(self, goal: Goal, find: _Finder, cancelled: Callable[[], bool]) -> None:
        with self._timed("lease"):
            lease = self._patiently(lambda: find.lease(), goal.deadline, cancelled)
        with lease:
            pull = Pull(goal, self.arena, self._seams, self._connections, lease, lambda out: find.more(lease, out), cancelled)
            try:
                with self._timed("pull"):
                    pull.run(find.found)
            finally:
                for role, size in pull.read_from.items():
                    self.progress.read_from[role] += size

    def _ready(self, number: int, deadline: float, cancelled: Callable[[], bool]) -> VersionFacts:
        """The version with all run roots, which give its root."""
        while True:
            left = max(0.0, deadline - self._seams.clock.monotonic())
            ask = GetVersion(self._worker.group, number, wait_seconds=min(left, WAIT_SECONDS))
            facts = self._patiently(lambda ask=ask: self._seams.catalog.get_version(ask), deadline, cancelled)  # type: ignore[misc]
            version = facts.version
            if version.phase is VersionPhase.READY:
                seen = root(facts.run_roots[run] for run in sorted(facts.run_roots))
                if seen != version.root:
                    raise DigestMismatch(
                        f"version {number}: its run roots do not give its root", seen=seen.hex(), expected=version.root.hex(), source="catalog"
                    )
                return facts
            if version.phase is not VersionPhase.PUBLISHING:
                raise VersionRetired(f"version {number} is {version.phase.value} ({version.reason}): take another", seen=version.phase.value)
            if left == 0:
                raise TransferTimeout(f"version {number} is still Publishing at the deadline", seen=version.phase.value)

    def _holding(self, facts: VersionFacts, plan: Plan, mine: CoordinatePlan, serving: int, deadline: float, cancelled: Callable[[], bool]) -> Holding:
        """What is there of the version already, or an empty one in a part that was freed."""
        version = facts.version
        for holding in self.holdings:
            if holding is not None and holding.is_of(version.number, version.plan_key) and holding.root == version.root and not holding.closed:
                return holding
        part = next((p for p, holding in enumerate(self.holdings) if holding is None), None)
        if part is None:
            part = next((p for p, holding in enumerate(self.holdings) if holding is not None and holding.number != serving), 0)
            with self._timed("drain"):
                self.free(part, deadline, cancelled)
        runs = tuple(plan.runs[run] for run in mine.offsets)
        holding = Holding(version.number, version.plan_key, part, runs, dict(mine.offsets), version.root, verified={run.index: 0 for run in runs})
        self.holdings[part] = holding
        return holding

    def free(self, part: int, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Closes what the part holds and waits until nobody reads it. Raises PeerUnavailable if that lasts too long."""
        holding = self.holdings[part]
        if holding is not None and self._settings.engine.relays:
            readers = self._close(holding.number, 0.0, deadline, cancelled)
            holding.closed = True
            while readers:
                left = deadline - self._seams.clock.monotonic()
                if left <= 0:
                    raise PeerUnavailable(f"version {holding.number} is still read by {', '.join(readers)}", retry_after=1.0, readers=", ".join(readers))
                readers = self._close(holding.number, min(left, WAIT_SECONDS), deadline, cancelled)
        self.holdings[part] = None

    def _close(self, number: int, seconds: float, deadline: float, cancelled: Callable[[], bool]) -> tuple[str, ...]:
        ask = CloseHolder(self._worker.group, self._worker.ref, number, seconds)
        return self._patiently(lambda: self._seams.catalog.close_holder(ask), deadline, cancelled).readers

    def close(self) -> None:
        self._connections.clear()

    def _patiently(self, call: Callable[[], T], deadline: float, cancelled: Callable[[], bool]) -> T:
        """Again while the answer says when, until the deadline: an absent catalog, a last holder, readers."""
        while True:
            try:
                return call()
            except PeerError as error:  # noqa: PERF203  a wait, not a loop over data
                if isinstance(error, CatalogUnavailable):
                    self._worker.poke()
                left = deadline - self._seams.clock.monotonic()
                if error.retry_after is None or left <= 0:
                    raise
                if cancelled():
                    raise StaleOrder("the stage was superseded while it waited") from error
                self._seams.clock.sleep(min(left, error.retry_after * self._seams.random.uniform(0.5, 1.0)))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start, began = self._seams.clock.time(), self._seams.clock.monotonic()
        try:
            yield
        finally:
            self.progress.timings.append(Timing(stage, start, self._seams.clock.monotonic() - began))


class _Finder:
    """Where to read from: what the order says, else who the catalog lists. `found`: leased, in the order in which they are tried."""

    def __init__(self, seams: Seams, worker: Worker, order: StageOrder, class_: str, coordinate: str, slots: tuple[str, ...]) -> None:
        self._seams, self._worker, self._order = seams, worker, order
        self._ask = ListShards(worker.group, order.number, slots, class_, coordinate)
        self._slots = set(slots)
        self._given = tuple(order.sources.get(coordinate, ()))
        self.found: list[Source] = []

    def lease(self) -> Lease:
        """On the given relays; if they are gone, or none were given, on trainers; where trainers lack a slot, on complete relays too."""
        given, self._given = self._given, ()
        if given:
            try:
                return self._leased(given)
            except PeerUnavailable:
                log.info("the assigned sources are gone: others are asked for", version=self._order.number)
        listed = self._listed(set())
        trainers = [source for source in listed if source.worker.role is Role.TRAINER]
        covered = {slot for source in trainers if source.complete for slot in source.slots}
        return self._leased(trainers if self._slots <= covered else [*(s for s in listed if s.worker.role is Role.GENERATOR), *trainers])

    def _leased(self, sources: Sequence[Source]) -> Lease:
        if not sources:
            raise PeerUnavailable(f"nobody offers version {self._order.number} to this rank now", retry_after=1.0)
        self.found = list(sources)
        return Lease(self._worker, self._seams.catalog, self._seams.clock, self._order.number, tuple(source.worker for source in sources))

    def more(self, lease: Lease, out: set[WorkerRef]) -> Sequence[Source]:
        """Everybody else who has it."""
        found: list[Source] = []
        try:
            for source in self._listed(out):
                found += self._also(lease, source)
        except CatalogUnavailable:
            self._worker.poke()  # the caller asks again, a few times
        return found

    def _also(self, lease: Lease, source: Source) -> list[Source]:
        try:
            lease.extend((source.worker,))
        except PeerUnavailable:
            return []
        return [source]

    def _listed(self, out: set[WorkerRef]) -> list[Source]:
        sources = self._seams.catalog.list_shards(self._ask).sources
        return [source for source in sources if not source.closed and source.worker not in out and source.worker != self._worker.ref]

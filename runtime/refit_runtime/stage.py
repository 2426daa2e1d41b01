"""A stage of one rank, from a version's number to its verified bytes in spare memory.

    wait until it is Ready -> plan -> free a part of the arena (close, drain) -> lease -> pull and verify -> release the lease

A subset whose base is whole here takes over the base's bytes, and reads what it replaces; without its base all of it is pulled.

Live parameters are not touched, requests run on. A part of the arena is reused only after the catalog said that nobody reads it (O9). What a failed
stage verified stays and is not pulled again if the same version is asked for next. Every wait ends at the order's deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
from refit_api.errors import CatalogUnavailable, DigestMismatch, PeerUnavailable, TransferTimeout, VersionRetired
from refit_api.wire import GetVersion, ListShards, Role, Source, VersionFacts, VersionPhase, WorkerRef

from refit_runtime.arena import Arena, Holding, Holdings
from refit_runtime.connections import Connections
from refit_runtime.digest import Digests, root
from refit_runtime.lease import Lease
from refit_runtime.offers import Goal
from refit_runtime.patience import WAIT_SECONDS, Patience, never
from refit_runtime.plan.plan import CoordinatePlan, Plan
from refit_runtime.planner import Planner
from refit_runtime.ports import Seams, StageOrder
from refit_runtime.pull import Pull, Stuck
from refit_runtime.settings import RuntimeSettings
from refit_runtime.stopwatch import Stopwatch
from refit_runtime.subset import subset_of
from refit_runtime.worker import Worker

log = structlog.get_logger(__name__)

STUCK_TRIES = 2


@dataclass(slots=True)
class Progress:
    """Of the present or last stage, for reports."""

    watch: Stopwatch
    number: int = 0
    plan_key: str = ""
    bytes: int = 0
    read_from: Counter[tuple[str, Role]] = field(default_factory=Counter)  # by pod UID and role


class Stager:
    """The caller serialises stages; manifests of what is held are answered at any time."""

    def __init__(self, settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str, parts: int) -> None:
        self._settings, self._seams, self._worker, self._planner, self.coordinate = settings, seams, worker, planner, coordinate
        self.arena = Arena(seams.memory, seams.transport, parts)
        self.holdings = Holdings(self.arena, seams.transport, lambda: worker.ref, parts)
        self.progress = Progress(Stopwatch(seams.clock))
        self._connections = Connections(seams.transport)
        self._patience = Patience(seams, worker)

    def stage(self, order: StageOrder, serving: int, cancelled: Callable[[], bool]) -> Holding:
        """`serving`: the version to keep in the other part, if there is one. Raises the errors of the rules above."""
        deadline = self._seams.clock.monotonic() + order.deadline_seconds
        self.progress = Progress(Stopwatch(self._seams.clock), order.number)
        with self.progress.watch.timed("version"):
            facts = self._ready(order.number, deadline, cancelled)
        with self.progress.watch.timed("plan"):
            planned = self._planner.planned(facts.version.plan_key)
            class_ = planned.class_of(self.coordinate, self._worker.layout)
            plan, mine = planned.plan, planned.plan.coordinate(class_, self.coordinate)
        self.progress.plan_key, self.progress.bytes = planned.key, mine.bytes
        if self.arena.part_bytes < mine.arena_bytes:
            for part in range(len(self.holdings.parts)):
                self.free(part, deadline, cancelled)
            self.arena.reserve(mine.arena_bytes)
        holding = self._holding(facts, plan, mine, serving, deadline, cancelled)
        if holding.complete:
            return holding
        digests = Digests(self._worker.registered.group_uid, order.number)
        roots = {run.index: facts.run_roots[run.index] for run in holding.runs}
        find = _Finder(self._seams, self._worker, order, class_, self.coordinate, tuple(dict.fromkeys(run.slot for run in holding.runs)))
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
        with self.progress.watch.timed("lease"):
            lease = self._patience.until(goal.deadline, find.lease, cancelled)
        with lease:
            pull = Pull(goal, self.arena, self._seams, self._connections, lease, lambda out: find.more(lease, out), cancelled)
            try:
                with self.progress.watch.timed("pull"):
                    pull.run(find.found)
            finally:
                self.progress.read_from += pull.read_from

    def _ready(self, number: int, deadline: float, cancelled: Callable[[], bool]) -> VersionFacts:
        """The version with all run roots, which give its root."""
        while True:
            left = max(0.0, deadline - self._seams.clock.monotonic())
            ask = GetVersion(self._worker.group, number, wait_seconds=min(left, WAIT_SECONDS))
            facts = self._patience.until(deadline, partial(self._seams.catalog.get_version, ask), cancelled)
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
        for holding in self.holdings.all():
            if holding.is_of(version.number, version.plan_key) and holding.root == version.root and not holding.closed:
                return holding
        base = next((each for each in self.holdings.all() if each.is_of(version.base, version.plan_key) and each.complete), None)
        part = next((p for p, holding in enumerate(self.holdings.parts) if holding is None), None)
        if part is None:
            part = next((holding.part for holding in self.holdings.all() if holding.number != serving), 0)
            with self.progress.watch.timed("drain"):
                self.free(part, deadline, cancelled)
        runs = tuple(plan.runs[run] for run in mine.offsets)
        holding = Holding(version.number, version.plan_key, part, runs, dict(mine.offsets), version.root, verified={run.index: 0 for run in runs})
        holding.base, holding.select = version.base, version.select
        if base is not None and version.select is not None:
            self._take_over(base, part, mine.arena_bytes)
            holding.missing = plan.selected(subset_of(version.select), mine.offsets)
        self.holdings.parts[part] = holding
        return holding

    def _take_over(self, base: Holding, part: int, size: int) -> None:
        if base.part == part:
            return
        with self.progress.watch.timed("base"):
            copies = self._seams.memory.copies([(self.arena.part(part)[:size], self.arena.part(base.part)[:size])])
            copies.start()
            copies.wait()

    def free(self, part: int, deadline: float, cancelled: Callable[[], bool] = never) -> None:
        """Nobody reads the part any more when this returns."""
        holding = self.holdings.parts[part]
        if holding is not None and self._settings.engine.relays:
            self._patience.drained(holding, deadline, cancelled)
        self.holdings.parts[part] = None

    @property
    def drain_seconds(self) -> float:
        return self._settings.versions.drain_seconds + self._worker.registered.lease_seconds

    def give_up(self, unwanted: Callable[[Holding], bool]) -> None:
        """Closes what is unwanted and waits until nobody reads it. Raises PeerUnavailable."""
        deadline = self._seams.clock.monotonic() + self.drain_seconds
        for holding in self.holdings.all():
            if unwanted(holding):
                self.free(holding.part, deadline)

    def close(self) -> None:
        self._connections.clear()


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

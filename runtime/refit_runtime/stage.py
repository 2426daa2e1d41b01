"""A stage of one rank, from a version's number to its verified bytes in spare memory.

    wait until it is Ready -> plan -> free a part of the arena (close, drain) -> lease -> pull and verify -> release the lease

A subset whose base is whole here takes over the base's bytes, and reads what it replaces; without its base all of it is pulled.

Live parameters are not touched, requests run on. A part of the arena is reused only after the catalog said that nobody reads it (O9). What a failed
stage verified stays and is not pulled again if the same version is asked for next. Every wait ends at the order's deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog
from refit_api.errors import DigestMismatch, RefitError, TransferTimeout, VersionRetired
from refit_api.wire import GetVersion, Role, VersionFacts, VersionPhase

from refit_runtime.arena import SPARE, Arena, Holding, Holdings
from refit_runtime.connections import Connections
from refit_runtime.digest import Digests, root
from refit_runtime.finder import Finder
from refit_runtime.offers import Goal
from refit_runtime.patience import WAIT_SECONDS, Patience, never
from refit_runtime.plan.plan import CoordinatePlan, Plan, Run
from refit_runtime.planner import Planner
from refit_runtime.ports import Seams, StageOrder
from refit_runtime.pull import Limit, Pull, Stuck, in_arena
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version that is Ready, and what of it this coordinate needs. `serving`: the version that is live, 0 for none."""

    facts: VersionFacts
    plan: Plan
    class_: str
    mine: CoordinatePlan
    runs: tuple[Run, ...]
    serving: int

    def holding(self, part: int) -> Holding:
        """With nothing in it yet."""
        version = self.facts.version
        made = Holding(version.number, version.plan_key, part, self.runs, dict(self.mine.offsets), version.root, verified={run.index: 0 for run in self.runs})
        made.base, made.select = version.base, version.select
        return made


class Stager:
    """The caller serialises stages; manifests of what is held are answered at any time."""

    def __init__(self, settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str, parts: int) -> None:
        self._settings, self._seams, self._worker, self._planner, self.coordinate = settings, seams, worker, planner, coordinate
        self.arena = Arena(seams.memory, seams.transport, parts)
        self.holdings = Holdings(self.arena, seams.transport, lambda: worker.ref, parts)
        self.progress = Progress(Stopwatch(seams.clock))
        self._connections = Connections(seams.transport)
        self._patience = Patience(seams, worker)

    def reserve(self, total: int) -> None:
        """Memory for so many bytes of weights, beside the live ones. Raises SpecError with the numbers if it does not fit."""
        self.arena.reserve(int(total * (1 + SPARE)))

    def stage(self, order: StageOrder, serving: int, cancelled: Callable[[], bool]) -> Holding:
        """`serving`: the version to keep in the other part, if there is one. Raises the errors of the rules above."""
        limit = Limit(self._seams.clock.monotonic() + order.deadline_seconds, cancelled)
        self.progress = Progress(Stopwatch(self._seams.clock), order.number)
        with self.progress.watch.timed("version"):
            facts = self._ready(order.number, limit.deadline, cancelled)
        with self.progress.watch.timed("plan"):
            planned = self._planner.planned(facts.version.plan_key)
            class_ = planned.class_of(self.coordinate, self._worker.layout)
            mine = planned.plan.coordinate(class_, self.coordinate)
        self.progress.plan_key, self.progress.bytes = planned.key, mine.bytes
        runs = tuple(planned.plan.runs[run] for run in mine.offsets)
        find = Finder(self._seams, self._worker, order, class_, self.coordinate, tuple(dict.fromkeys(run.slot for run in runs)))
        return self._bring(Wanted(facts, planned.plan, class_, mine, runs, serving), find, limit)

    def _bring(self, wanted: Wanted, find: Finder, limit: Limit) -> Holding:
        if self.arena.part_bytes < wanted.mine.arena_bytes:
            for part in range(len(self.holdings.parts)):
                self.free(part, limit.deadline, limit.cancelled)
            self.arena.reserve(wanted.mine.arena_bytes)
        holding = self._holding(wanted, limit.deadline, limit.cancelled)
        if holding.complete:
            return holding
        for attempt in range(STUCK_TRIES + 1):
            try:
                self._pull(self.goal(wanted, holding), find, limit)
                return holding
            except Stuck as error:  # noqa: PERF203  a pull, not a loop over data
                self.replace_agent(error)
                if attempt == STUCK_TRIES or limit.cancelled():
                    raise
        raise AssertionError("unreachable")

    def goal(self, wanted: Wanted, holding: Holding) -> Goal:
        digests = Digests(self._worker.registered.group_uid, holding.number)
        roots = {run.index: wanted.facts.run_roots[run.index] for run in holding.runs}
        return Goal(holding, wanted.plan, roots, digests, self._worker.ref, self._settings.transport.chunk_bytes)

    def replace_agent(self, error: RefitError) -> None:
        log.warning("a read does not end: the transport agent is replaced", error=error.message)
        self._connections.clear()
        self.arena.register_again()
        self._worker.renew()

    def _pull(self, goal: Goal, find: Finder, limit: Limit) -> None:
        with self.progress.watch.timed("lease"):
            lease = self._patience.until(limit.deadline, find.lease, limit.cancelled)
        with lease:
            placed = in_arena(goal.holding, self.arena, goal.chunk_bytes)
            pull = Pull(goal, self.arena, self._seams, self._connections, lease, placed, lambda out: find.more(lease, out))
            try:
                with self.progress.watch.timed("pull"):
                    pull.run(find.found, limit)
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

    def _holding(self, wanted: Wanted, deadline: float, cancelled: Callable[[], bool]) -> Holding:
        """What is there of the version already, or an empty one in a part that was freed."""
        version = wanted.facts.version
        for holding in self.holdings.all():
            if holding.is_of(version.number, version.plan_key) and holding.root == version.root and not holding.closed:
                return holding
        base = next((each for each in self.holdings.all() if each.is_of(version.base, version.plan_key) and each.complete), None)
        part = next((p for p, holding in enumerate(self.holdings.parts) if holding is None), None)
        if part is None:
            part = next((holding.part for holding in self.holdings.all() if holding.number != wanted.serving), 0)
            with self.progress.watch.timed("drain"):
                self.free(part, deadline, cancelled)
        holding = wanted.holding(part)
        if base is not None and version.select is not None:
            self._take_over(base, part, wanted.mine.arena_bytes)
            holding.missing = wanted.plan.selected(subset_of(version.select), wanted.mine.offsets)
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

    def find(self, number: int) -> Holding | None:
        """What may be installed. Raises what took it away."""
        if (lost := self.lost()) is not None:
            raise lost
        return self.holdings.find(number)

    def installed(self, holding: Holding) -> None:
        """It is live; what was kept for its install only goes."""

    def lost(self) -> RefitError | None:
        """Why what was staged cannot be installed any more."""
        return None

    def close(self) -> None:
        self._connections.clear()

"""What a trainer rank does: publish its shards as a version, serve them, give them up.

    bind -> publish(step): number from the catalog -> free an arena part -> snapshot | then beside the training: digests, open, seal

- All ranks call `publish` with the same step; the key `runId:step` gives all of them one number without a collective.
- Training is stopped for the snapshot only; with snapshot InPlace, which copies nothing, until `release`.
- A publish with `select` replaces these tensors in what was published last; all ranks select alike. Whether that is still held the catalog decides.
- What fails after the snapshot fails the version, is logged, and never stops training.
- The manifest of a version is served before its shard is advertised (O4); memory is reused after its holder was closed and drained (O9).
- While the catalog is away `publish` raises CatalogUnavailable(retry_after): nothing hangs.
"""

from __future__ import annotations

from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import structlog
from refit_api.errors import CatalogUnavailable, PeerUnavailable, PlanError, RefitError, SpecError, VersionRetired
from refit_api.tensors import box_elements
from refit_api.wire import CreateVersion, EndVersion, OpenShard, Role, SealShard, Select, Version

from refit_runtime import last_words
from refit_runtime.arena import SPARE, Arena, Holding, Holdings, device_of
from refit_runtime.digest import Digests, run_root
from refit_runtime.inplace import InPlace, refuse_unreadable
from refit_runtime.patience import Patience
from refit_runtime.plan.key import canonical_order, encode_shards
from refit_runtime.plan.plan import Plan, SourcePlan
from refit_runtime.planner import Planned, Planner
from refit_runtime.ports import Seams, WeightSource
from refit_runtime.settings import RuntimeSettings
from refit_runtime.snapshot import Snapshot
from refit_runtime.subset import SubsetSnapshot, refuse_unmatched, replaces, subset_of
from refit_runtime.worker import Worker

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

PLAN_TRIES = 4  # the class set may change while we plan
CALL_MARGIN = 5.0
UNREAD_SHOWN = 8
SEAL_SECONDS = 30.0  # that a publish waits for the seal of the one before


Taken = Snapshot | SubsetSnapshot | InPlace


class _Key(NamedTuple):
    """What a list of copies is made for. `base`: the part that a subset's base lies in."""

    allocations: int
    plan: str
    part: int
    select: Select | None
    base: int

    def is_stale(self, new: _Key) -> bool:
        """Another allocation, another plan, or another subset."""
        return self[:2] != new[:2] or replaces(new.select, self.select)


class TrainerClient:
    """Construct it before the process group (O1), bind it once the model exists (O2). `run_id`: of all ranks alike, another after each restart."""

    def __init__(self, settings: RuntimeSettings, rank: int, world: int, seams: Seams, run_id: str | None = None) -> None:
        self._run_id = run_id if run_id is not None else settings.run.id
        if not self._run_id:
            raise SpecError("the trainer has no run id: pass run_id, set REFIT_RUN_ID, or start it with torchrun; it must change with each restart")
        self._settings, self._seams, self._rank = settings, seams, rank
        self.worker = Worker(settings, seams, Role.TRAINER, rank, world)
        self.planner = Planner(seams.catalog, self.worker.group)
        self.arena = Arena(seams.memory, seams.transport, settings.trainer.arenas)
        self._holdings = Holdings(self.arena, seams.transport, lambda: self.worker.ref, settings.trainer.arenas)
        self._patience = Patience(seams, self.worker)
        self._planned: Planned | None = None
        self._in_place = settings.trainer.snapshot == "InPlace"
        self._snapshots: dict[_Key, Taken] = {}
        self._source: WeightSource | None = None
        self._order: tuple[int, ...] = ()
        self._pool = ThreadPoolExecutor(1, "refit-seal")
        self._sealing: Future[None] | None = None

    @last_words.fatal()
    def bind(self, source: WeightSource) -> None:
        """Registers with the layout of the live weights; allocates the arena, if there is one."""
        assert self._source is None, "bind once"
        shards = source.shards()
        self._source, self._order = source, canonical_order(shards)
        self.arena.device = self._device(source)
        if self._in_place:
            refuse_unreadable(shards.shards, (source.view(index) for index in range(len(shards.shards))))
        else:
            self.arena.reserve(int(sum(box_elements(shard.box) * shard.tensor.dtype.bytes for shard in shards.shards) * (1 + SPARE)))
        layout = encode_shards(shards)
        self.worker.join(layout, self._holdings.answer, self._repeat, arena_bytes=self.arena.bytes, run_id=self._run_id)
        self.planner.own(self.worker.layout, layout)

    def _device(self, source: WeightSource) -> torch.device:
        import torch

        if self._settings.trainer.snapshot == "Host":
            return torch.device("cpu")
        return device_of((shard.tensor.name, source.view(index)) for index, shard in enumerate(source.shards().shards))

    def publish(self, step: int, select: Select | None = None) -> Version | None:
        """The version that holds the present weights, or None if `onBusy: Skip` skipped it; with `select`, of these tensors only, the rest as before.

        Raises PeerError (NoClass, CatalogUnavailable; VersionRetired: there is nothing that a subset could complete), PlanError, SpecError.
        """
        if self._sealing is not None and futures.wait([self._sealing], SEAL_SECONDS).not_done:  # a failure was logged, and failed its version
            raise PeerUnavailable(f"step {step}: the version before is not sealed yet: the catalog is away, or digests are slow", retry_after=2.0)
        select = select.ordered() if select is not None else None
        base = self._base(step, select) if select is not None else None
        version = self._create(step, base, select)
        if version is None:
            return None
        try:
            snapshot, holding = self._snapshot(version, base)
        except RefitError as error:
            self._abort(version.number, error)
            raise
        self._sealing = self._pool.submit(self._seal, version, snapshot, holding)
        return version

    def _base(self, step: int, select: Select) -> Holding:
        """What was published last, if all of it is here."""
        if self._in_place:
            raise SpecError("select: a subset replaces tensors in an arena; spec.trainer.snapshot InPlace has none: use Device or Host", seen="InPlace")
        last = max(self._holdings.all(), key=lambda held: held.number, default=None)
        if last is None or last.closed or not last.complete or self._planned is None:
            text = f"step {step}: rank {self._rank} holds no sealed version that a subset could complete: publish all tensors once"
            raise VersionRetired(text, seen=last.number if last is not None else None)
        refuse_unmatched(self._planned.plan, select)
        return last

    def _create(self, step: int, base: Holding | None, select: Select | None) -> Version | None:
        clock = self._seams.clock
        deadline = clock.monotonic() + self._settings.versions.publish_deadline_seconds + CALL_MARGIN
        for _ in range(PLAN_TRIES):
            key, slots = (self._planned.key, self._planned.plan.slots) if self._planned is not None else ("", ())
            number = base.number if base is not None else 0
            ask = CreateVersion(self.worker.group, self.worker.ref, f"{self._run_id}:{step}", self._run_id, step, key, slots, number, select)
            try:
                created = self._seams.catalog.create_version(ask, max(1.0, deadline - clock.monotonic()))
            except CatalogUnavailable:
                self.worker.poke()
                raise
            if created.version is not None or created.skipped:
                return created.version
            with last_words.fatal(PlanError):
                self._planned = self.planner.planned(created.plan_key)
            if self._rank == 0 and (idle := self._planned.plan.unread):
                log.info("tensors that no engine reads are not moved", tensors=idle[:UNREAD_SHOWN], more=max(0, len(idle) - UNREAD_SHOWN))
        raise PeerUnavailable(f"step {step}: the layouts of the group changed {PLAN_TRIES} times while this rank planned", retry_after=5.0)

    def _snapshot(self, version: Version, base: Holding | None) -> tuple[Taken, Holding]:
        planned, source = self._planned, self._source
        assert planned is not None, "a version is created with a plan"
        assert source is not None, "bind before publish"
        deadline = self._seams.clock.monotonic() + self._settings.versions.drain_seconds + self.worker.registered.lease_seconds
        mine = planned.plan.source(self._rank) if self._stale(planned) else None
        if mine is not None and not self._in_place and mine.arena_bytes > self.arena.part_bytes:
            for held in self._holdings.all():
                self._free(held, deadline)
            self.arena.reserve(mine.arena_bytes)
        if all(part is not None for part in self._holdings.parts):
            self._free(min(self._holdings.all(), key=lambda held: held.number), deadline)
        part = self._holdings.parts.index(None)
        key = _Key(self.arena.allocations, planned.key, part, version.select, base.part if base is not None else part)
        if key not in self._snapshots:
            mine = mine if mine is not None else planned.plan.source(self._rank)
            self._snapshots = {old: kept for old, kept in self._snapshots.items() if not old.is_stale(key)}
            self._snapshots[key] = self._prepared(planned.plan, mine, source, key)
        snapshot = self._snapshots[key]
        snapshot.take()
        runs = tuple(planned.plan.runs[run] for run in snapshot.offsets)
        verified = {run.index: 0 for run in runs}
        holding = Holding(version.number, planned.key, part, runs, dict(snapshot.offsets), verified=verified, pieces=snapshot.pieces)
        self._holdings.parts[part] = holding
        return snapshot, holding

    def _prepared(self, plan: Plan, mine: SourcePlan, source: WeightSource, key: _Key) -> Taken:
        if self._in_place:
            return InPlace(mine, self._order, source, self._seams.memory, self._seams.transport)
        part = self.arena.part(key.part)
        if key.select is None:
            return Snapshot(mine, self._order, source, part, self._seams.memory)
        subset, base = subset_of(key.select), self.arena.part(key.base)
        return SubsetSnapshot(mine, plan, subset, self._order, source, part, base, self._seams.memory)

    def _stale(self, planned: Planned) -> bool:
        return not any(key[:2] == (self.arena.allocations, planned.key) for key in self._snapshots)

    def _free(self, holding: Holding, deadline: float) -> None:
        self._patience.drained(holding, deadline)
        self._holdings.parts[holding.part] = None

    def _seal(self, version: Version, snapshot: Taken, holding: Holding) -> None:
        """Beside the training: shards are offered, digested, sealed."""
        try:
            deadline = self._seams.clock.monotonic() + self._settings.versions.publish_deadline_seconds
            self._patience.until(deadline, lambda: self._open(holding))
            digests = Digests(self.worker.registered.group_uid, version.number)
            sizes = {run.index: run.bytes for run in holding.runs}
            for index, found in snapshot.digests(holding.runs, digests):
                holding.digests[index], holding.verified[index] = found, sizes[index]
            self._patience.until(deadline, lambda: self._seal_all(holding))
        except RefitError as error:
            log.warning("publish failed", version=version.number, step=version.step, error=error.message, facts=error.facts)
            self._abort(version.number, error)

    def _slots(self, holding: Holding) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for run in holding.runs:
            found.setdefault(run.slot, []).append(run.index)
        return found

    def _open(self, holding: Holding) -> None:
        sizes = {run.index: run.bytes for run in holding.runs}
        for slot, runs in self._slots(holding).items():
            self._seams.catalog.open_shard(OpenShard(self.worker.group, self.worker.ref, holding.number, slot, sum(sizes[run] for run in runs)))

    def _seal_all(self, holding: Holding) -> None:
        sizes = {run.index: run.bytes for run in holding.runs}
        for slot, runs in self._slots(holding).items():
            roots = {run: run_root(holding.digests[run]) for run in runs}
            size = sum(sizes[run] for run in runs)
            self._seams.catalog.seal_shard(SealShard(self.worker.group, self.worker.ref, holding.number, slot, size, holding.plan_key, roots))

    def _repeat(self) -> None:
        """To a catalog that lost its memory: everything that is held and not closed."""
        for holding in self._holdings.all():
            if holding.closed or not holding.complete:
                continue
            try:
                self._open(holding)
                self._seal_all(holding)
            except VersionRetired:
                holding.closed = True

    def _abort(self, number: int, cause: RefitError) -> None:
        try:
            self._seams.catalog.abort_version(EndVersion(self.worker.group, number, f"rank {self._rank}: {cause.message}"))
        except RefitError as error:
            log.info("the version ends at its deadline", version=number, error=error.message)

    def release(self, version: int, timeout: float) -> None:
        """Closes a version and waits until nobody reads it. Raises PeerUnavailable with the readers that are left."""
        if self._sealing is not None:
            futures.wait([self._sealing], timeout)
        deadline = self._seams.clock.monotonic() + timeout
        for holding in self._holdings.all():
            if holding.number == version:
                self._free(holding, deadline)

    def counters(self) -> dict[str, int]:
        """Of this process so far; a warm round adds nothing."""
        return {"plans": self.planner.made, "allocations": self.arena.allocations, **self._seams.transport.counters()}

    def close(self) -> None:
        """Ends what is being sealed, waits drainSeconds for readers, deregisters."""
        self._pool.shutdown(wait=True)
        deadline = self._seams.clock.monotonic() + self._settings.versions.drain_seconds
        for holding in self._holdings.all():
            try:
                self._free(holding, deadline)
            except RefitError as error:  # noqa: PERF203  each version is given up by itself
                log.warning("left while the version was still read", version=holding.number, error=error.message)
        self.worker.leave()
        self._seams.transport.close()

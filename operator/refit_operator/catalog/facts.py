"""What the catalog knows of one group: frozen facts, and the state machines as tables.

Invariants:
- a version number is given once; a version moves only along `MOVES`; its root and the roots of its slots never change once known;
- a holder that is closed takes no new lease, and stays closed until its memory was seen to hold something else;
- a lease names holders by incarnation: a process that restarted is another holder;
- facts are replaced, never changed: an operation either returns new facts or raises and leaves none behind.

Times are seconds of one clock that never steps (see `memory`). Dictionaries are never mutated after they were put into a fact.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from refit_api import wire
from refit_api.wire import Role, VersionPhase

from refit_operator.ports import Terms

MOVES: Mapping[VersionPhase, frozenset[VersionPhase]] = {
    VersionPhase.PUBLISHING: frozenset({VersionPhase.READY, VersionPhase.FAILED}),
    VersionPhase.READY: frozenset({VersionPhase.RELEASING, VersionPhase.FAILED}),
    VersionPhase.RELEASING: frozenset({VersionPhase.RELEASED}),
    VersionPhase.RELEASED: frozenset(),
    VersionPhase.FAILED: frozenset(),
}
LEASABLE = frozenset({VersionPhase.PUBLISHING, VersionPhase.READY})
ENDED = frozenset(phase for phase, following in MOVES.items() if not following)

NUMBER_BLOCK = 100  # version numbers are reserved in blocks, so that lost memory never gives one again
BEATS = 3  # a worker that missed so many heartbeats is gone


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """A place for a process: whoever runs there now has the newest incarnation."""

    pod_uid: str
    role: Role
    instance: str
    rank: int


@dataclass(frozen=True, slots=True)
class GeneratorKey:
    pod_uid: str
    instance: str


def key_of(ref: wire.WorkerRef) -> WorkerKey:
    return WorkerKey(ref.pod_uid, ref.role, ref.instance, ref.rank)


def generator_of(worker: wire.WorkerRef | WorkerKey) -> GeneratorKey:
    return GeneratorKey(worker.pod_uid, worker.instance)


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered process. `run_id` is a trainer's, `coordinate` an engine rank's."""

    ref: wire.WorkerRef
    world: int
    layout: str
    endpoint: wire.Endpoint | None
    coordinate: str
    run_id: str
    arena_bytes: int
    expires: float


@dataclass(frozen=True, slots=True)
class EngineClass:
    """Engines with equal needs: coordinate -> layout hash. `empty_since`: when its last generator went."""

    coordinates: Mapping[str, str]
    empty_since: float | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    bytes: int
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """Who offers a version's verified bytes: a trainer rank (`shards` by slot) or an engine rank (its `coordinate`).

    Open while it seals or stages, `complete` after, closed for good by `closed_at`.
    """

    ref: wire.WorkerRef
    endpoint: wire.Endpoint
    shards: Mapping[str, Shard] = field(default_factory=dict)
    coordinate: str = ""
    complete: bool = False
    closed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Of one generator on one version: what each of its ranks reads from. Renewed and lost as one."""

    ranks: Mapping[WorkerKey, frozenset[wire.WorkerRef]]
    expires: float

    def holders(self) -> frozenset[wire.WorkerRef]:
        return frozenset().union(*self.ranks.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """A version beside its public facts.

    `expected` slots; `version.slots` are those known so far (fewer only after lost memory). `roots`, `sizes`: by slot, the first seal's.
    `classes` of the plan (empty after lost memory). `publish_by`: it fails then. `closed_at`: retired or failed; renewals end drainSeconds later.
    `recorded`: it has a WeightVersion, which exists once it is `written`.
    """

    version: wire.Version
    expected: int
    created: float
    publish_by: float
    classes: frozenset[str] = frozenset()
    recorded: bool = True
    written: bool = True
    ready_at: float | None = None
    closed_at: float | None = None
    roots: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def run_roots(self) -> dict[int, bytes]:
        """By run index, in plan order."""
        return dict(sorted((run, root) for roots in self.roots.values() for run, root in roots.items()))

    def moved(self, phase: VersionPhase, reason: str = "") -> Entry:
        assert phase in MOVES[self.version.phase], f"version {self.version.number} may not go from {self.version.phase.value} to {phase.value}"
        return replace(self, version=replace(self.version, phase=phase, reason=reason or self.version.reason))


@dataclass(frozen=True, slots=True)
class Group:
    """Everything. `epoch_written`: the RefitGroup shows this epoch, so calls may be answered. `settled_at`: from then on, absent means gone.

    `ceiling`: numbers up to it may be given. `orders` counts assignments: the next one's seq. `runs`: the present trainer run and those it
    replaced. `engines`: the registered ranks of each generator, in order. `replaced`: incarnations that must not come back. `skipped`: keys of
    publishes that found the arena busy, with their plan key.
    """

    ref: wire.GroupRef
    terms: Terms
    epoch: int
    settled_at: float
    next_number: int
    ceiling: int
    epoch_written: bool = False
    runs: tuple[str, ...] = ()
    orders: int = 0
    current: int = 0
    protected: frozenset[int] = frozenset()
    workers: Mapping[WorkerKey, Worker] = field(default_factory=dict)
    engines: Mapping[GeneratorKey, tuple[WorkerKey, ...]] = field(default_factory=dict)
    replaced: Mapping[WorkerKey, tuple[str, ...]] = field(default_factory=dict)
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    classes: Mapping[str, EngineClass] = field(default_factory=dict)
    versions: Mapping[int, Entry] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[int, Mapping[WorkerKey, Holder]] = field(default_factory=dict)
    leases: Mapping[int, Mapping[GeneratorKey, Lease]] = field(default_factory=dict)
    assignments: Mapping[GeneratorKey, wire.Assignment] = field(default_factory=dict)
    reports: Mapping[GeneratorKey, wire.Report] = field(default_factory=dict)

    @property
    def beat_seconds(self) -> float:
        return self.terms.lease_seconds / BEATS

    @property
    def run_id(self) -> str:
        """Of the present trainer run; empty before the first trainer registered."""
        return self.runs[-1] if self.runs else ""

    def settled(self, now: float) -> bool:
        return now >= self.settled_at

    def trainers(self) -> dict[int, Worker]:
        """The registered ranks of the present run."""
        return {worker.ref.rank: worker for worker in self.workers.values() if worker.ref.role is Role.TRAINER and worker.run_id == self.run_id}

    def ranks(self, generator: GeneratorKey) -> list[Worker]:
        return [self.workers[key] for key in self.engines.get(generator, ())]

    def put_worker(self, worker: Worker) -> Group:
        key, engines = key_of(worker.ref), self.engines
        if key.role is Role.GENERATOR and key not in self.workers:
            ranks = (*engines.get(generator_of(key), ()), key)
            engines = {**engines, generator_of(key): tuple(sorted(ranks, key=lambda rank: rank.rank))}
        return replace(self, workers={**self.workers, key: worker}, engines=engines)

    def drop_workers(self, keys: set[WorkerKey]) -> Group:
        """With what they hold; a generator's report goes with its last rank."""
        touched = {generator_of(key) for key in keys if key.role is Role.GENERATOR}
        left = {generator: tuple(rank for rank in self.engines.get(generator, ()) if rank not in keys) for generator in touched}
        gone = {generator for generator, ranks in left.items() if not ranks}
        engines = without({**self.engines, **left}, gone)
        return replace(self.drop_holders(keys), workers=without(self.workers, keys), engines=engines, reports=without(self.reports, gone))

    def held(self, number: int, role: Role | None = None) -> list[Holder]:
        """Those who offer a version, closed or not."""
        return [holder for key, holder in self.holders.get(number, {}).items() if role in (None, key.role)]

    def holder(self, number: int, ref: wire.WorkerRef) -> Holder | None:
        return self.holders.get(number, {}).get(key_of(ref))

    def put_version(self, entry: Entry) -> Group:
        return replace(self, versions={**self.versions, entry.version.number: entry})

    def put_holder(self, number: int, holder: Holder) -> Group:
        return replace(self, holders={**self.holders, number: {**self.holders.get(number, {}), key_of(holder.ref): holder}})

    def put_lease(self, number: int, generator: GeneratorKey, lease: Lease | None) -> Group:
        """None: it ended."""
        of_version = {key: other for key, other in self.leases.get(number, {}).items() if key != generator}
        if lease is not None:
            of_version[generator] = lease
        others = {other: held for other, held in self.leases.items() if other != number}
        return replace(self, leases={**others, number: of_version} if of_version else others)

    def drop_holders(self, keys: set[WorkerKey], numbers: set[int] | None = None) -> Group:
        """Of all versions, or of `numbers`."""
        left = {number: held if numbers is not None and number not in numbers else without(held, keys) for number, held in self.holders.items()}
        return replace(self, holders={number: held for number, held in left.items() if held})


@dataclass(frozen=True, slots=True)
class Moment:
    """When a call is looked at, and when it came in: a call that waits is looked at again after each change."""

    now: float
    began: float


@dataclass(frozen=True, slots=True)
class Pending:
    """Not yet: look again after a change; at `until` answer `otherwise`."""

    until: float
    otherwise: Any


Outcome = tuple[Group, Any]
"""New facts and a message of `wire`, a `Pending`, or an error that is an answer (the facts changed with it)."""


def canonical(document: Mapping[str, Any]) -> bytes:
    """The one spelling of a JSON document, so that equal documents have equal hashes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def content_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def without(mapping: Mapping[Any, Any], keys: Any) -> dict[Any, Any]:
    """A copy that lacks `keys`."""
    gone = set(keys)
    return {key: value for key, value in mapping.items() if key not in gone}

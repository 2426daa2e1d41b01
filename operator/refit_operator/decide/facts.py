"""What `decide` looks at: one frozen picture of a group, from the watch and from the catalog.

Nothing here is an intention of ours. Times are Unix seconds. Absence of a catalog fact is "unknown" until `CatalogFacts.settled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from refit_api.wire import Assignment, Endpoint, ErrorDetail, RankReport, Role, Select, Version, VersionPhase, WorkerRef


@dataclass(frozen=True, slots=True)
class Pod:
    """`synced` is the readiness gate as last written, None before.

    `trouble`: why it does not run, in the kubelet's words; `ended_before`: how its last container ended.
    """

    name: str
    uid: str
    role: Role
    created: float
    node: str = ""
    ready: bool = False
    synced: bool | None = None
    leaving: bool = False
    ended: bool = False
    template: str = ""
    trouble: str = ""
    ended_before: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """A child object as the watch shows it.

    `owner`: uid of the RefitGroup that controls it, empty when none does. `settled`: its controller has seen the newest spec.
    `trouble`: why pods cannot be made. `revision`, `generation`: where it stands, as in `ports.Stamp`.
    """

    kind: str
    name: str
    uid: str
    owner: str
    wanted: int = 0
    pods: int = 0
    updated: int = 0
    ready: int = 0
    settled: bool = True
    trouble: str = ""
    revision: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A WeightVersion object. `deleted`: when its deletion was asked for. `status` is what we wrote."""

    name: str
    uid: str
    number: int
    step: int
    run_id: str
    key: str
    plan_key: str
    slots: int
    created: float
    base: int = 0
    select: Select | None = None
    hold: bool = False
    abort: bool = False
    deleted: float | None = None
    finalized: bool = True
    generation: int = 1
    revision: int = 0
    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerRank:
    worker: WorkerRef
    run_id: str


@dataclass(frozen=True, slots=True)
class GeneratorRank:
    """`report` None: registered, nothing heard yet."""

    worker: WorkerRef
    coordinate: str
    endpoint: Endpoint | None
    report: RankReport | None = None


@dataclass(frozen=True, slots=True)
class Generator:
    """One generator: all ranks of one engine. `whole`: every rank has registered and reported. `offers`: version -> complete on every coordinate.

    A version is offered when no coordinate's holder is closed; open holders are those still staging.
    `heard`: the (epoch, seq) that its agent follows, by its last report.
    """

    pod_uid: str
    instance: str
    class_hash: str
    whole: bool
    ranks: tuple[GeneratorRank, ...]
    offers: Mapping[int, bool] = field(default_factory=dict)
    heard: tuple[int, int] = (0, 0)
    fenced: bool = False
    error: ErrorDetail | None = None
    assignment: Assignment | None = None
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VersionState:
    """`trainers`, `generators`: complete holders. `offered`: trainers or host copies hold every slot, open to new leases.

    `classes`: the engine classes that its plan serves; empty when unknown (after lost memory). Another class waits for the next version.
    """

    version: Version
    sealed: int
    sealed_bytes: int
    created: float
    ready_at: float | None = None
    leases: int = 0
    drain_deadline: float | None = None
    trainers: int = 0
    generators: int = 0
    offered: bool = False
    classes: frozenset[str] = frozenset()

    @property
    def available(self) -> bool:
        """All of it can be read from somebody: what Ready alone does not say."""
        return self.version.phase is VersionPhase.READY and (self.offered or self.generators > 0)


@dataclass(frozen=True, slots=True)
class Wants:
    """What the catalog needs written before it answers: its epoch, the end of its numbers, WeightVersion objects. Zero and empty: nothing."""

    epoch: int = 0
    ceiling: int = 0
    records: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    """`settled`: this epoch has lasted a lease time, so what is absent is gone. `world`: trainer ranks that a publish waits for (0: unknown)."""

    epoch: int = 0
    settled: bool = False
    wants: Wants = Wants()
    world: int = 0
    trainers: tuple[TrainerRank, ...] = ()
    generators: tuple[Generator, ...] = ()
    versions: tuple[VersionState, ...] = ()
    protected: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The API server's answer to a dry run of one workload."""

    accepted: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """The RefitGroup's metadata and its present status; the spec travels beside it."""

    namespace: str
    name: str
    uid: str
    generation: int
    revision: int = 0
    deleting: bool = False
    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observed:
    """`verdicts`: workload kind -> dry run of what `resources` made of the present spec; missing: not asked yet."""

    pods: tuple[Pod, ...] = ()
    children: tuple[Child, ...] = ()
    records: tuple[Record, ...] = ()
    catalog: CatalogFacts = CatalogFacts()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

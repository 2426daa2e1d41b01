"""Messages between pods: frozen dataclasses; the generated protobuf code stays behind `codec`.

A message class here and the protobuf message of the same name have the same fields; `codec` walks the annotations.
Optional fields are None when absent: an absent step is unknown, never 0. Roots and digests are raw bytes. Times are seconds.
Group membership is proven by the pod's token (to the catalog) or by a MAC under the group key (to another pod): no message carries a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

Raw = bytes  # in messages that have a field named `bytes`

PROTOCOL = 1  # raised with a change that an older side cannot read; the catalog answers others with WireMismatch


class Role(str, Enum):
    TRAINER = "trainer"
    GENERATOR = "generator"


class VersionPhase(str, Enum):
    PUBLISHING = "Publishing"
    READY = "Ready"
    RELEASING = "Releasing"
    RELEASED = "Released"
    FAILED = "Failed"


class RankPhase(str, Enum):
    """What one generator rank is doing. Any failure before Committing leaves the old version serving."""

    IDLE = "Idle"
    STAGING = "Staging"
    STAGED = "Staged"
    PREPARED = "Prepared"
    COMMITTING = "Committing"
    SERVING = "Serving"
    FENCED = "Fenced"


class Order(str, Enum):
    """What an assignment tells the agent to do with its target."""

    STAGE = "stage"
    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """A `RefitError` on the wire: `type` is a name of the error tree."""

    type: str
    message: str
    retry_after: float | None = None
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupRef:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """A process by natural key within its group; `incarnation` is the UUID of its start."""

    pod_uid: str
    role: Role
    rank: int
    incarnation: str
    instance: str = "0"  # the engine of a pod that runs several


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker serves manifests; peers pin the self-signed `certificate` (PEM)."""

    host: str
    port: int
    certificate: str


@dataclass(frozen=True, slots=True)
class RegisterWorker:
    """`world`: ranks of the trainer, or of one generator. `coordinate`: generators only. `run_id`: trainers only."""

    protocol: int
    group: GroupRef
    worker: WorkerRef
    world: int
    layout: str
    endpoint: Endpoint | None = None
    coordinate: str = ""
    run_id: str = ""
    model: str = ""
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Registered:
    """`group_key` authenticates pods of the group to each other; it is never logged. `want_layout`: send `PutLayout` first."""

    catalog_epoch: int
    group_uid: str
    group_key: bytes = field(repr=False)
    lease_seconds: float
    want_layout: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    group: GroupRef
    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class Beat:
    """`known` False: the catalog lost its memory of this worker; register again."""

    catalog_epoch: int
    known: bool


@dataclass(frozen=True, slots=True)
class Deregister:
    group: GroupRef
    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class Blob:
    """A frame of a layout or of a plan document: `hash` is the SHA-256 (hex) of all `data` together."""

    group: GroupRef
    hash: str
    data: bytes


@dataclass(frozen=True, slots=True)
class GetLayout:
    group: GroupRef
    hash: str


@dataclass(frozen=True, slots=True)
class Select:
    """Which tensors a subset replaces: by checkpoint name, by layer (`.layers.<n>.`), or by a part of the name; any of the three selects."""

    params: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    layer_groups: tuple[str, ...] = ()

    def ordered(self) -> Select:
        """Equal selections are equal values."""
        return Select(tuple(sorted(set(self.params))), tuple(sorted(set(self.layers))), tuple(sorted(set(self.layer_groups))))

    def spec(self) -> dict[str, list[str] | list[int]]:
        """As WeightVersions spell it."""
        spelled: dict[str, list[str] | list[int]] = {"params": list(self.params), "layers": list(self.layers), "layerGroups": list(self.layer_groups)}
        return {name: named for name, named in spelled.items() if named}


@dataclass(frozen=True, slots=True)
class CreateVersion:
    """`key` = `runId:step`. `plan_key` "" asks for the current one. `slots`: owner ranks joined by "-", in plan order.

    With `base` and `select` the version is a subset: that version with the selected tensors replaced.
    """

    group: GroupRef
    worker: WorkerRef
    key: str
    run_id: str
    step: int
    plan_key: str
    slots: tuple[str, ...] = ()
    base: int = 0
    select: Select | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """`root` is empty until Ready. `reason` says why a version failed. `base` and `select` are those of a subset; its root covers all tensors."""

    number: int
    key: str
    run_id: str
    step: int
    plan_key: str
    slots: tuple[str, ...]
    phase: VersionPhase
    root: bytes = b""
    bytes: int = 0
    reason: str = ""
    base: int = 0
    select: Select | None = None


@dataclass(frozen=True, slots=True)
class Created:
    """Without `version`: plan `plan_key`, then call again. `skipped`: onBusy Skip, publish returns None on every rank."""

    plan_key: str
    version: Version | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class GetVersion:
    """`wait_seconds` > 0: answer when the version left Publishing, or at the end of the wait as it is. `runs`: whose roots to tell (empty: all)."""

    group: GroupRef
    number: int
    runs: tuple[int, ...] = ()
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """`run_roots` are those of the asked runs, by run index; empty until Ready. `serving` of the registered `generators` have it on all ranks."""

    version: Version
    run_roots: dict[int, bytes] = field(default_factory=dict)
    generators: int = 0
    serving: int = 0


@dataclass(frozen=True, slots=True)
class ListVersions:
    """Versions numbered above `after`, oldest first; also the request of `WatchVersions`."""

    group: GroupRef
    after: int = 0


@dataclass(frozen=True, slots=True)
class Versions:
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class EndVersion:
    """Request of `AbortVersion` and `RetireVersion`."""

    group: GroupRef
    number: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OpenShard:
    group: GroupRef
    worker: WorkerRef
    number: int
    slot: str
    bytes: int


@dataclass(frozen=True, slots=True)
class SealShard:
    """`run_roots`: SHA-256 of the block digests of each run of the slot, by run index."""

    group: GroupRef
    worker: WorkerRef
    number: int
    slot: str
    bytes: int
    plan_key: str
    run_roots: dict[int, Raw]


@dataclass(frozen=True, slots=True)
class ListShards:
    """Who offers the version: trainer shards of `slots` (all when empty) and, with a coordinate, the relays that hold it."""

    group: GroupRef
    number: int
    slots: tuple[str, ...] = ()
    class_hash: str = ""
    coordinate: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that offers bytes of a version. `complete`: sealed (trainer) or Staged (relay); `closed`: takes no new leases."""

    worker: WorkerRef
    endpoint: Endpoint
    slots: tuple[str, ...] = ()
    coordinate: str = ""
    complete: bool = True
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Sources:
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class CloseHolder:
    """No new leases on what this worker holds of the version; waits up to `wait_seconds` for the present ones.

    `leaving`: the process ends (preStop), so it need not stay the last holder of the current version.
    """

    group: GroupRef
    worker: WorkerRef
    number: int
    wait_seconds: float = 0.0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """`readers`: pods that still hold a lease on it; empty: the memory may be reused."""

    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """By one rank of a generator; the lease is the generator's. Also renews. `holders` are those it reads from."""

    group: GroupRef
    worker: WorkerRef
    number: int
    holders: tuple[WorkerRef, ...]


@dataclass(frozen=True, slots=True)
class RenewLease:
    group: GroupRef
    worker: WorkerRef
    number: int


@dataclass(frozen=True, slots=True)
class Leased:
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    group: GroupRef
    worker: WorkerRef
    number: int


@dataclass(frozen=True, slots=True)
class WatchAssignment:
    """By the agent of a generator: `worker` is any of its ranks' reference (rank 0)."""

    group: GroupRef
    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class CoordinateSources:
    """For one coordinate: relays to read from, best first; empty: the trainers."""

    coordinate: str
    relays: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one generator has to do. Orders compare by `(catalog_epoch, seq)`; lower ones are refused (StaleOrder). Target 0: nothing yet."""

    catalog_epoch: int
    seq: int
    target: int
    order: Order
    sources: tuple[CoordinateSources, ...] = ()
    deadline_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One stage of a refit: name of the timeline, start (Unix seconds) and length."""

    stage: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Bytes that arrived from one pod, verified or not."""

    pod_uid: str
    role: Role
    bytes: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """`serving` 0: nothing yet. `arena`: the version in the arena and whether all of it is verified. `verified`, `bytes`: progress of the stage.

    With staging Windowed `arena` is the version that an install can read, and nobody else. `arena_root`: its root, which a commit compares over the ranks.
    `reads`: who the present or last stage read from.
    `kept`: another version that is whole in the arena (`keepPrevious`), 0 for none.
    """

    worker: WorkerRef
    coordinate: str
    phase: RankPhase
    serving: int = 0
    serving_root: bytes = b""
    arena: int = 0
    arena_complete: bool = False
    plan_key: str = ""
    staging: int = 0
    verified: int = 0
    bytes: int = 0
    reads: tuple[ReadFrom, ...] = ()
    timings: tuple[Timing, ...] = ()
    error: ErrorDetail | None = None
    arena_root: Raw = b""
    kept: int = 0

    def read_from(self, role: Role) -> int:
        return sum(read.bytes for read in self.reads if read.role is role)


@dataclass(frozen=True, slots=True)
class Report:
    """All ranks of one generator, by its agent. Replaces the report before; an older `(catalog_epoch, seq)` is what the ranks follow.

    `leaving`: it was told that its pod ends (preStop). Denied unless the API server says so.
    """

    group: GroupRef
    worker: WorkerRef
    catalog_epoch: int
    seq: int
    ranks: tuple[RankReport, ...]
    fenced: bool = False
    error: ErrorDetail | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The empty answer."""


@dataclass(frozen=True, slots=True)
class GetManifest:
    """To a trainer rank or relay: what it offers of a version. `mac` = HMAC-SHA-256 under the group key over the other fields and the holder."""

    number: int
    worker: WorkerRef
    holder: WorkerRef
    mac: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ManifestRun:
    """One run in the holder's arena; `digests` are 16 bytes a block (A then B, little-endian), in order.

    `bytes` of it, from its start, are verified and may be read; `digests` are of the whole run, or empty while the holder does not know them.
    `pieces` says where it lies if not in one piece at `offset`, but in live memory: 32 bytes each, see `refit_runtime.pieces`.
    """

    index: int
    offset: int
    bytes: int
    digests: Raw
    pieces: Raw = b""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A frame of the stream: `metadata`, `base` (address), `device` come with the first; `metadata` holds remote keys and is never logged."""

    holder: WorkerRef
    number: int
    plan_key: str
    agent: str
    metadata: bytes = field(repr=False)
    base: int
    device: int
    memory: str
    runs: tuple[ManifestRun, ...]

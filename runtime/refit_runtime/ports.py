"""The seams of the data plane. Each Protocol is defined by its consumer and has an in-memory twin.

`Buffer` is a flat uint8 torch tensor (host or device memory); only adapters and the modules that copy bytes know torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

from refit_api.tensors import CoordinateNeeds, RankShards
from refit_api.wire import (
    AcquireLease,
    Assignment,
    Beat,
    Blob,
    Closed,
    CloseHolder,
    Created,
    CreateVersion,
    Deregister,
    Endpoint,
    EndVersion,
    GetLayout,
    GetManifest,
    GetVersion,
    Heartbeat,
    Leased,
    ListShards,
    ListVersions,
    Manifest,
    OpenShard,
    Order,
    RankReport,
    Registered,
    RegisterWorker,
    ReleaseLease,
    RenewLease,
    Report,
    SealShard,
    Source,
    Sources,
    Version,
    VersionFacts,
    Versions,
    WatchAssignment,
)

from refit_runtime.digest import Digests

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Clock(Protocol):
    """`monotonic` for deadlines, `time` (Unix seconds) for what people read."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WeightSource(Protocol):
    """The live weights of one trainer rank."""

    def shards(self) -> RankShards:
        """The facts, fixed for one layout; their order is the index that `view` takes."""
        ...

    def view(self, index: int) -> torch.Tensor:
        """Live memory of shard `index`, in the shape of its box; strided memory and another dtype (cast at snapshot) are fine."""
        ...


class WeightTarget(Protocol):
    """The live parameters of one engine rank."""

    def needs(self) -> CoordinateNeeds: ...

    def view(self, parameter: str) -> torch.Tensor:
        """The live parameter, in the shape and dtype of its `Parameter`; its address never changes."""
        ...

    def remake(self) -> None:
        """After all copies, in the pause: what the engine derives from its parameters follows them. Raises InstallError."""
        ...


class Copies(Protocol):
    """A list of copies, prepared once and run often."""

    def start(self) -> None:
        """What they read is what the caller's stream has written."""
        ...

    def wait(self) -> None:
        """Returns when all bytes are in memory and visible to readers."""
        ...


class Memory(Protocol):
    """Where a rank's arena lies: host memory, or the device of its weights."""

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """A plain allocation, aligned for registration. Raises SpecError with the numbers if it does not fit."""
        ...

    def copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copies:
        """Of (to, from); strides and casts are fine, and all must stay where it is."""
        ...

    def digests(self, data: torch.Tensor, digests: Digests) -> bytes:
        """The block digests of `data`, computed where it lies."""
        ...


@dataclass(frozen=True, slots=True)
class Read:
    """`bytes` at `remote` (offset from the manifest's base) to `local` (offset in our arena).

    `parts` are what it moves instead, as (remote, local, bytes), if the bytes do not lie in one place on both sides; `bytes` is their sum.
    """

    remote: int
    local: int
    bytes: int
    parts: tuple[tuple[int, int, int], ...] = ()

    def moves(self) -> tuple[tuple[int, int, int], ...]:
        """(remote, local, bytes) of each contiguous part."""
        return self.parts or ((self.remote, self.local, self.bytes),)


@dataclass(frozen=True, slots=True)
class Registration:
    """What a manifest says about a registered arena; `metadata` holds remote keys and is never logged."""

    agent: str
    metadata: bytes
    base: int
    device: int
    memory: str


class Transfer(Protocol):
    """A posted read. It stays outstanding until `done` says so or raises TransferError.

    `at_once`: it was over when it was posted, as between processes that share memory; there is nothing to wait for.
    """

    @property
    def at_once(self) -> bool: ...
    def done(self) -> bool: ...


class Peer(Protocol):
    """A connected holder with the pieces that may be read from it, prepared once."""

    def read(self, piece: int) -> Transfer:
        """Posts; never waits. Raises PeerUnavailable or TransferError."""
        ...

    def close(self) -> None:
        """Forgets the holder; posted reads still end by themselves."""
        ...


class Transport(Protocol):
    """One per process. A new registration is a new agent: no read through the old one survives it.

    Reads land in `arena`; others may read from it and from `more`.
    """

    def register(self, arena: torch.Tensor, *more: torch.Tensor) -> None: ...
    def registration(self) -> Registration: ...
    def connect(self, manifest: Manifest, pieces: Sequence[Read]) -> Peer: ...

    def counters(self) -> Mapping[str, int]:
        """`registrations`, `connections`, `reads`, `bytes`: a warm round leaves the first two unchanged."""
        ...

    def close(self) -> None: ...


class Catalog(Protocol):
    """The catalog as a worker sees it; blocking calls with a deadline each. Raises CatalogUnavailable and the typed errors of the design."""

    def register(self, request: RegisterWorker) -> Registered: ...
    def heartbeat(self, request: Heartbeat) -> Beat: ...
    def deregister(self, request: Deregister) -> None: ...
    def put_layout(self, blob: Blob) -> None: ...
    def get_layout(self, request: GetLayout) -> bytes: ...
    def create_version(self, request: CreateVersion, timeout: float) -> Created: ...
    def get_version(self, request: GetVersion) -> VersionFacts: ...
    def list_versions(self, request: ListVersions) -> Versions: ...
    def watch_versions(self, request: ListVersions) -> Iterator[Version]: ...
    def abort_version(self, request: EndVersion) -> None: ...
    def retire_version(self, request: EndVersion) -> None: ...
    def open_shard(self, request: OpenShard) -> None: ...
    def seal_shard(self, request: SealShard) -> None: ...
    def list_shards(self, request: ListShards) -> Sources: ...
    def close_holder(self, request: CloseHolder) -> Closed: ...
    def acquire_lease(self, request: AcquireLease) -> Leased: ...
    def renew_lease(self, request: RenewLease) -> Leased: ...
    def release_lease(self, request: ReleaseLease) -> None: ...
    def watch_assignment(self, request: WatchAssignment) -> Iterator[Assignment]: ...
    def report(self, request: Report) -> None: ...
    def close(self) -> None: ...


class Manifests(Protocol):
    """Where a worker serves its manifests, and how it fetches those of others (TLS, pinned certificates, group key)."""

    def serve(self, answer: ManifestAnswer) -> Endpoint:
        """Starts; nobody is answered before `admit`."""
        ...

    def admit(self, group_key: bytes) -> None:
        """Only callers that know this key are answered; fetches are signed with it. Never logged."""
        ...

    def fetch(self, source: Source, request: GetManifest, timeout: float) -> Manifest:
        """Raises PeerUnavailable, and what the holder answers."""
        ...

    def close(self) -> None: ...


class ManifestAnswer(Protocol):
    """Answers one authenticated request; raises VersionRetired, PeerUnavailable."""

    def __call__(self, request: GetManifest) -> Manifest: ...


@dataclass(frozen=True, slots=True)
class StageOrder:
    """What every rank of a generator gets when it has to stage."""

    catalog_epoch: int
    seq: int
    number: int
    sources: Mapping[str, tuple[Source, ...]]  # by coordinate; empty: the trainers
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class CommitOrder:
    catalog_epoch: int
    seq: int
    number: int
    order: Order
    deadline_seconds: float


class CommitDriver(Protocol):
    """All ranks that commit together. No call raises for a rank's failure: outcomes are in the reports."""

    async def status(self) -> tuple[RankReport, ...]: ...
    async def prepare(self, order: CommitOrder) -> tuple[RankReport, ...]: ...
    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None:
        """Returns when the pipeline is empty and the device idle. Raises EngineBusy."""
        ...

    async def install(self, order: CommitOrder) -> tuple[RankReport, ...]: ...
    async def label(self, number: int) -> None:
        """New outputs carry this version; with `kv: Salt` it is also the salt of new requests."""
        ...

    async def resume(self) -> None: ...
    async def fence(self, reason: str) -> None:
        """Paused, and every inference request refused, until a full install succeeds."""
        ...

    async def end(self, reason: str) -> None:
        """Ends the engine process, with the reason where the kubelet looks: a rank hangs, or nothing else helped."""
        ...


class EngineDriver(CommitDriver, Protocol):
    """All ranks of all engine cores of one generator, as its agent commands them.

    What the engine itself raises may come through, and a call need not end: the agent has a deadline for each (`door`).
    """

    async def stage(self, order: StageOrder) -> None: ...
    async def discard(self) -> None: ...
    async def release(self, number: int) -> None:
        """Closes and drains this generator's holdings of a version (before the arena is reused, and at preStop)."""
        ...


class Ballot(Protocol):
    """The ranks of one engine that must act together, from one of them."""

    def gather(self, mine: T) -> tuple[T, ...]:
        """What each rank gave, by rank: the same on all of them. Raises EngineHung if one gave nothing in time, or is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Seams:
    """What the wiring gives to a worker process."""

    catalog: Catalog
    transport: Transport
    manifests: Manifests
    memory: Memory
    clock: Clock
    random: Random

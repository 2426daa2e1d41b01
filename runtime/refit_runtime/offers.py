"""Who offers a version to a reader: holders with proven digests, how far open ones are, and who is out.

A manifest proves nothing by itself: its digests of a run count when they give the catalog's run root, else the holder is left out.
A holder that was given up is not asked again in this stage; its outstanding reads end by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from refit_api.errors import DigestMismatch, PeerError, PeerUnavailable, RefitError, TransferError, TransferTimeout, WireMismatch
from refit_api.wire import GetManifest, Manifest, Role, Source, WorkerRef

from refit_runtime.arena import Holding
from refit_runtime.connections import Connection, Connections
from refit_runtime.digest import Digests, run_root
from refit_runtime.lease import Lease
from refit_runtime.plan.plan import Chunk, Plan
from refit_runtime.ports import Seams

FIRST_SECONDS = 20.0  # to the first sign of life of a holder; after it, its own pace tells
SLOWEST = 50e6  # bytes a second: of a link that shares itself among all reads, so that the first ends when nearly all have arrived
PACE, LEAST_SECONDS = 10.0, 1.0
MANIFEST_SECONDS = 10.0
LOOK_SECONDS = (0.02, 0.5)  # between two looks at an open holder
FIND_TRIES = 5


@dataclass(frozen=True, slots=True)
class Goal:
    """What has to be in `holding` at the end. `roots`: the catalog's, by run index. `me`: who asks for manifests."""

    holding: Holding
    plan: Plan
    roots: dict[int, bytes]
    digests: Digests
    me: WorkerRef
    chunk_bytes: int


@dataclass(slots=True)
class Piece:
    """A chunk on its way. `refused`: holders whose bytes were wrong, once for each time; `block`: the first wrong one, the last time."""

    chunk: Chunk
    local: int
    refused: list[WorkerRef] = field(default_factory=list)
    block: int = 0

    def trusts(self, holder: WorkerRef) -> bool:
        """The first that sent wrong bytes is asked once more, any other never."""
        return self.refused.count(holder) < (2 if self.refused[:1] == [holder] else 1)


@dataclass(slots=True, eq=False)
class Offer:
    """A holder in use. `offered`: bytes of each run that may be read, from the run's start."""

    source: Source
    connection: Connection
    offered: dict[int, int]
    complete: bool
    progress: float
    looked: float
    paces: list[float] = field(default_factory=list)
    pause: float = LOOK_SECONDS[0]
    gone: float | None = None
    reaped: bool = False

    def has(self, chunk: Chunk) -> bool:
        return self.gone is None and chunk in self.connection.pieces and self.offered.get(chunk.run, 0) >= chunk.offset + chunk.bytes

    def patience(self, outstanding: int = 0) -> float:
        """Seconds without an arrival, with so many bytes asked for."""
        pace = max(LEAST_SECONDS, PACE * median(self.paces)) if self.paces else FIRST_SECONDS
        return max(pace, outstanding / SLOWEST)

    def arrived(self, now: float) -> None:
        self.paces = [*self.paces[-31:], now - self.progress]
        self.progress = now


class Offers:
    """`find` names more holders, given those that are out; `chunks` are all of the goal, with their place in our memory."""

    def __init__(
        self,
        goal: Goal,
        seams: Seams,
        connections: Connections,
        lease: Lease,
        chunks: Sequence[tuple[Chunk, int]],
        find: Callable[[set[WorkerRef]], Sequence[Source]],
    ) -> None:
        self._goal, self._seams, self._connections, self._lease, self._chunks, self._find = goal, seams, connections, lease, chunks, find
        self._offers: dict[WorkerRef, Offer] = {}
        self._out: dict[WorkerRef, RefitError] = {}
        self._turn = sum(goal.me.pod_uid.encode())  # where this rank starts among equals, so that readers spread
        self._tries = 0

    def names(self) -> str:
        return ", ".join(f"{ref.role.value} {ref.rank} of pod {ref.pod_uid}" for ref in self._offers) or "nobody"

    def add(self, sources: Sequence[Source]) -> None:
        """Fetches manifests and connects; who fails is left out."""
        for source in sources:
            self._try(source)

    def _try(self, source: Source) -> None:
        now = self._seams.clock.monotonic()
        try:
            manifest = self._manifest(source)
            offered, complete = self._offered(manifest)
            connection = self._connections.to(manifest, self._goal.holding, self._chunks)
            self._offers[source.worker] = Offer(source, connection, offered, complete, now, now)
        except (PeerError, TransferError) as error:
            self._out[source.worker] = error
            self._lease.drop(source.worker)

    def _manifest(self, source: Source) -> Manifest:
        goal = self._goal
        seconds = min(self._lease.left(), MANIFEST_SECONDS)
        manifest = self._seams.manifests.fetch(source, GetManifest(goal.holding.number, goal.me, source.worker), seconds)
        who = f"{source.worker.role.value} rank {source.worker.rank} of pod {source.worker.pod_uid}"
        if manifest.plan_key != goal.holding.plan_key:
            raise WireMismatch(f"{who} holds version {goal.holding.number} by another plan", seen=manifest.plan_key, expected=goal.holding.plan_key)
        for run in manifest.runs:
            if run.index not in goal.roots or not run.digests:
                continue
            if run_root(run.digests) != goal.roots[run.index]:
                raise DigestMismatch(f"{who}: its digests of run {run.index} are not those that were published", source=source.worker.pod_uid, run=run.index)
            goal.holding.digests.setdefault(run.index, run.digests)
        return manifest

    def _offered(self, manifest: Manifest) -> tuple[dict[int, int], bool]:
        runs = self._goal.plan.runs
        offered = {run.index: run.bytes if run.digests else 0 for run in manifest.runs}
        if any(index >= len(runs) or size > runs[index].bytes for index, size in offered.items()):
            raise WireMismatch("the manifest lists runs that the plan does not have: run one release of Refit everywhere", peer=manifest.holder.pod_uid)
        return offered, all(size == runs[index].bytes for index, size in offered.items())

    def choose(self, piece: Piece) -> Offer | None:
        """Relays in the given order, then the run's owners in turn, so that readers and chunks spread over them."""
        able = [offer for offer in self._offers.values() if offer.has(piece.chunk) and piece.trusts(offer.source.worker)]
        if not able:
            return None
        again = [offer for offer in able if offer.source.worker in piece.refused]
        relays = [offer for offer in able if offer.source.worker.role is Role.GENERATOR]
        turn = self._turn + piece.chunk.offset // self._goal.chunk_bytes + piece.chunk.run
        return next(iter([*again, *relays]), able[turn % len(able)])

    def give_up(self, offer: Offer, error: RefitError) -> None:
        if offer.gone is None:
            offer.gone = self._seams.clock.monotonic()
            self._out[offer.source.worker] = error

    def reap(self, busy: Sequence[Offer]) -> None:
        """Disconnects holders that were given up and that no read is outstanding from: a transport may call a read ended because it was cut off."""
        for holder, offer in self._offers.items():
            if offer.gone is not None and not offer.reaped and offer not in busy:
                offer.reaped = True
                self._lease.drop(holder)
                self._connections.drop(holder)

    def look(self) -> None:
        """How far open holders are; those that stand still are given up."""
        now = self._seams.clock.monotonic()
        for offer in self._offers.values():
            if not offer.complete and offer.gone is None and now - offer.looked >= offer.pause:
                self._look_at(offer, now)

    def _look_at(self, offer: Offer, now: float) -> None:
        before = sum(offer.offered.values())
        try:
            manifest = self._manifest(offer.source)
            offer.offered, offer.complete = self._offered(manifest)
            offer.connection = self._connections.to(manifest, self._goal.holding, self._chunks)
        except (PeerError, TransferError) as error:
            self.give_up(offer, error)
            return
        offer.looked = now
        if sum(offer.offered.values()) > before:
            offer.progress, offer.pause = now, LOOK_SECONDS[0]
            return
        offer.pause = min(2 * offer.pause, LOOK_SECONDS[1])
        if now - offer.progress > max(offer.patience(), FIRST_SECONDS):
            self.give_up(offer, TransferTimeout(f"pod {offer.source.worker.pod_uid} verified nothing for {now - offer.progress:.1f} s"))

    def seek(self, piece: Piece) -> None:
        """Nobody offers this piece: wait for an open holder, or ask who else has the version. Raises PeerUnavailable when nobody is left."""
        if any(offer.gone is None and not offer.complete and piece.trusts(offer.source.worker) for offer in self._offers.values()):
            return
        self._tries += 1
        if self._tries > FIND_TRIES:
            reasons = "; ".join(dict.fromkeys(error.message for error in self._out.values())) or "the catalog names none"
            raise PeerUnavailable(f"no holder of version {self._goal.holding.number} is left: {reasons}", retry_after=2.0)
        self._seams.clock.sleep(self._seams.random.uniform(0.1, 0.3) * self._tries)
        self.add(self._find(set(self._out)))

"""A pull: all chunks of a version from its holders into spare memory, each block verified as its chunk lands.

Rules (each is a test):
- the lease is held before a manifest is fetched or a read posted (O5), and no read is posted that cannot end within it;
- all reads are posted before any is awaited (O8); no block counts as verified while a read into it is outstanding;
- blocks are verified against digests that give the catalog's run root, always, and before anything is installed (O6);
- of a subset whose base is here only what it replaces is read; every block is verified all the same;
- a chunk whose bytes are wrong is pulled again once, then from another holder; then the stage fails and names tensor, box, block and source;
- a holder that makes no progress is dropped: the rest comes from others, from where we were; a read of it that does not end within 5 s
  costs us our transport agent (`Stuck`), since only that ends it for certain.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

from refit_api.errors import DigestMismatch, LeaseLost, PeerError, PeerUnavailable, StaleOrder, TransferError, TransferTimeout
from refit_api.wire import Role, Source, WorkerRef

from refit_runtime.arena import Arena, Holding
from refit_runtime.connections import Connections
from refit_runtime.digest import BLOCK, DIGEST_BYTES
from refit_runtime.lease import Lease
from refit_runtime.offers import LEAST_SECONDS, LOOK_SECONDS, Goal, Offer, Offers, Piece
from refit_runtime.plan.plan import Chunk, chunks
from refit_runtime.ports import Seams, Transfer

SETTLE_SECONDS = 5.0
POLL_SECONDS = 0.0005
VERIFIERS = 2


class Stuck(TransferTimeout):
    """Reads of a dropped holder do not end: the rank must replace its transport agent."""


@dataclass(slots=True)
class Flight:
    """A posted read."""

    piece: Piece
    offer: Offer
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a pull may go on; `cancelled` is asked between all steps."""

    deadline: float
    cancelled: Callable[[], bool]


def in_arena(holding: Holding, arena: Arena, chunk_bytes: int) -> list[tuple[Chunk, int]]:
    """Every chunk of a version, with its place in the registered memory."""
    start = arena.start(holding.part)
    return [(chunk, start + holding.offsets[run.index] + chunk.offset) for run in holding.runs for chunk in chunks(run, chunk_bytes)]


class Pull:
    """One pull of one rank. `placed`: all that may be asked for, with its place in our memory. `find` names more holders, given those that are out."""

    def __init__(
        self,
        goal: Goal,
        arena: Arena,
        seams: Seams,
        connections: Connections,
        lease: Lease,
        placed: Sequence[tuple[Chunk, int]],
        find: Callable[[set[WorkerRef]], Sequence[Source]],
    ) -> None:
        self._goal, self._arena, self._seams, self._lease, self._placed = goal, arena, seams, lease, placed
        self._waiting: deque[Piece] = deque()
        self._offers = Offers(goal, seams, connections, lease, placed, find)
        self._flights: list[Flight] = []
        self._checks: dict[Future[int | None], tuple[Piece, Offer]] = {}
        self._pool: ThreadPoolExecutor
        self._limit: Limit
        self.read_from: Counter[tuple[str, Role]] = Counter()

    def run(self, sources: Sequence[Source], limit: Limit) -> None:
        """All of it. Raises LeaseLost, TransferError, PeerError, StaleOrder (cancelled); after it no read is outstanding, or it raised `Stuck`."""
        with self.reading(limit):
            self.add(sources)
            self.ask(self._placed)
            self.finish(self._placed)

    def meet(self, sources: Sequence[Source], limit: Limit) -> None:
        """Returns when somebody offers each chunk, before any is read. Raises as `run` does."""
        self.add(sources)
        wanted = deque(Piece(chunk, local) for chunk, local in self._placed)
        while wanted:
            if self._offers.choose(wanted[0]) is not None:
                wanted.popleft()
                continue
            self._go_on(limit)
            self._offers.look()
            self._offers.seek(wanted[0])
            self._seams.clock.sleep(LOOK_SECONDS[0])
        self._offers.reap([])

    @contextmanager
    def reading(self, limit: Limit) -> Iterator[None]:
        """Inside it chunks are asked for and finished; after it no read is outstanding, or it raised `Stuck`."""
        with ThreadPoolExecutor(VERIFIERS, "refit-verify") as self._pool:
            self._limit = limit
            try:
                yield
            finally:
                wait(self._checks)
                self._settle()
                self._offers.reap([])

    def add(self, sources: Sequence[Source]) -> None:
        """More holders, leased."""
        self._offers.add(sources)

    def ask(self, placed: Iterable[tuple[Chunk, int]]) -> None:
        """Read soon, if it is not here yet; nothing may be in its place that is still wanted."""
        self._waiting += (Piece(chunk, local) for chunk, local in placed if chunk not in self._goal.holding.chunks)
        self._go_on(self._limit)
        self._post(self._pool)

    def finish(self, placed: Iterable[tuple[Chunk, int]]) -> None:
        """Returns when all of it is here and verified."""
        for chunk, _ in placed:
            while chunk not in self._goal.holding.chunks:
                self._step(self._pool)

    def _go_on(self, limit: Limit) -> None:
        if limit.cancelled():
            raise StaleOrder(f"version {self._goal.holding.number} is not read any further: it was superseded, or the rank was fenced")
        if self._seams.clock.monotonic() > limit.deadline:
            raise self._late()
        self._lease.left()

    def _step(self, pool: ThreadPoolExecutor) -> None:
        self._go_on(self._limit)
        moved = self._post(pool) | self._land(pool) | self._judge()
        self._drop_slow()
        self._offers.reap([flight.offer for flight in self._flights])
        self._offers.look()
        if self._waiting and not (moved or self._flights or self._checks):
            self._seek(self._waiting[0])
        if not moved:  # a short sleep without the interpreter lock; longer if only open holders are waited for
            self._seams.clock.sleep(POLL_SECONDS if self._flights or self._checks else LOOK_SECONDS[0])

    def _late(self) -> TransferTimeout:
        holding = self._goal.holding
        return TransferTimeout(
            f"version {holding.number} was not there in time: {holding.verified_bytes} of {holding.bytes} bytes, read from {self._offers.names()}",
            bytes=holding.verified_bytes,
            total=holding.bytes,
        )

    def _post(self, pool: ThreadPoolExecutor) -> bool:
        """Everything that somebody offers; what arrives with its posting is verified while the next is posted."""
        posted = False
        for _ in range(len(self._waiting)):
            piece = self._waiting.popleft()
            offer = self._offers.choose(piece)
            flight = self._fly(piece, offer) if offer is not None else None
            if flight is None:
                self._waiting.append(piece)
                continue
            posted = True
            if flight.transfer.at_once:
                self._verify(flight, pool)
            else:
                self._flights.append(flight)
        return posted

    def _fly(self, piece: Piece, offer: Offer) -> Flight | None:
        if self._lease.left() < LEAST_SECONDS:
            raise LeaseLost(f"the lease on version {self._goal.holding.number} ends before a read could", retry_after=1.0)
        if not any(flight.offer is offer for flight in self._flights):
            offer.progress = self._seams.clock.monotonic()
        try:
            read = offer.connection.read if piece.refused else offer.connection.read_missing  # whatever was wrong, all of it comes anew
            return Flight(piece, offer, read(piece.chunk))
        except (PeerError, TransferError) as error:
            self._offers.give_up(offer, error)
            return None

    def _land(self, pool: ThreadPoolExecutor) -> bool:
        """Reads that ended: verified next, or asked for elsewhere."""
        flying: list[Flight] = []
        for flight in self._flights:
            arrived = self._arrived(flight)
            if arrived is None:
                flying.append(flight)
            elif arrived:
                self._verify(flight, pool)
            else:
                self._waiting.append(flight.piece)
        moved = len(flying) < len(self._flights)
        self._flights = flying
        return moved

    def _verify(self, flight: Flight, pool: ThreadPoolExecutor) -> None:
        piece, source = flight.piece, flight.offer.source.worker
        moved = piece.chunk.bytes if piece.refused else sum(size for _, size in self._goal.holding.needs(piece.chunk))
        if moved:
            flight.offer.arrived(self._seams.clock.monotonic())
            self.read_from[source.pod_uid, source.role] += moved
        self._checks[pool.submit(self._first_wrong, piece)] = piece, flight.offer

    def _arrived(self, flight: Flight) -> bool | None:
        """None: the read is still outstanding."""
        try:
            return True if flight.transfer.done() else None
        except (PeerError, TransferError) as error:
            self._offers.give_up(flight.offer, error)
            return False

    def _first_wrong(self, piece: Piece) -> int | None:
        """The first block of the chunk whose bytes are not the published ones."""
        data = self._arena.whole[piece.local : piece.local + piece.chunk.bytes]
        seen = self._seams.memory.digests(data, self._goal.digests)
        first = piece.chunk.offset // BLOCK
        wanted = self._goal.holding.digests[piece.chunk.run][first * DIGEST_BYTES :][: len(seen)]
        differ = (at for at in range(0, len(seen), DIGEST_BYTES) if seen[at : at + DIGEST_BYTES] != wanted[at : at + DIGEST_BYTES])
        return next((first + at // DIGEST_BYTES for at in differ), None)

    def _judge(self) -> bool:
        ended = [future for future in self._checks if future.done()]
        for future in ended:
            piece, offer = self._checks.pop(future)
            wrong = future.result()
            if wrong is None:
                self._goal.holding.chunks.add(piece.chunk)
                self._goal.holding.verified_bytes += piece.chunk.bytes
                if not self._goal.holding.promised:
                    self._extend(piece.chunk.run)
                continue
            piece.refused.append(offer.source.worker)
            piece.block = wrong
            self._waiting.append(piece)
        return bool(ended)

    def _extend(self, run: int) -> None:
        """What of a run is verified from its start: that is what we offer in turn."""
        at = self._goal.holding.verified.get(run, 0)
        for chunk in chunks(self._goal.plan.runs[run], self._goal.chunk_bytes)[at // self._goal.chunk_bytes :]:
            if chunk not in self._goal.holding.chunks:
                break
            at = chunk.offset + chunk.bytes
        self._goal.holding.verified[run] = at

    def _seek(self, piece: Piece) -> None:
        try:
            self._offers.seek(piece)
        except PeerUnavailable as error:
            raise (self._mismatch(piece) if piece.refused else error) from error

    def _mismatch(self, piece: Piece) -> DigestMismatch:
        inside = self._goal.plan.contents(piece.chunk.run, piece.block * BLOCK, BLOCK)
        what = ", ".join(f"{tensor} {box}" for tensor, box in inside[:4])
        return DigestMismatch(
            f"version {self._goal.holding.number}, run {piece.chunk.run}, block {piece.block} ({what}): the bytes are not those that were published; "
            "check the memory and the network between the source and this pod",
            tensor=inside[0][0] if inside else None,
            block=piece.block,
            run=piece.chunk.run,
            source=piece.refused[-1].pod_uid,
        )

    def _drop_slow(self) -> None:
        now = self._seams.clock.monotonic()
        for offer in {id(flight.offer): flight.offer for flight in self._flights}.values():
            if offer.gone is not None and now - offer.gone > SETTLE_SECONDS:
                raise Stuck(f"a read from pod {offer.source.worker.pod_uid} does not end", peer=offer.source.worker.pod_uid)
            outstanding = sum(flight.piece.chunk.bytes for flight in self._flights if flight.offer is offer)
            if offer.gone is None and now - offer.progress > offer.patience(outstanding):
                self._offers.give_up(offer, TransferTimeout(f"pod {offer.source.worker.pod_uid} sent nothing for {now - offer.progress:.1f} s"))

    def _settle(self) -> None:
        """Waits for what is outstanding: nothing may land after the stage is over."""
        until = self._seams.clock.monotonic() + SETTLE_SECONDS
        while True:
            self._flights = [flight for flight in self._flights if self._arrived(flight) is None]
            if not self._flights:
                return
            if self._seams.clock.monotonic() > until:
                raise Stuck(f"{len(self._flights)} reads do not end", peer=self._flights[0].offer.source.worker.pod_uid)
            self._seams.clock.sleep(POLL_SECONDS)

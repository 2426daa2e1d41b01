"""The packed, registered memory of a rank: one plain allocation, cut into as many equal parts as versions are kept.

Invariants: registered once, and again only if a plan needs more than was foreseen (O11); a part is reused only after what it held was closed
and drained (O9), which is the caller's promise; `allocations` counts, and a warm round leaves it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from refit_api.errors import MixedRanks, PeerUnavailable, UnsupportedLayout, VersionRetired
from refit_api.wire import GetManifest, Manifest, ManifestRun, Select, WorkerRef

from refit_runtime.plan.plan import Chunk, Ranges, Run
from refit_runtime.ports import Memory, Transport
from refit_runtime.subset import within

if TYPE_CHECKING:
    import torch

PAGE = 4096
SPARE = 0.02  # of a forecast: what alignment and wider wire dtypes may add


class Arena:
    """Parts are numbered from 0. `device`: where its memory is, known once the weights are bound."""

    device: torch.device

    def __init__(self, memory: Memory, transport: Transport, parts: int) -> None:
        self._memory, self._transport, self._parts = memory, transport, parts
        self._whole: torch.Tensor | None = None
        self.part_bytes = 0
        self.allocations = 0

    @property
    def bytes(self) -> int:
        return self.part_bytes * self._parts

    def reserve(self, size: int) -> bool:
        """Each part holds at least `size` bytes; True if that took a new allocation, with which all contents are gone."""
        if self._whole is not None and size <= self.part_bytes:
            return False
        self._whole = None  # the old one is given back first
        part = -(-max(size, 1) // PAGE) * PAGE
        whole = self._memory.allocate(part * self._parts, self.device)
        self._transport.register(whole)
        self._whole, self.part_bytes = whole, part
        self.allocations += 1
        return True

    def register_again(self) -> None:
        """The same memory with a new agent: no read of the old one lands any more."""
        self._transport.register(self.whole)

    @property
    def whole(self) -> torch.Tensor:
        assert self._whole is not None, "reserve first"
        return self._whole

    def start(self, part: int) -> int:
        """Offset of a part in the registered memory."""
        return part * self.part_bytes

    def part(self, part: int) -> torch.Tensor:
        return self.whole[self.start(part) : self.start(part) + self.part_bytes]


def device_of(views: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The one device of all weights, given with their names. Raises UnsupportedLayout."""
    import torch

    found = {view.device: name for name, view in views}
    if len(found) > 1:
        named = "; ".join(f"{name} on {device}" for device, name in found.items())
        raise UnsupportedLayout(f"the weights of one rank lie on several devices ({named}): keep them on one", seen=named)
    return next(iter(found), torch.device("cpu"))


@dataclass(slots=True)
class Holding:
    """A version in a part of the arena: where its runs lie, their block digests, and what of them is verified.

    `verified[run]` bytes from the run's start may be read by others; a run's digests are all known, and proven against its root, before the first.
    `chunks` came over the wire and were verified, in any order: a stage that goes on does not read them again.
    `pieces`, by run: where they lie in live memory, for a version that was never copied into an arena.
    `base` and `select`: of a subset. `missing`, by run: what is not here yet, where the part held the base before; None: nothing was here.
    `promised`: it never comes here whole; its holders are leased and connected, and an install reads it window by window.
    """

    number: int
    plan_key: str
    part: int
    runs: tuple[Run, ...]
    offsets: dict[int, int]
    root: bytes = b""
    digests: dict[int, bytes] = field(default_factory=dict)
    verified: dict[int, int] = field(default_factory=dict)
    chunks: set[Chunk] = field(default_factory=set)
    pieces: dict[int, bytes] = field(default_factory=dict)
    base: int = 0
    select: Select | None = None
    missing: Mapping[int, Ranges] | None = None
    verified_bytes: int = 0
    closed: bool = False
    promised: bool = False

    @property
    def bytes(self) -> int:
        return sum(run.bytes for run in self.runs)

    @property
    def complete(self) -> bool:
        return all(self.verified.get(run.index, -1) == run.bytes for run in self.runs)

    @property
    def ready(self) -> bool:
        """It may be installed."""
        return self.promised or self.complete

    def needs(self, chunk: Chunk) -> Ranges:
        """What of a chunk has to be read, counted from the run's start."""
        if self.missing is None:
            return ((chunk.offset, chunk.bytes),)
        return within(self.missing[chunk.run], chunk.offset, chunk.bytes)

    def is_of(self, number: int, plan_key: str) -> bool:
        return (self.number, self.plan_key) == (number, plan_key)

    def manifest(self, arena: Arena, transport: Transport, holder: WorkerRef) -> Manifest:
        at = transport.registration()
        runs = tuple(
            ManifestRun(
                run.index,
                self.offsets[run.index],
                self.verified.get(run.index, 0),
                self.digests.get(run.index, b""),
                self.pieces.get(run.index, b""),
            )
            for run in self.runs
        )
        return Manifest(
            holder=holder,
            number=self.number,
            plan_key=self.plan_key,
            agent=at.agent,
            metadata=at.metadata,
            base=0 if self.pieces else at.base + arena.start(self.part),
            device=at.device,
            memory=at.memory,
            runs=runs,
        )


class Holdings:
    """What each part of an arena holds, and the manifests of it. `me` is who we are now: a manifest is asked of one incarnation."""

    def __init__(self, arena: Arena, transport: Transport, me: Callable[[], WorkerRef], parts: int) -> None:
        self.parts: list[Holding | None] = [None] * parts
        self._arena, self._transport, self._me = arena, transport, me

    def all(self) -> list[Holding]:
        return [holding for holding in self.parts if holding is not None]

    def find(self, number: int) -> Holding | None:
        """One that may be installed."""
        return next((holding for holding in self.all() if holding.number == number and holding.ready), None)

    def ready(self, number: int) -> Holding:
        """To be installed. Raises MixedRanks."""
        holding = self.find(number)
        if holding is None:
            raise MixedRanks(f"version {number} is not held whole here, so it cannot be installed", expected=number)
        return holding

    def answer(self, request: GetManifest) -> Manifest:
        """To a reader; only what is verified is offered, and nothing that is being closed."""
        if request.holder != self._me():
            raise PeerUnavailable("this process started again: ask the catalog for its present holders", seen=request.holder.incarnation)
        holding = next((each for each in self.all() if each.number == request.number and not each.closed), None)
        if holding is None:
            raise VersionRetired(f"version {request.number} is not held here any more: use another holder", seen=request.number)
        return holding.manifest(self._arena, self._transport, self._me())

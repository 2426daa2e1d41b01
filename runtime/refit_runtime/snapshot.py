"""Live weights copied into the arena at publish: strided reads, the cast to the wire dtype, one list of copies.

The list is made once for each plan and part. A view is made again when its memory moved: a framework that swaps the storage of a parameter
must never have us publish what it left behind. What is added to live values (`Shard.plus`) is added before the cast, in a wider copy of those
few tensors. After a copy training may go on: the arena is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from refit_runtime.digest import Digests
from refit_runtime.plan.plan import Run, SourcePlan
from refit_runtime.ports import Copies, Memory, WeightSource

if TYPE_CHECKING:
    import torch


class Snapshot:
    """`order` maps the plan's shard numbers to those of the source; `part` is where the runs lie."""

    def __init__(self, plan: SourcePlan, order: Sequence[int], source: WeightSource, part: torch.Tensor, memory: Memory) -> None:
        self._source, self._memory, self._part = source, memory, part
        self.offsets = plan.offsets
        self.pieces: dict[int, bytes] = {}
        self._to = [typed(part[copy.offset : copy.offset + copy.nbytes], copy.dtype.value, tuple(hi - lo for lo, hi in copy.box)) for copy in plan.copies]
        self._boxes = [(order[copy.shard], tuple(slice(lo, hi) for lo, hi in copy.box)) for copy in plan.copies]
        self._shards = sorted({shard for shard, _ in self._boxes})
        facts = source.shards().shards
        self._plus = {shard: facts[shard].plus for shard in self._shards if facts[shard].plus}
        self._wider: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by shard: (live, the wider copy)
        self._at: list[int] = []
        self._copies: Copies | None = None

    def take(self) -> None:
        """Returns when all is in the arena."""
        if self._copies is not None:
            self._start(self._copies)  # what moved is found while a device copies
        views = {shard: self._source.view(shard) for shard in self._shards}
        at = [view.data_ptr() for view in views.values()]
        if self._copies is None or at != self._at:
            self._at = at
            self._wider = {shard: (views[shard], wider(views[shard])) for shard in self._plus}
            views |= {shard: copy for shard, (_, copy) in self._wider.items()}
            self._copies = self._memory.copies([(to, views[shard][box]) for to, (shard, box) in zip(self._to, self._boxes, strict=True)])
            self._start(self._copies)
        self._copies.wait()

    def digests(self, runs: Iterable[Run], digests: Digests) -> Iterator[tuple[int, bytes]]:
        """(run, its block digests)."""
        for run in runs:
            start = self.offsets[run.index]
            yield run.index, self._memory.digests(self._part[start : start + run.bytes], digests)

    def _start(self, copies: Copies) -> None:
        for shard, (live, copy) in self._wider.items():
            copy.copy_(live)
            copy.add_(self._plus[shard])
        copies.start()


def wider(view: torch.Tensor) -> torch.Tensor:
    """Memory for its values as float32, or what is wider."""
    import torch

    return torch.empty(view.shape, dtype=torch.promote_types(view.dtype, torch.float32), device=view.device)


def typed(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes of the arena as an array."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return data.view(kind).view(shape)

"""Live weights copied into the arena at publish: strided reads, the cast to the wire dtype, one list of copies.

The list is made once for each plan and part. A view is made again when its memory moved: a framework that swaps the storage of a parameter
must never have us publish what it left behind. After a copy training may go on: the arena is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from refit_runtime.plan.plan import SourcePlan
from refit_runtime.ports import Copies, Memory, WeightSource

if TYPE_CHECKING:
    import torch


class Snapshot:
    """`order` maps the plan's shard numbers to those of the source; `part` is where the runs lie."""

    def __init__(self, plan: SourcePlan, order: Sequence[int], source: WeightSource, part: torch.Tensor, memory: Memory) -> None:
        self._source, self._memory = source, memory
        self.offsets = plan.offsets
        self._to = [typed(part[copy.offset : copy.offset + copy.nbytes], copy.dtype.value, tuple(hi - lo for lo, hi in copy.box)) for copy in plan.copies]
        self._boxes = [(order[copy.shard], tuple(slice(lo, hi) for lo, hi in copy.box)) for copy in plan.copies]
        self._shards = sorted({shard for shard, _ in self._boxes})
        self._at: list[int] = []
        self._copies: Copies | None = None

    def take(self) -> None:
        """Returns when all is in the arena."""
        if self._copies is not None:
            self._copies.start()  # what moved is found while a device copies
        views = {shard: self._source.view(shard) for shard in self._shards}
        at = [view.data_ptr() for view in views.values()]
        if self._copies is None or at != self._at:
            self._at = at
            self._copies = self._memory.copies([(to, views[shard][box]) for to, (shard, box) in zip(self._to, self._boxes, strict=True)])
            self._copies.start()
        self._copies.wait()


def typed(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes of the arena as an array."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return data.view(kind).view(shape)

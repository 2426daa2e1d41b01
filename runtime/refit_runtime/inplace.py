"""A version in the live weights themselves: no arena, no copy; readers get rows of the tensors, and training waits until the version is released.

Whatever changes the weights before that is found by every reader, whose blocks then have other digests than the published ones: it installs nothing.
Live memory is read as it is, so it must have the dtype, the values and the contiguous last dim that are published; what has not is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from refit_api.errors import DtypeMismatch, UnsupportedLayout
from refit_api.tensors import Shard

from refit_runtime.digest import Digests
from refit_runtime.pieces import Piece, encode, pieces_of
from refit_runtime.plan.plan import Run, SnapshotCopy, SourcePlan
from refit_runtime.ports import Copies, Memory, Transport, WeightSource
from refit_runtime.readback import ReadBack

if TYPE_CHECKING:
    import torch

HINT = "use spec.trainer.snapshot Device or Host, which copy"


class InPlace:
    """The same calls as `Snapshot`'s. `order` maps the plan's shard numbers to those of the source."""

    def __init__(self, plan: SourcePlan, order: Sequence[int], source: WeightSource, memory: Memory, transport: Transport) -> None:
        self._plan, self._source, self._memory, self._transport = plan, source, memory, transport
        self._order = order
        self.offsets = dict.fromkeys(plan.offsets, 0)
        self.pieces: dict[int, bytes] = {}
        self._at: list[int] = []
        self._settle: Copies | None = None
        self._readback: ReadBack | None = None

    def take(self) -> None:
        """Returns when all that was written to the weights is in memory, and readers may find it there."""
        shards = dict.fromkeys(self._order[copy.shard] for copy in self._plan.copies)
        views = {shard: self._source.view(shard) for shard in shards}
        at = [view.data_ptr() for view in views.values()]
        if at != self._at:
            self._place(views)
            self._at = at
        if self._settle is not None:
            self._settle.start()
            self._settle.wait()

    def digests(self, runs: Iterable[Run], digests: Digests) -> Iterator[tuple[int, bytes]]:
        """(run, its block digests)."""
        if self._readback is not None:
            for run, found in groupby(self._readback.digests(digests), key=lambda piece: piece[0]):
                yield run, b"".join(seen for *_, seen in found)

    def _place(self, views: dict[int, torch.Tensor]) -> None:
        """Registers what the weights lie in and works out the pieces of each run."""
        import torch

        facts = self._source.shards().shards
        arrays = []
        pieces: dict[int, list[Piece]] = {run: [] for run in self._plan.offsets}
        for copy in self._plan.copies:
            shard = self._order[copy.shard]
            array = views[shard][tuple(slice(lo, hi) for lo, hi in copy.box)]
            pieces[copy.run] += readable(facts[shard], copy, array)
            arrays.append((copy.run, array))
        storages = {view.untyped_storage().data_ptr(): view for view in views.values()}
        regions = [torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage()) for view in storages.values()]
        self.pieces = {run: encode(of_run) for run, of_run in pieces.items()}
        if arrays:
            self._transport.register(*regions)
            first = arrays[0][1]
            element = first[(0,) * first.dim()]
            self._settle = self._memory.copies([(torch.empty_like(element), element)])  # comes after all that the caller's stream was given
            self._readback = ReadBack(arrays, self._memory, first.device)


def refuse_unreadable(shards: Sequence[Shard], views: Iterable[torch.Tensor]) -> None:
    """Before anything is published. Raises DtypeMismatch, UnsupportedLayout."""
    for shard, view in zip(shards, views, strict=True):
        name, live = shard.tensor.name, str(view.dtype).removeprefix("torch.")
        if live != shard.tensor.dtype.value:
            raise DtypeMismatch(
                f"{name}: published as {shard.tensor.dtype.value}, lies in memory as {live}; snapshot InPlace publishes what lies there: {HINT}",
                tensor=name,
                seen=live,
                expected=shard.tensor.dtype.value,
            )
        if shard.plus:
            raise UnsupportedLayout(f"{name}: {shard.plus:+g} is added to what lies in memory; snapshot InPlace adds nothing: {HINT}", tensor=name)


def readable(shard: Shard, copy: SnapshotCopy, array: torch.Tensor) -> list[Piece]:
    """Where a copy's bytes are, if they can be read there."""
    name = shard.tensor.name
    if copy.dtype is not shard.tensor.dtype:
        raise DtypeMismatch(
            f"{name}: the engines need {copy.dtype.value}, the trainer has {shard.tensor.dtype.value}; snapshot InPlace casts nothing: {HINT}",
            tensor=name,
            seen=shard.tensor.dtype.value,
            expected=copy.dtype.value,
        )
    found = pieces_of(array)
    if found is None:
        raise UnsupportedLayout(
            f"{name}: its last dim is strided in memory (shape {tuple(array.shape)}, strides {array.stride()}); snapshot InPlace reads rows: {HINT}",
            tensor=name,
            seen=array.stride(),
        )
    return found

"""Subset refit: a version that is its base with the selected tensors replaced, in the same arena, at both ends.

A trainer copies the selected tensors into the part that holds the base, or beside a copy of it; a reader that has the base reads the selected bytes
only. Every block is digested anew, and checked whole, so that a version is what its root says wherever its bytes came from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from refit_api.errors import SpecError
from refit_api.wire import Select

from refit_runtime.digest import Digests
from refit_runtime.plan.plan import Plan, Ranges, Run, SourcePlan, Subset
from refit_runtime.ports import Memory, WeightSource
from refit_runtime.snapshot import Snapshot

if TYPE_CHECKING:
    import torch


def subset_of(select: Select) -> Subset:
    return Subset(frozenset(select.params), frozenset(select.layers), frozenset(select.layer_groups))


def replaces(new: Select | None, old: Select | None) -> bool:
    """Whether what was prepared for one subset goes when another comes; what serves whole versions stays."""
    return new is not None and old not in (None, new)


def refuse_unmatched(plan: Plan, select: Select) -> None:
    """Every selector has to name a tensor that some engine reads. Raises SpecError with those that do not."""
    subset = subset_of(select)
    idle = subset.idle(plan.tensors) if subset != Subset() else ("nothing",)
    if idle:
        shown = ", ".join(idle[:8])
        raise SpecError(f"select: no tensor that an engine reads is selected by {shown} ({len(idle)} in all); name tensors as the checkpoint does", seen=shown)


def within(ranges: Ranges, offset: int, size: int) -> Ranges:
    """What of the ranges lies in these bytes."""
    first = max(bisect_right(ranges, (offset, 0)) - 1, 0)
    end = offset + size
    found = []
    for start, length in ranges[first:]:
        if start >= end:
            break
        lo, hi = max(start, offset), min(start + length, end)
        if lo < hi:
            found.append((lo, hi - lo))
    return tuple(found)


def between(ranges: Ranges, size: int) -> Ranges:
    """What of a run of `size` bytes lies in none of the ranges."""
    ends = [0, *(start + length for start, length in ranges)]
    starts = [*(start for start, _ in ranges), size]
    return tuple((lo, hi - lo) for lo, hi in zip(ends, starts, strict=True) if lo < hi)


class SubsetSnapshot:
    """The same calls as `Snapshot`'s. `base`: where the base's runs lie, or `part` itself; what is not selected comes from there, beside the training."""

    def __init__(
        self, whole: SourcePlan, plan: Plan, subset: Subset, order: Sequence[int], source: WeightSource, part: torch.Tensor, base: torch.Tensor, memory: Memory
    ) -> None:  # fmt: skip
        shards = source.shards().shards
        chosen = tuple(copy for copy in whole.copies if subset.keeps(shards[order[copy.shard]].tensor.name))
        self._snapshot = Snapshot(replace(whole, copies=chosen), order, source, part, memory)
        self.offsets, self.pieces = self._snapshot.offsets, self._snapshot.pieces
        pairs = []
        if part.data_ptr() != base.data_ptr():
            for run, ranges in plan.selected(subset, whole.offsets).items():
                at = ((whole.offsets[run] + offset, size) for offset, size in between(ranges, plan.runs[run].bytes))
                pairs += [(part[start : start + size], base[start : start + size]) for start, size in at]
        self._rest = memory.copies(pairs)
        self.take = self._snapshot.take

    def digests(self, runs: Iterable[Run], digests: Digests) -> Iterator[tuple[int, bytes]]:
        """(run, its block digests), of all bytes."""
        self._rest.start()
        self._rest.wait()
        return self._snapshot.digests(runs, digests)

"""Windows: a coordinate's bytes cut into parts that are moved one after the other through a ring of memory, instead of lying in an arena.

    windows(plan, class_, id, window, chunk) -> Window, Window, ...      .chunks: what is read, and where it lies in the window
                                                                         .copies: what is installed from there

Invariants: every needed byte is in exactly one window, and copied from there to wherever it is needed; windows, and what is read of a run, begin at a
digest block, so a window is verified by itself; every window has its share of every run, so all sources send at the same time, and runs are in layer
order, so a window is about a group of layers. No window is larger than asked for, which is a whole number of blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import numpy as np
from refit_api.tensors import Box, Shape, box_shape, whole

from refit_runtime.plan.plan import Chunk, CoordinatePlan, InstallCopy, Plan, Ranges, Run, Subset
from refit_runtime.plan.runs import ALIGNMENT
from refit_runtime.plan.survey import Numbers

BLOCK = 1 << 20  # of the digests
HALVES = 2  # of the ring: one window is read while the one before is installed
CHUNKS = 4  # of a window: what a window costs beside its bytes (posting, a launch, a wait) is paid once for them, and several sources send at once


@dataclass(frozen=True, slots=True)
class Window:
    """`chunks` with their offset in the window; the offsets of `copies` are such too."""

    chunks: tuple[tuple[Chunk, int], ...]
    copies: tuple[InstallCopy, ...]

    @property
    def bytes(self) -> int:
        return sum(chunk.bytes for chunk, _ in self.chunks)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Blocks of a run that follow each other: from byte `start` of the run on, at `local` in window `window`."""

    start: int
    bytes: int
    window: int
    local: int


def window_bytes(total: int, chunk_bytes: int) -> int:
    """The one bound on the memory of a windowed rank, which is `HALVES` times this; never much more than the weights themselves."""
    return BLOCK * max(1, min(CHUNKS * chunk_bytes // BLOCK, -(-total // (HALVES * BLOCK))))


def windows(
    plan: Plan,
    class_: str,
    id: str,  # noqa: A002
    window: int,
    chunk_bytes: int,
    subset: Subset | None = None,
    block: int = BLOCK,
) -> tuple[Window, ...]:
    """Of a subset only the blocks that have some of it, whole, and only its own copies."""
    mine = plan.coordinate(class_, id)
    runs = [plan.runs[run] for run in mine.offsets]
    selected = plan.selected(subset, mine.offsets) if subset is not None else {run.index: ((0, run.bytes),) for run in runs}
    stretches = _stretches(runs, selected, window, block)
    chunks, copies = defaultdict[int, list[tuple[Chunk, int]]](list), defaultdict[int, list[InstallCopy]](list)
    for run, found in stretches.items():
        for stretch in found:
            ends = range(0, stretch.bytes, chunk_bytes)
            chunks[stretch.window] += ((Chunk(run, stretch.start + at, min(chunk_bytes, stretch.bytes - at)), stretch.local + at) for at in ends)
    for copy in mine.copies:
        if subset is None or subset.keeps(copy.tensor):
            for number, part in _in_stretches(copy, mine, stretches[copy.run]):
                copies[number].append(part)
    return tuple(Window(tuple(chunks[number]), tuple(copies[number])) for number in sorted(chunks))


def _stretches(runs: Sequence[Run], selected: Mapping[int, Ranges], window: int, block: int) -> dict[int, list[_Stretch]]:
    """By run, in its order. Blocks are taken in the order of their relative place in their runs, so that all runs end together."""
    assert window >= block, "a block is verified whole"
    rows = [np.stack([np.full(len(found), i), found]) for i, run in enumerate(runs) if len(found := _blocks(selected[run.index], block))]
    stretches: dict[int, list[_Stretch]] = {run.index: [] for run in runs}
    if not rows:
        return stretches
    which, number = np.concatenate(rows, axis=1)
    of_run = np.array([run.bytes for run in runs], np.int64)[which]
    order = np.lexsort((which, (2 * number + 1) / -(-of_run // block)))
    which, start, size = which[order], (number * block)[order], np.minimum(of_run - number * block, block)[order]
    ends = np.cumsum(_aligned(size))
    first = count = 0
    while first < len(ends):
        last = int(np.searchsorted(ends, window + (int(ends[first - 1]) if first else 0), side="right"))
        local = 0
        for run, at, nbytes in _joined(which[first:last], start[first:last], size[first:last]):
            stretches[runs[run].index].append(_Stretch(at, nbytes, count, local))
            local += -(-nbytes // ALIGNMENT) * ALIGNMENT
        first, count = last, count + 1
    return stretches


def _aligned(size: Numbers) -> Numbers:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _blocks(selected: Ranges, block: int) -> Numbers:
    """The numbers of those that have some of what is selected."""
    parts = [np.arange(start // block, -(-(start + size) // block)) for start, size in selected]
    return np.unique(np.concatenate(parts)) if parts else np.arange(0)


def _joined(which: Numbers, start: Numbers, size: Numbers) -> Iterator[tuple[int, int, int]]:
    """(run, start, bytes) of blocks of one window that follow each other."""
    order = np.lexsort((start, which))
    which, start, size = which[order], start[order], size[order]
    before = np.cumsum(size) - size
    for (run, _), rows in groupby(range(len(which)), key=lambda row: (int(which[row]), int(start[row] - before[row]))):
        blocks = list(rows)
        yield run, int(start[blocks[0]]), int(size[blocks].sum())


def _in_stretches(copy: InstallCopy, mine: CoordinatePlan, stretches: Sequence[_Stretch]) -> Iterator[tuple[int, InstallCopy]]:
    """(window, what of a copy is installed from it)."""
    start = copy.offset - mine.offsets[copy.run]
    first = bisect_right(stretches, start, key=lambda stretch: stretch.start) - 1
    for stretch in stretches[max(first, 0) :]:
        if stretch.start >= start + copy.nbytes:
            return
        lo, hi = max(stretch.start, start), min(stretch.start + stretch.bytes, start + copy.nbytes)
        at = stretch.local + lo - stretch.start
        for part in parts(copy, lo - start, hi - start) if lo < hi else ():
            yield stretch.window, replace(part, offset=at)
            at += part.nbytes


def parts(copy: InstallCopy, start: int, end: int) -> Iterator[InstallCopy]:
    """Bytes `start` to `end` of a copy, as copies that follow each other; their offsets are left as they were."""
    width = copy.dtype.bytes
    extra = len(copy.at) - len(copy.shape)
    perm = copy.perm if copy.perm is not None else tuple(range(len(copy.shape)))
    for box in strips(copy.shape, start // width, end // width):
        moved = tuple((copy.at[extra + i][0] + box[dim][0], copy.at[extra + i][0] + box[dim][1]) for i, dim in enumerate(perm))
        shape = box_shape(box)
        yield replace(copy, nbytes=prod(shape) * width, shape=shape, at=(*copy.at[:extra], *moved))


def strips(shape: Shape, start: int, end: int) -> Iterator[Box]:
    """Elements `start` to `end` of a row-major array as boxes that follow each other: part of a row, whole rows, part of a row; each without gaps."""
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: Shape, row: int, start: int, end: int) -> Iterator[Box]:
    return (((row, row + 1), *rest) for rest in strips(shape[1:], start, end))

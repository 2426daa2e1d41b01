"""Live parameters read back through the copy list: the bytes of each run as they would lie in an arena, digested some blocks at a time.

Pieces are gathered into one of two windows, whole rows at a time; blocks that are complete are digested, the rest moves to the front of the other
window. Everything is prepared once, so that a check in a pause allocates and plans nothing. A piece that is needed twice counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from refit_runtime.digest import BLOCK, Digests
from refit_runtime.plan.plan import InstallCopy
from refit_runtime.ports import Copies, Memory
from refit_runtime.snapshot import typed

if TYPE_CHECKING:
    import torch

WINDOW = 64 * BLOCK
SLABS = 8  # of a window: none of it is larger, so that little of a window stays empty


@dataclass(frozen=True, slots=True)
class Window:
    """Blocks of a run from number `block` on; `fill` gathers them into `data`."""

    run: int
    block: int
    data: torch.Tensor
    fill: Copies


class ReadBack:
    """`pieces`: copies with their part of a live parameter, in arena order; no two dtypes differ."""

    def __init__(self, pieces: Sequence[tuple[InstallCopy, torch.Tensor]], memory: Memory, device: torch.device, window: int = WINDOW) -> None:
        import torch

        self._memory, self._size = memory, min(window, sum(copy.nbytes for copy, _ in pieces))
        self._spare = [torch.empty(self._size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._windows = [window for run, of_run in groupby(pieces, key=lambda piece: piece[0].run) for window in self._cut(run, of_run)]

    def digests(self, digests: Digests) -> Iterator[tuple[int, int, bytes]]:
        """(run, first block, digests of blocks)."""
        for window in self._windows:
            window.fill.start()  # digests come after it
            yield window.run, window.block, self._memory.digests(window.data, digests)

    def _cut(self, run: int, pieces: Iterable[tuple[InstallCopy, torch.Tensor]]) -> Iterator[Window]:
        here, other = self._spare
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        block = filled = 0
        for dtype, slab in _slabs(pieces, self._size // SLABS):
            size = slab.numel() * slab.element_size()
            if filled + size > self._size:
                whole = filled // BLOCK * BLOCK
                yield Window(run, block, here[:whole], self._memory.copies(pairs))
                pairs = [(other[: filled - whole], here[whole:filled])] if whole < filled else []
                block, filled = block + whole // BLOCK, filled - whole
                here, other = other, here
            pairs.append((typed(here[filled : filled + size], dtype, tuple(slab.shape)), slab))
            filled += size
        if filled:
            yield Window(run, block, here[:filled], self._memory.copies(pairs))


def _slabs(pieces: Iterable[tuple[InstallCopy, torch.Tensor]], most: int) -> Iterator[tuple[str, torch.Tensor]]:
    last = -1
    for copy, live in pieces:
        if copy.offset == last:
            continue
        last = copy.offset
        array = live[(0,) * (live.dim() - len(copy.shape))].detach()
        if copy.perm is not None:
            array = array.permute([copy.perm.index(dim) for dim in range(len(copy.perm))])
        for slab in _split(array, most):
            yield copy.dtype.value, slab


def _split(array: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """In row-major order, none of more than `most` bytes."""
    size = array.numel() * array.element_size()
    if size <= most:
        yield array
    elif array.shape[0] == 1:
        yield from _split(array[0], most)
    else:
        rows = max(1, most * array.shape[0] // size)
        for at in range(0, array.shape[0], rows):
            yield from _split(array[at : at + rows], most)

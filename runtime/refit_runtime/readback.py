"""Live memory digested as its bytes would lie in an arena, run after run, some blocks at a time.

Pieces are gathered into one of two windows, whole rows at a time; blocks that are complete are digested, the rest moves to the front of the other
window. Everything is prepared once, so that a check in a pause allocates and plans nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from refit_runtime.digest import BLOCK, Digests
from refit_runtime.ports import Copies, Memory

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
    """`pieces`: (run, array), in the order of the runs. `spare`: the two windows, if there is memory for them already."""

    def __init__(
        self, pieces: Sequence[tuple[int, torch.Tensor]], memory: Memory, device: torch.device, window: int = WINDOW, spare: Sequence[torch.Tensor] = ()
    ) -> None:
        import torch

        self._memory, self._size = memory, min(window, sum(array.nbytes for _, array in pieces), *(part.numel() for part in spare))
        self._spare = tuple(spare) or tuple(torch.empty(self._size, dtype=torch.uint8, device=device) for _ in range(2))
        self._windows = [window for run, of_run in groupby(pieces, key=lambda piece: piece[0]) for window in self._cut(run, of_run)]

    def digests(self, digests: Digests) -> Iterator[tuple[int, int, bytes]]:
        """(run, first block, digests of blocks)."""
        for window in self._windows:
            window.fill.start()  # digests come after it
            yield window.run, window.block, self._memory.digests(window.data, digests)

    def _cut(self, run: int, pieces: Iterable[tuple[int, torch.Tensor]]) -> Iterator[Window]:
        here, other = self._spare
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        block = filled = 0
        for slab in (slab for _, array in pieces for slab in _split(array, self._size // SLABS)):
            size = slab.nbytes
            if filled + size > self._size:
                whole = filled // BLOCK * BLOCK
                yield Window(run, block, here[:whole], self._memory.copies(pairs))
                pairs = [(other[: filled - whole], here[whole:filled])] if whole < filled else []
                block, filled = block + whole // BLOCK, filled - whole
                here, other = other, here
            pairs.append((here[filled : filled + size].view(slab.dtype).view(slab.shape), slab))
            filled += size
        if filled:
            yield Window(run, block, here[:filled], self._memory.copies(pairs))


def _split(array: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """In row-major order, none of more than `most` bytes."""
    size = array.nbytes
    if size <= most:
        yield array
    elif array.shape[0] == 1:
        yield from _split(array[0], most)
    else:
        rows = max(1, most * array.shape[0] // size)
        for at in range(0, array.shape[0], rows):
            yield from _split(array[at : at + rows], most)

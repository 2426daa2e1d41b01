"""How one Megatron tensor lies on a rank, and which boxes of checkpoint tensors that memory is. Pure: shapes in, boxes out.

Every role is one case of the same: the rows of a tensor, perhaps fused from bands of several checkpoint tensors, perhaps padded at
the end, cut into equal parts along one dim. QKV has a group of bands for each KV head, a gated MLP one for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refit_api.tensors import Box, Shape, whole

from refit_runtime.adapters.megatron.mesh import ALONE, Axis


@dataclass(frozen=True, slots=True)
class Bands:
    """Rows of a fused tensor: for each of `groups`, first the rows of each part, in order."""

    groups: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """`shape` is the whole tensor's as Megatron has it, padding included; dim `dim` is cut over `axis`, or nothing if None.

    `kept` is how many rows the checkpoint has, where Megatron pads. A tensor with bands is never padded.
    """

    shape: Shape
    dim: int | None = None
    axis: Axis = ALONE
    bands: Bands | None = None
    kept: int | None = None

    def local(self) -> Shape | None:
        """What a rank holds; None where the cut does not divide."""
        if self.dim is None:
            return self.shape
        if self.shape[self.dim] % self.axis.size:
            return None
        return tuple(extent // self.axis.size if dim == self.dim else extent for dim, extent in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """Part `local` of a rank's memory is `box` of checkpoint tensor number `tensor`, which has `shape`."""

    tensor: int
    shape: Shape
    box: Box
    local: Box


def pieces(layout: Layout) -> Iterator[Piece]:
    """In the order of memory. Rows that only pad are no piece."""
    local = layout.local()
    assert local is not None, "checked before a layout is used"
    held = list(whole(local))
    if layout.dim is not None:
        start = layout.axis.rank * local[layout.dim]
        held[layout.dim] = (start, start + local[layout.dim])
    (first, last), rest = held[0], tuple(held[1:])
    for tensor, rows, at in bands_of(layout):
        lo, hi = max(first, at), min(last, at + rows[1] - rows[0])
        if lo < hi:
            extent = layout.kept if layout.bands is None else layout.bands.groups * layout.bands.rows[tensor]
            shape = (extent if extent is not None else layout.shape[0], *layout.shape[1:])
            yield Piece(tensor, shape, ((rows[0] + lo - at, rows[0] + hi - at), *rest), ((lo - first, hi - first), *whole(local)[1:]))


def bands_of(layout: Layout) -> Iterator[tuple[int, tuple[int, int], int]]:
    """`(checkpoint tensor, its rows, where they start in the whole Megatron tensor)`, in order."""
    if layout.bands is None:
        yield 0, (0, layout.kept if layout.kept is not None else layout.shape[0]), 0
        return
    at = 0
    for group in range(layout.bands.groups):
        for tensor, rows in enumerate(layout.bands.rows):
            yield tensor, (group * rows, (group + 1) * rows), at
            at += rows

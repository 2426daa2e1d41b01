"""Boxes cut by boxes. A grid has a cell for every piece that the cut points of some boxes leave, so its size never depends on the tensor's.

Invariant: pieces come in row-major order, and equal neighbours are merged the one way that case files define: along dim 0 into groups of equal
consecutive slices, then each group along dim 1, and so on. The same function words the pieces of a plan and the holes of a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import numpy.ma
from numpy.typing import NDArray
from refit_api.tensors import Box, Shape, whole

Cells = NDArray[np.int64]
Members = tuple[int, ...]
"""Indices of the boxes that contain a piece, ascending."""


def contains(outer: Box, inner: Box) -> bool:
    return len(outer) == len(inner) and all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def relative(box: Box, frame: Box) -> Box:
    """`box` counted from the corner of `frame`."""
    return tuple((lo - origin, hi - origin) for (lo, hi), (origin, _) in zip(box, frame, strict=True))


def strips(box: Box, shape: Shape) -> int:
    """How many contiguous strips a box is in the row-major memory of `shape`."""
    extents = [hi - lo for lo, hi in box]
    while extents and extents[-1] == shape[len(extents) - 1]:
        extents.pop()
    return prod(extents[:-1])


def cells(shape: Shape, boxes: Iterable[Box]) -> int:
    """How many cells a grid of these boxes would have."""
    edges: list[set[int]] = [{0, extent} for extent in shape]
    for box in boxes:
        for found, side in zip(edges, box, strict=True):
            found.update(side)
    return prod(len(found) - 1 for found in edges)


class Grid:
    """The cells that the edges of `boxes` cut `shape` into."""

    def __init__(self, shape: Shape, boxes: Sequence[Box]) -> None:
        self._edges = [sorted({0, extent, *(edge for box in boxes for edge in box[dim])}) for dim, extent in enumerate(shape)]
        self._index = [{edge: i for i, edge in enumerate(edges)} for edges in self._edges]
        self.cells = tuple(len(edges) - 1 for edges in self._edges)

    def where(self, box: Box) -> tuple[slice, ...]:
        """The cells of a box whose edges the grid has."""
        return tuple(slice(index[lo], index[hi]) for index, (lo, hi) in zip(self._index, box, strict=True))

    def counts(self, boxes: Sequence[Box]) -> Cells:
        """How many of the boxes contain each cell."""
        found = np.zeros(self.cells, np.int64)
        for box in boxes:
            found[self.where(box)] += 1
        return found

    def pieces(self, labels: Cells) -> Iterator[tuple[int, Box]]:
        """The cells with a label other than 0, equal ones merged."""
        yield from self._merged(labels, 0)

    def _merged(self, labels: Cells, dim: int) -> Iterator[tuple[int, Box]]:
        if labels.ndim == 0:
            if labels != 0:
                yield int(labels), ()
            return
        changes = np.any(labels[1:] != labels[:-1], axis=tuple(range(1, labels.ndim)))
        starts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(labels)] if len(labels) else []
        edges = self._edges[dim]
        for lo, hi in pairwise(starts):
            for label, rest in self._merged(labels[lo], dim + 1):
                yield label, ((edges[lo], edges[hi]), *rest)


def covered(shape: Shape, boxes: Sequence[Box], times: Callable[[Cells], NDArray[np.bool_]]) -> list[Box]:
    """Where the number of boxes that contain an element is as asked."""
    grid = Grid(shape, boxes)
    return [box for _, box in grid.pieces(times(grid.counts(boxes)).astype(np.int64))]


def refine(shape: Shape, boxes: Sequence[Box]) -> list[tuple[Members, Box]]:
    """The common refinement: every piece lies inside or outside of each box; pieces outside of all boxes are left out."""
    everything = whole(shape)
    if all(box == everything for box in boxes):
        return [(tuple(range(len(boxes))), everything)] if boxes else []
    grid = Grid(shape, boxes)
    labels = np.zeros(grid.cells, np.int64)
    members: list[Members] = [()]
    for i, box in enumerate(boxes):
        where = grid.where(box)
        before, again = np.unique(labels[where], return_inverse=True)
        labels[where] = (again + len(members)).reshape(labels[where].shape)
        members.extend((*members[label], i) for label in before.tolist())
    return [(members[label], box) for label, box in grid.pieces(labels)]

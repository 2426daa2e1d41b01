"""Strided copies as tiles for one kernel: arithmetic on addresses, without a device.

A list of copies becomes a few tables, one for each `Form`. A row of a table is a tile, an array of at most `rows` x `columns` units, and says where it
is and where it goes; the kernel needs nothing else. Copies that keep the dtype move the widest units that all their addresses allow.

Invariants: the tiles of a copy cover each of its elements once; no tile is larger than its form says; in a form with `vector` units every address is a
multiple of 16 bytes, every stride and width one of `vector` units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WIDE, NARROW, SQUARE = (32, 256), (512, 16), (64, 64)
NARROW_UNITS = 64  # rows this short would leave most of a wide tile idle
UNITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
FIELDS = ("target", "source", "rows", "columns", "target_row", "source_row", "target_column", "source_column")

Table = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class End:
    """One side of a copy: where it starts, its strides in elements, and its elements."""

    address: int
    strides: tuple[int, ...]
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class Form:
    """What the tiles of one launch have in common. `strided`: neither rows nor columns need to lie together."""

    target: str
    source: str
    vector: int
    rows: int
    columns: int
    strided: bool

    @property
    def fields(self) -> int:
        return len(FIELDS) if self.strided else len(FIELDS) - 2


class _Dim(NamedTuple):
    extent: int
    target: int
    source: int


def tables(copies: Iterable[tuple[tuple[int, ...], End, End]]) -> dict[Form, Table]:
    """`copies` are (shape, target, source)."""
    found: defaultdict[Form, list[Table]] = defaultdict(list)
    for shape, target, source in copies:
        if 0 not in shape:
            for form, table in _tiles(shape, target, source):
                found[form].append(table)
    return {form: np.concatenate(parts) for form, parts in found.items()}


def _tiles(shape: tuple[int, ...], target: End, source: End) -> Iterator[tuple[Form, Table]]:
    *outer, inner = _merged(shape, target, source)
    if inner.target != 1 or inner.source != 1:
        yield from _strided(outer, inner, target, source)
        return
    bytes_, vector = _unit(outer, inner, target, source)
    if bytes_ is not None:
        item = target.itemsize
        outer = [_Dim(dim.extent, dim.target * item // bytes_, dim.source * item // bytes_) for dim in outer]
        inner = _Dim(inner.extent * item // bytes_, 1, 1)
        target, source = (End(end.address, (), UNITS[bytes_], bytes_) for end in (target, source))
    rows, columns = WIDE if inner.extent > NARROW_UNITS else NARROW
    form = Form(target.dtype, source.dtype, vector, rows, columns, strided=False)
    for at, dims, width in _cut(outer, inner, columns):
        by = max(range(len(dims)), key=lambda i: dims[i].extent)
        yield form, _table(form, dims, by, _Dim(width, 1, 1), _moved(target, at), _moved(source, at))


def _strided(outer: list[_Dim], inner: _Dim, target: End, source: End) -> Iterator[tuple[Form, Table]]:
    """Columns follow the target, rows follow the source, so that a tile finds both together in the cache."""
    if target.dtype == source.dtype:
        target, source = (End(end.address, (), UNITS[end.itemsize], end.itemsize) for end in (target, source))
    form = Form(target.dtype, source.dtype, 1, *SQUARE, strided=True)
    for at, dims, width in _cut(outer, inner, form.columns):
        by = min(range(len(dims)), key=lambda i: dims[i].source if dims[i].extent > 1 else 1 << 62)
        column = _Dim(width, inner.target, inner.source)
        yield form, _table(form, dims, by, column, _moved(target, at * inner.target), _moved(source, at * inner.source))


def _merged(shape: tuple[int, ...], target: End, source: End) -> list[_Dim]:
    """As few dims as describe the copy, in the order in which the target lies in memory."""
    dims = sorted((_Dim(*dim) for dim in zip(shape, target.strides, source.strides, strict=True) if dim[0] > 1), key=lambda dim: -dim.target)
    found: list[_Dim] = []
    for dim in dims:
        last = found[-1] if found else None
        if last is not None and (last.target, last.source) == (dim.extent * dim.target, dim.extent * dim.source):
            found[-1] = _Dim(last.extent * dim.extent, dim.target, dim.source)
        else:
            found.append(dim)
    return found or [_Dim(1, 1, 1)]


def _unit(outer: list[_Dim], inner: _Dim, target: End, source: End) -> tuple[int | None, int]:
    """Bytes of the widest unit (None: elements, since they are cast), and how many of them move at once."""
    if target.dtype != source.dtype:
        vector = 16 // min(target.itemsize, source.itemsize)
        whole = all(size % vector == 0 for dim in outer for size in (dim.target, dim.source)) and inner.extent % vector == 0
        return None, vector if whole and (target.address | source.address) % 16 == 0 else 1
    steps = (size * target.itemsize for dim in outer for size in (dim.target, dim.source))
    common = gcd(16, target.address, source.address, inner.extent * target.itemsize, *steps)
    return min(common, 8), 2 if common == 16 else 1


def _cut(outer: list[_Dim], inner: _Dim, columns: int) -> Iterator[tuple[int, list[_Dim], int]]:
    """(start on the inner dim, dims, columns): whole tiles of columns as one more dim, then what is left of the inner one."""
    many, rest = divmod(inner.extent, columns)
    if many:
        yield 0, [*outer, _Dim(many, columns * inner.target, columns * inner.source)], columns
    if rest:
        yield many * columns, outer or [_Dim(1, 0, 0)], rest


def _table(form: Form, dims: list[_Dim], by: int, column: _Dim, target: End, source: End) -> Table:
    """Rows of tiles go along dim `by`; neighbours in the target are neighbours in the table."""
    row = dims[by]
    starts = np.arange(0, row.extent, form.rows, dtype=np.int64)
    others = [dim for i, dim in enumerate(dims) if i != by]
    table = np.empty((len(starts), prod(dim.extent for dim in others), form.fields), np.int64)
    for field, end, step in ((0, target, "target"), (1, source, "source")):
        places = np.zeros(1, np.int64)
        for dim in others:
            places = (places[:, None] + np.arange(dim.extent, dtype=np.int64) * getattr(dim, step)).reshape(-1)
        table[:, :, field] = end.address + end.itemsize * (starts[:, None] * getattr(row, step) + places)
    table[:, :, 2] = np.minimum(form.rows, row.extent - starts)[:, None]
    values = (column.extent, row.target, row.source, column.target, column.source)
    table[:, :, 3:] = values[: form.fields - 3]
    return table.reshape(-1, form.fields)


def _moved(end: End, elements: int) -> End:
    return End(end.address + elements * end.itemsize, end.strides, end.dtype, end.itemsize)

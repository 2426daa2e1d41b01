"""Tiles of any strided copy move what numpy moves: each element once, in units that the addresses allow."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from refit_runtime.adapters.cuda_tiles import NARROW, SQUARE, WIDE, End, Form, Table, tables

from tests.examples import examples

BASE = 4096  # of the memory that addresses count from
Memory = NDArray[np.uint8]


def run(found: dict[Form, Table], memory: Memory) -> None:
    """What the kernel does."""
    for form, table in found.items():
        to, source = np.dtype(form.target), np.dtype(form.source)
        for target_at, source_at, rows, columns, to_row, from_row, *steps in table.tolist():
            to_column, from_column = steps if form.strided else (1, 1)
            assert rows <= form.rows
            assert columns <= form.columns
            if form.vector > 1:
                assert not (target_at | source_at) % 16
                assert not any(value % form.vector for value in (columns, to_row, from_row))
            _array(memory, target_at, (rows, columns), (to_row, to_column), to)[...] = _array(
                memory, source_at, (rows, columns), (from_row, from_column), source
            )


def _array(memory: Memory, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> NDArray:
    return np.ndarray(shape, dtype, memory.data, address - BASE, [step * dtype.itemsize for step in strides])


@st.composite
def ends(draw: st.DrawFn, shape: tuple[int, ...], start: int, dtype: str) -> End:
    """A part of an array that may be padded, transposed, and off by some elements."""
    item, order = np.dtype(dtype).itemsize, draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
    extents = [shape[dim] + draw(st.sampled_from([0, 0, 0, 3, 8 if len(shape) < 3 else 2])) for dim in order]
    strides = dict(zip(order, (prod(extents[i + 1 :]) for i in range(len(order))), strict=True))
    return End(start + item * draw(st.sampled_from([0, 0, 8, 1])), tuple(strides[dim] for dim in range(len(shape))), dtype, item)


@st.composite
def copies(draw: st.DrawFn) -> tuple[tuple[int, ...], End, End]:
    extents = st.sampled_from([1, 2, 3, 7, 16, 40, 64, 65, 300])
    shape = tuple(draw(st.lists(extents, max_size=4).filter(lambda shape: prod(shape) <= 20_000)))
    source = draw(st.sampled_from(["float32", "float16", "int8", "int64"]))
    target = draw(st.sampled_from([source, source, "float32" if source == "float16" else "float16"])) if source.startswith("float") else source
    return shape, draw(ends(shape, BASE, target)), draw(ends(shape, BASE + (4 << 20), source))


@given(copies())
@examples(80)
def test_any_copy(copy: tuple[tuple[int, ...], End, End]) -> None:
    shape, target, source = copy
    memory = np.random.default_rng(1).integers(0, 64, 8 << 20, dtype=np.uint8)
    expected = memory.copy()
    for each, array in ((target, expected), (source, expected)):
        assert _array(array, each.address, shape, each.strides, np.dtype(each.dtype)).size == prod(shape)
    _array(expected, target.address, shape, target.strides, np.dtype(target.dtype))[...] = _array(
        memory, source.address, shape, source.strides, np.dtype(source.dtype)
    )
    found = tables([copy])
    run(found, memory)
    assert np.array_equal(memory, expected)
    assert sum(int((table[:, 2] * table[:, 3]).sum()) * np.dtype(form.target).itemsize for form, table in found.items()) == prod(shape) * target.itemsize


def end(strides: tuple[int, ...], dtype: str = "bfloat16", itemsize: int = 2, address: int = BASE) -> End:
    return End(address, strides, dtype, itemsize)


FORMS = {
    "a whole matrix": ((4096, 4096), end((4096, 1)), end((4096, 1)), Form("int64", "int64", 2, *WIDE, strided=False), 512),
    "columns of a matrix": ((4096, 1792), end((1792, 1)), end((7168, 1)), Form("int64", "int64", 2, *WIDE, strided=False), 256),
    "a few columns": ((4096, 8), end((8, 1)), end((64, 1)), Form("int64", "int64", 2, *NARROW, strided=False), 8),
    "heads between others": ((4, 512, 64), end((512 * 64, 64, 1)), end((768 * 64, 64, 1)), Form("int64", "int64", 2, *WIDE, strided=False), 4),
    "an odd number of elements": ((3, 85), end((85, 1)), end((85, 1)), Form("int16", "int16", 1, *WIDE, strided=False), 1),
    "off by two bytes": ((1024,), end((1,)), end((1,), address=BASE + 2), Form("int16", "int16", 1, *WIDE, strided=False), 1),
    "transposed": ((128, 128), end((128, 1)), end((1, 128)), Form("int16", "int16", 1, *SQUARE, strided=True), 4),
    "masters in float32": ((1024, 512), end((512, 1)), end((512, 1), "float32", 4), Form("bfloat16", "float32", 8, *WIDE, strided=False), 64),
    "a cast of an odd part": ((5, 7), end((7, 1)), end((9, 1), "float32", 4), Form("bfloat16", "float32", 1, *NARROW, strided=False), 1),
    "a scalar": ((), end(()), end(()), Form("int16", "int16", 1, *NARROW, strided=False), 1),
    "a row for everybody": ((32, 4096), end((4096, 1)), end((0, 1)), Form("int64", "int64", 2, *WIDE, strided=False), 4),
}


@pytest.mark.parametrize(("shape", "target", "source", "form", "tiles"), FORMS.values(), ids=FORMS.keys())
def test_forms(shape: tuple[int, ...], target: End, source: End, form: Form, tiles: int) -> None:
    """What is fast is so by its form: wide units wherever addresses allow them, few tiles."""
    assert {form: len(table) for form, table in tables([(shape, target, source)]).items()} == {form: tiles}


def test_nothing_to_copy() -> None:
    assert tables([((0, 5), end((5, 1)), end((5, 1)))]) == {}

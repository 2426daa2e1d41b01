"""Pieces of live memory say where each byte of a run is, however it is strided and wherever a read begins and ends."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refit_api.errors import WireMismatch
from refit_runtime.pieces import Piece, encode, parts_of, pieces_of

from tests.examples import examples


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A box of a larger tensor, some dims exchanged, the last one in its place."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    memory = torch.randint(0, 256, (*(extent + 2 for extent in shape), 1), dtype=torch.uint8).view(draw(st.sampled_from([torch.uint8, torch.int8])))[..., 0]
    box = memory[tuple(slice(at := draw(st.integers(0, 2)), at + extent) for extent in shape)]
    turned = [*draw(st.permutations(range(max(0, len(shape) - 1)))), *range(max(0, len(shape) - 1), len(shape))]
    return box.permute(turned)


@examples(150)
@given(st.lists(views(), min_size=1, max_size=4), st.data())
def test_any_part_of_a_run_is_found(arrays: list[torch.Tensor], data: st.DataObject) -> None:
    run = b"".join(array.contiguous().view(torch.uint8).numpy().tobytes() for array in arrays)
    found = [pieces_of(array) for array in arrays]
    pieces = encode(piece for of_array in found if of_array is not None for piece in of_array)
    lo = data.draw(st.integers(0, len(run) - 1))
    size = data.draw(st.integers(1, len(run) - lo))
    parts = parts_of(pieces, lo, size)
    assert b"".join(ctypes.string_at(address, part) for address, part in parts) == run[lo : lo + size]


def test_whole_and_neighbouring_arrays_are_one_piece_and_columns_are_one_piece_of_many_rows() -> None:
    memory = torch.zeros(64, 32, dtype=torch.bfloat16)
    at = memory.data_ptr()
    assert pieces_of(memory) == [Piece(at, 4096, 0, 1)]
    assert encode([*(pieces_of(memory[:8]) or ()), *(pieces_of(memory[8:]) or ())]) == encode([Piece(at, 4096, 0, 1)])
    assert pieces_of(memory[:, 16:]) == [Piece(at + 32, 32, 64, 64)]
    assert pieces_of(memory.T) is None
    assert pieces_of(memory[0, 3]) == [Piece(at + 6, 2, 0, 1)]


@pytest.mark.parametrize("pieces", [b"1" * 31, encode([Piece(8, 0, 0, 1)]), encode([Piece(8, 8, 8, -1)])], ids=["cut off", "empty", "negative"])
def test_pieces_that_are_none_are_refused(pieces: bytes) -> None:
    with pytest.raises(WireMismatch):
        parts_of(pieces, 0, 8)

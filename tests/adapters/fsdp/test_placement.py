"""Boxes of mesh places equal what nested torch.chunk leaves there: any extents, any meshes, any order of placements."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refit_api.errors import UnsupportedLayout
from refit_runtime.adapters.fsdp.placement import local_box
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.examples import examples


def chunk(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """torch.chunk, with the empty parts that it leaves out."""
    parts = torch.chunk(tensor, ranks, dim) if tensor.shape[dim] else ()
    return parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)


def held(shape: tuple[int, ...], box: Any) -> torch.Tensor:
    whole = torch.arange(prod(shape)).view(shape)
    return whole[tuple(slice(lo, hi) for lo, hi in box)] if box is not None else whole[:0]


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@examples(60)
@given(sizes=meshes, shape=shapes, data=st.data())
def test_shards_of_every_place(sizes: tuple[int, ...], shape: tuple[int, ...], data: st.DataObject) -> None:
    dims = [data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in sizes]
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    copies = prod(size for size, dim in zip(sizes, dims, strict=True) if dim is None)
    seen = []
    for place in product(*(range(size) for size in sizes)):
        expected = torch.arange(prod(shape)).view(shape)
        for rank, ranks, dim in zip(place, sizes, dims, strict=True):
            expected = expected if dim is None else chunk(expected, dim, rank, ranks)
        found = held(shape, local_box("w", shape, sizes, place, placements))
        assert found.numel() == expected.numel()
        assert not expected.numel() or torch.equal(found, expected)
        seen += found.flatten().tolist()
    assert sorted(seen) == sorted([*range(prod(shape))] * copies), "each element once for each replica"


@examples(40)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple), times=st.integers(1, 3), columns=st.integers(1, 3))
def test_strided_shards_cut_what_the_dims_to_their_right_left(sizes: tuple[int, ...], times: int, columns: int) -> None:
    """FSDP over tensor parallelism: the last mesh dim cuts first; the first one cuts last, and may leave parts that are short or empty."""
    shape = (prod(sizes[1:]) * times, columns)
    placements = [_StridedShard(0, split_factor=prod(sizes[dim + 1 :])) for dim in range(len(sizes) - 1)] + [Shard(0)]
    for place in product(*(range(size) for size in sizes)):
        expected = torch.arange(prod(shape)).view(shape)
        for rank, ranks in reversed(list(zip(place, sizes, strict=True))):
            expected = chunk(expected, 0, rank, ranks)
        assert torch.equal(held(shape, local_box("w", shape, sizes, place, placements)), expected)


REFUSED = {
    "a partial sum": ((4, 4), (2,), [Partial()], "Partial"),
    "a partial sum on one of two dims": ((4, 4), (2, 2), [Shard(0), Partial("avg")], "Partial"),
    "a split factor of nothing": ((8,), (2, 2), [_StridedShard(0, split_factor=4), Shard(0)], "split factor"),
    "a split factor for dims to the left": ((8,), (2, 2), [Shard(0), _StridedShard(0, split_factor=2)], "split factor"),
    "strides over parts that are not equal": ((5,), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], "not divisible"),
}


@pytest.mark.parametrize(("shape", "sizes", "placements", "why"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any], why: str) -> None:
    for place in product(*(range(size) for size in sizes)):
        with pytest.raises(UnsupportedLayout, match=f"^w: placement .*{why}"):
            local_box("w", shape, sizes, place, placements)


def test_an_unknown_placement_is_refused() -> None:
    class Ragged:
        """Of a torch to come."""

    with pytest.raises(UnsupportedLayout, match="Ragged"):
        local_box("w", (4,), (2,), (0,), [Ragged()])

"""Layouts that can be planned, for properties: every tensor is held completely by each replica, and every parameter is written completely."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import strategies as st
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec, whole

Layouts = tuple[list[RankShards], dict[str, list[CoordinateNeeds]]]

DTYPES = st.sampled_from([Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.UINT8, Dtype.FLOAT64])


def _cuts(draw: st.DrawFn, extent: int) -> list[tuple[int, int]]:
    inner = draw(st.sets(st.integers(1, extent - 1), max_size=2)) if extent > 1 else set()
    return list(pairwise([0, *sorted(inner), extent]))


def _parts(draw: st.DrawFn, shape: Shape) -> list[Box]:
    return list(product(*(_cuts(draw, extent) for extent in shape)))


@st.composite
def layouts(draw: st.DrawFn) -> Layouts:
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = [TensorSpec(f"model.layers.{i}.w", draw(DTYPES), shape) for i, shape in enumerate(shapes)]
    replicas, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    held: dict[int, list[Shard]] = {rank: [] for rank in range(replicas * ranks)}
    for tensor, replica in product(tensors, range(replicas)):
        for box in _parts(draw, tensor.shape):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)):
                held[replica * ranks + rank].append(Shard(tensor, box))
    trainer = [RankShards(rank, rank // ranks, tuple(shards)) for rank, shards in held.items()]
    classes = {
        name: [CoordinateNeeds(f"tp{i}", _needs(draw, tensors)) for i in range(draw(st.integers(1, 2)))] for name in ("a", "b")[: draw(st.integers(1, 2))]
    }
    return trainer, classes


def _needs(draw: st.DrawFn, tensors: list[TensorSpec]) -> tuple[Need, ...]:
    found = []
    for tensor, tied in product(tensors, range(2)):
        if draw(st.booleans()):
            perm = tuple(draw(st.permutations(range(len(tensor.shape)))))
            turned = tuple(tensor.shape[dim] for dim in perm)
            extra = (1,) * draw(st.integers(0, 1))
            parameter = Parameter(f"p{tensor.name}.{tied}", tensor.dtype, (*extra, *turned))
            for box in _parts(draw, tensor.shape):
                at = (*whole(extra), *(box[dim] for dim in perm))
                found.append(Need(tensor.name, box, parameter, at, perm if perm != tuple(range(len(perm))) else None, tensor.shape))
    return tuple(draw(st.permutations(found)))


def without(box: Box, index: tuple[int, ...]) -> list[Box]:
    """The box in parts that leave one element out."""
    if not box:
        return []
    (lo, hi), *rest = box
    parts: list[Box] = [(side, *rest) for side in ((lo, index[0]), (index[0] + 1, hi)) if side[0] < side[1]]
    return parts + [((index[0], index[0] + 1), *part) for part in without(tuple(rest), index[1:])]


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(lo, hi) for lo, hi in box)))

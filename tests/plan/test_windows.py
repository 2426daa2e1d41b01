"""What is installed window by window is what is installed from an arena: any layouts, any ring, any subset; and nothing crosses the wire twice."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refit_api.tensors import CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec, whole
from refit_runtime.digest import BLOCK
from refit_runtime.plan import windows as module
from refit_runtime.plan.cases.answer import CLASS, Planned, plan_case
from refit_runtime.plan.plan import InstallCopy, Subset, plan
from refit_runtime.plan.windows import CHUNKS, HALVES, Window, strips, window_bytes, windows

from tests.examples import SOAK, examples
from tests.plan.answers import written
from tests.plan.random_cases import random_case

SEEDS = range(600 if SOAK else 80)
MIB = 1 << 20


@examples(60)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_strips_follow_each_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start + 1, size))
    array = np.arange(size).reshape(shape)
    found = [array[tuple(slice(lo, hi) for lo, hi in box)].reshape(-1).tolist() for box in strips(shape, start, end)]
    assert [number for strip in found for number in strip] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_bytes_as_from_an_arena(seed: int) -> None:
    planned, rng = plan_case(written(random_case(seed))), Random(seed)
    if planned.plan is None:
        return
    names = planned.plan.tensors
    for needs in planned.coordinates:
        block = rng.choice([64, 256])
        subset = Subset(frozenset(rng.sample(names, rng.randint(1, len(names))))) if names and rng.random() < 0.5 else None
        window, chunk = max(256, block * rng.randint(1, 6)), block * rng.randint(1, 3)
        found = windows(planned.plan, CLASS, needs.id, window, chunk, subset, block)
        _compare(planned, needs, found, subset, window, block, Random(seed))


def _compare(planned: Planned, needs: Any, found: Sequence[Window], subset: Subset | None, window: int, block: int, rng: Random) -> None:
    assert planned.plan is not None
    mine = planned.plan.coordinate(CLASS, needs.id)
    arena = np.frombuffer(rng.randbytes(mine.arena_bytes), np.uint8)
    whole, parts = _zeros(needs), _zeros(needs)
    for copy in mine.copies:
        if subset is None or subset.keeps(copy.tensor):
            _install(copy, arena, whole)
    read: set[tuple[int, int]] = set()
    for one in found:
        ring = np.zeros(window, np.uint8)  # what is not read in this window is not there
        for chunk, at in one.chunks:
            assert chunk.offset % block == 0
            assert not ring[at : at + chunk.bytes].any() or chunk.bytes == 0
            there = mine.offsets[chunk.run] + chunk.offset
            ring[at : at + chunk.bytes] = arena[there : there + chunk.bytes]
            bytes_ = {(chunk.run, chunk.offset + i) for i in range(chunk.bytes)}
            assert not bytes_ & read, "nothing crosses the wire twice"
            read |= bytes_
        for copy in one.copies:
            _install(copy, ring, parts)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    if subset is None:
        assert len(read) == mine.bytes


def _zeros(needs: Any) -> dict[str, Any]:
    stated = (*(need.parameter for need in needs.needs), *needs.unwritten)
    return {parameter.name: np.zeros((*parameter.shape, parameter.dtype.bytes), np.uint8) for parameter in stated}


def _install(copy: InstallCopy, memory: Any, params: dict[str, Any]) -> None:
    piece = memory[copy.offset : copy.offset + copy.nbytes].reshape(*copy.shape, copy.dtype.bytes)
    piece = piece if copy.perm is None else piece.transpose((*copy.perm, len(copy.perm)))
    target = params[copy.parameter][tuple(slice(lo, hi) for lo, hi in copy.at)]
    target[...] = piece.reshape(target.shape)


def two_ranks(rows: int) -> Any:
    """Half of the rows of four layers each, to an engine that has all of them."""
    names = [f"model.layers.{layer}.w" for layer in range(4)]
    spec = [TensorSpec(name, Dtype.UINT8, (2 * rows, 1 << 10)) for name in names]
    ranks = [RankShards(r, 0, tuple(Shard(one, ((r * rows, (r + 1) * rows), (0, 1 << 10))) for one in spec)) for r in range(2)]
    needs = tuple(Need(one.name, whole(one.shape), Parameter(one.name, one.dtype, one.shape), whole(one.shape)) for one in spec)
    return plan(ranks, {"c": [CoordinateNeeds("tp0", needs)]})


def test_every_window_has_a_share_of_every_source_and_about_a_layer() -> None:
    made = two_ranks(4 << 10)  # 4 MiB of each layer on each rank
    found = windows(made, "c", "tp0", 8 * MIB, 2 * MIB)
    assert [{chunk.run: chunk.bytes for chunk, _ in one.chunks} for one in found] == [{0: 2 * MIB, 1: 2 * MIB}] * 4
    assert [sorted({copy.tensor for copy in one.copies}) for one in found] == [[f"model.layers.{layer}.w"] for layer in range(4)]


RINGS = {
    "large weights: four chunks": (16 << 30, 64 * MIB, CHUNKS * 64 * MIB),
    "small ones: half of them": (100 * MIB, 64 * MIB, 50 * MIB),
    "whole blocks": (3 * MIB + 1, 64 * MIB, 2 * MIB),
    "at least a block": (1, 64 * MIB, MIB),
    "chunks of no whole blocks, as case files may have": (16 << 30, 1000, MIB),
    "nothing at all": (0, 64 * MIB, MIB),
}


@pytest.mark.parametrize(("total", "chunk", "expected"), RINGS.values(), ids=RINGS)
def test_the_bound_of_a_window(total: int, chunk: int, expected: int) -> None:
    assert window_bytes(total, chunk) == expected
    assert HALVES * expected <= total + HALVES * MIB


def test_blocks_are_those_of_the_digests() -> None:
    assert module.BLOCK == BLOCK

"""No fault is too small: every single byte that is missing or doubled is found, and named exactly; and no fact that means nothing changes a plan."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from refit_api.errors import IncompletePlan, OverlappingPlan
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec, whole
from refit_runtime.plan.boxes import covered
from refit_runtime.plan.key import decode_needs, decode_shards, encode_needs, encode_shards
from refit_runtime.plan.plan import plan

from tests.examples import examples
from tests.plan.layouts import Layouts, elements, layouts, without

few = examples(25)


def _boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    return st.tuples(*(st.sets(st.integers(0, extent), min_size=2, max_size=2).map(lambda ends: (min(ends), max(ends))) for extent in shape))


@few
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=3).map(tuple), times=st.integers(0, 2))
def test_coverage_counts_as_nested_loops_do(data: st.DataObject, shape: tuple[int, ...], times: int) -> None:
    boxes = data.draw(st.lists(_boxes(shape), max_size=5))
    counts = Counter(index for box in boxes for index in elements(box))
    found = covered(shape, boxes, lambda cells: cells == times)
    seen = [index for box in found for index in elements(box)]
    assert len(seen) == len(set(seen))
    assert set(seen) == {index for index in elements(whole(shape)) if counts[index] == times}


# two replicas cut one tensor in two ways; the engine takes it in two pieces, one of them turned
FUSED = Parameter("fused", Dtype.UINT8, (5, 6))
SPEC = TensorSpec("w", Dtype.UINT8, (6, 5))
TRAINER = [
    RankShards(0, 0, (Shard(SPEC, ((0, 4), (0, 5))),)),
    RankShards(1, 0, (Shard(SPEC, ((4, 6), (0, 5))),)),
    RankShards(2, 1, (Shard(SPEC, ((0, 6), (0, 2))), Shard(SPEC, ((0, 6), (2, 5))))),
]
NEEDS = tuple(Need("w", ((lo, hi), (0, 5)), FUSED, ((0, 5), (lo, hi)), (1, 0), SPEC.shape) for lo, hi in ((0, 1), (1, 6)))


def _planned(trainer: list[RankShards], needs: tuple[Need, ...]) -> None:
    plan(trainer, {"": [CoordinateNeeds("tp0", needs)]})


@pytest.mark.parametrize("index", elements(whole(SPEC.shape)))
def test_a_hole_in_any_one_byte_of_the_shards_is_found(index: tuple[int, int]) -> None:
    """Every byte of the tensor, taken from whoever holds it."""
    _planned(TRAINER, NEEDS)
    holey = [
        replace(
            rank,
            shards=tuple(Shard(SPEC, box) for shard in rank.shards for box in (without(shard.box, index) if index in elements(shard.box) else [shard.box])),
        )
        for rank in TRAINER
    ]
    with pytest.raises(IncompletePlan) as refusal:
        _planned(holey, NEEDS)
    assert json.loads(refusal.value.facts["missing"]) == [{"tensor": "w", "box": [[i, i + 1] for i in index]}]


@pytest.mark.parametrize("index", elements(whole(FUSED.shape)))
def test_a_hole_in_any_one_byte_of_a_parameter_is_found(index: tuple[int, int]) -> None:
    holey = tuple(
        replace(need, at=at, box=tuple(reversed(at))) for need in NEEDS for at in (without(need.at, index) if index in elements(need.at) else [need.at])
    )
    with pytest.raises(IncompletePlan) as refusal:
        _planned(TRAINER, holey)
    assert json.loads(refusal.value.facts["missing"]) == [{"coordinate": "tp0", "param": "fused", "box": [[i, i + 1] for i in index]}]


@pytest.mark.parametrize("index", elements(whole(FUSED.shape)))
def test_any_one_byte_that_would_be_written_twice_is_found(index: tuple[int, int]) -> None:
    more = replace(NEEDS[0], box=((0, 1), (0, 1)), at=tuple((i, i + 1) for i in index))
    with pytest.raises(OverlappingPlan) as refusal:
        _planned(TRAINER, (*NEEDS, more))
    assert json.loads(refusal.value.facts["doubled"]) == [{"coordinate": "tp0", "param": "fused", "box": [[i, i + 1] for i in index]}]


@few
@given(facts=layouts(), data=st.data())
def test_any_one_byte_that_ranks_of_a_replica_share_unequally_is_found(facts: Layouts, data: st.DataObject) -> None:
    trainer, classes = facts
    rank = data.draw(st.sampled_from([rank for rank in trainer if rank.shards]))
    shard = data.draw(st.sampled_from(rank.shards))
    index = data.draw(st.sampled_from(elements(shard.box)))
    one = Shard(shard.tensor, tuple((i, i + 1) for i in index))
    assume(one.box != shard.box)
    other = RankShards(max(each.rank for each in trainer) + 1, rank.replica, (one,))
    with pytest.raises(OverlappingPlan) as refusal:
        plan([*trainer, other], classes)
    assert json.loads(refusal.value.facts["doubled"]) == [{"tensor": shard.tensor.name, "box": [list(side) for side in one.box]}]


@few
@given(facts=layouts(), redundancy=st.integers(1, 3), seed=st.integers(0, 1000))
def test_numbers_of_replicas_decide_nothing(facts: Layouts, redundancy: int, seed: int) -> None:
    """They say who is of one replica: any other numbers say the same."""
    trainer, classes = facts
    others = Random(seed).sample(range(100), 3)
    again = [replace(rank, replica=others[rank.replica]) for rank in trainer]
    assert plan(trainer, classes, redundancy).runs == plan(again, classes, redundancy).runs


@few
@given(facts=layouts(), redundancy=st.integers(1, 3))
def test_names_decide_nothing_but_the_layer_order(facts: Layouts, redundancy: int) -> None:
    trainer, classes = facts
    one = plan(trainer, classes, redundancy)
    renamed = [replace(r, shards=tuple(replace(s, tensor=replace(s.tensor, name=f"x.{s.tensor.name}")) for s in r.shards)) for r in trainer]
    other = plan(
        renamed,
        {c: [replace(each, needs=tuple(replace(n, tensor=f"x.{n.tensor}") for n in each.needs)) for each in needs] for c, needs in classes.items()},
        redundancy,
    )
    assert one.runs == other.runs
    for place in one.coordinates:
        assert [replace(copy, tensor="") for copy in one.coordinate(*place).copies] == [replace(copy, tensor="") for copy in other.coordinate(*place).copies]
    for rank in one.ranks:
        assert one.source(rank) == other.source(rank)


@few
@given(facts=layouts())
def test_layout_bytes_are_their_own_canonical_form(facts: Layouts) -> None:
    """Decoding and encoding again changes nothing, so a hash names a layout for good."""
    trainer, classes = facts
    for rank in trainer:
        blob = encode_shards(rank)
        assert encode_shards(decode_shards(blob, rank.rank)) == blob
    for needs in (each for coordinates in classes.values() for each in coordinates):
        blob = encode_needs(needs)
        assert encode_needs(decode_needs(blob, needs.id)) == blob

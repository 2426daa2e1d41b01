"""What holds for every plan, element by element, and that nothing else but the facts decides it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import prod
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from refit_api.errors import IncompletePlan, OverlappingPlan, UnsupportedLayout
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec, box_shape, whole
from refit_runtime.plan.boxes import contains, refine
from refit_runtime.plan.plan import Plan, Subset, chunks, plan
from refit_runtime.plan.runs import ALIGNMENT

from tests.examples import examples
from tests.plan.layouts import Layouts, elements, layouts, without

few = settings(examples(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

Element = tuple[str, tuple[int, ...]]


def _boxes(extents: tuple[int, ...]) -> st.SearchStrategy[Box]:
    return st.tuples(*(st.sets(st.integers(0, extent), min_size=2, max_size=2).map(lambda ends: (min(ends), max(ends))) for extent in extents))


@few
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=3).map(tuple))
def test_cut_is_the_common_refinement(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(_boxes(shape), max_size=5))
    pieces = refine(shape, boxes)
    covered = [index for _, piece in pieces for index in elements(piece)]
    assert len(set(covered)) == len(covered), "pieces are disjoint"
    assert set(covered) == {index for box in boxes for index in elements(box)}, "pieces cover the boxes"
    assert [piece for _, piece in pieces] == sorted(piece for _, piece in pieces), "pieces are in row-major order"
    for members, piece in pieces:
        assert members == tuple(i for i, box in enumerate(boxes) if contains(box, piece))
        assert all(contains(box, piece) or not set(elements(box)) & set(elements(piece)) for box in boxes)


def _row_major(box: Box) -> list[tuple[int, ...]]:
    return elements(box)


def _in_runs_of_owner(found: Plan, facts: RankShards) -> dict[int, list[Element]]:
    """What each run of a rank contains, by its snapshot copies."""
    source, contents = found.source(facts.rank), {run: [] for run in found.rank_runs(facts.rank)}
    ends = dict(source.offsets)
    for copy in source.copies:
        shard = facts.shards[copy.shard]
        assert copy.offset == ends[copy.run], "no gaps, no overlaps"
        assert copy.offset % copy.dtype.bytes == 0
        ends[copy.run] += copy.nbytes
        box = tuple((lo + a, lo + b) for (lo, _), (a, b) in zip(shard.box, copy.box, strict=True))
        assert contains(shard.box, box)
        contents[copy.run] += [(shard.tensor.name, index) for index in _row_major(box)]
    _check_arena(found, source.offsets, source.arena_bytes, ends)
    return contents


def _check_arena(found: Plan, offsets: dict[int, int], size: int, ends: dict[int, int]) -> None:
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())
    assert {run: ends[run] - offsets[run] for run in offsets} == {run: found.runs[run].bytes for run in offsets}
    in_plan_order = sorted(offsets)
    assert all(ends[a] <= offsets[b] for a, b in pairwise(in_plan_order))
    assert size >= max(ends.values(), default=0)


def _written(
    found: Plan, class_: str, needs: CoordinateNeeds, contents: dict[int, list[Element]], item: dict[str, int]
) -> dict[tuple[str, tuple[int, ...]], Element]:
    """What each element of each parameter gets, by the install copies and what the runs contain."""
    planned = found.coordinate(class_, needs.id)
    written: dict[tuple[str, tuple[int, ...]], Element] = {}
    for copy in planned.copies:
        need = needs.needs[copy.need]
        assert (copy.tensor, copy.parameter, copy.perm) == (need.tensor, need.parameter.name, need.perm)
        assert contains(need.at, copy.at)
        piece = _slice(contents[copy.run], copy.tensor, copy.offset - planned.offsets[copy.run], copy.nbytes, item)
        perm = copy.perm if copy.perm is not None else tuple(range(len(copy.shape)))
        for element, local in zip(piece, elements(whole(copy.shape)), strict=True):
            extra = len(copy.at) - len(copy.shape)
            to = tuple(lo + step for (lo, _), step in zip(copy.at, (*(0,) * extra, *(local[dim] for dim in perm)), strict=True))
            assert (need.parameter.name, to) not in written, "written once"
            written[need.parameter.name, to] = element
    return written


def _slice(run: list[Element], tensor: str, offset: int, nbytes: int, item: dict[str, int]) -> list[Element]:
    ends, found = 0, []
    for element in run:
        if offset <= ends < offset + nbytes:
            found.append(element)
        ends += item[element[0]]
    assert all(name == tensor for name, _ in found)
    return found


@few
@given(facts=layouts(), redundancy=st.integers(1, 3))
def test_every_needed_byte_arrives_once_where_it_belongs(facts: Layouts, redundancy: int) -> None:
    trainer, classes = facts
    found = plan(trainer, classes, redundancy)
    item = {shard.tensor.name: shard.tensor.dtype.bytes for rank in trainer for shard in rank.shards}
    contents: dict[int, list[Element]] = {}
    for rank in trainer:
        for run, held in _in_runs_of_owner(found, rank).items():
            assert contents.setdefault(run, held) == held, "every owner has the same bytes in the same order"
    for run in found.runs:
        assert len(set(run.owners)) == len(run.owners) <= redundancy
        assert run.bytes > 0
    for class_, coordinates in classes.items():
        for needs in coordinates:
            wanted = {(need.tensor, index) for need in needs.needs for index in elements(need.box)}
            crossing = [element for run in found.coordinate_runs(class_, needs.id) for element in contents[run]]
            assert sorted(crossing) == sorted(wanted), "each needed byte crosses the wire once, and no other"
            expected = {}
            for need in needs.needs:
                for index in elements(need.box):
                    local = tuple(i - lo for i, (lo, _) in zip(index, need.box, strict=True))
                    perm = need.perm if need.perm is not None else tuple(range(len(local)))
                    steps = (*(0,) * (len(need.at) - len(local)), *(local[dim] for dim in perm))
                    expected[need.parameter.name, tuple(lo + step for (lo, _), step in zip(need.at, steps, strict=True))] = (need.tensor, index)
            assert _written(found, class_, needs, contents, item) == expected
            assert len(found.coordinate_runs(class_, needs.id)) <= len({run.owners for run in found.runs}) * len({run.needers for run in found.runs})


@few
@given(facts=layouts(), data=st.data())
def test_a_hole_in_any_one_element_of_a_shard_is_found(facts: Layouts, data: st.DataObject) -> None:
    trainer, classes = facts
    needed = sorted({(need.tensor, index) for needs in classes.values() for each in needs for need in each.needs for index in elements(need.box)})
    assume(needed)
    tensor, index = data.draw(st.sampled_from(needed))
    holey = []
    for rank in trainer:
        shards: list[Shard] = []
        for shard in rank.shards:
            hit = shard.tensor.name == tensor and index in elements(shard.box)
            shards += [Shard(shard.tensor, box) for box in without(shard.box, index)] if hit else [shard]
        holey.append(replace(rank, shards=tuple(shards)))
    assume(any(shard.tensor.name == tensor for rank in holey for shard in rank.shards))
    with pytest.raises((IncompletePlan, OverlappingPlan)) as refusal:
        plan(holey, classes)
    assume(refusal.type is IncompletePlan)  # else two ranks of a replica held one box, and now hold parts of it that are not equal
    assert json.loads(refusal.value.facts["missing"]) == [{"tensor": tensor, "box": [[i, i + 1] for i in index]}]


@few
@given(facts=layouts(), data=st.data())
def test_a_hole_in_any_one_element_of_a_parameter_is_found(facts: Layouts, data: st.DataObject) -> None:
    trainer, classes = facts
    class_, each = next(iter(classes.items()))
    assume(each[0].needs)
    which = data.draw(st.sampled_from(range(len(each[0].needs))))
    need = each[0].needs[which]
    index = data.draw(st.sampled_from(elements(need.at)))
    assume(len([n for n in each[0].needs if n.parameter == need.parameter]) > 1 or len(elements(need.at)) > 1)
    extra = len(need.at) - len(need.box)
    perm = need.perm if need.perm is not None else tuple(range(len(need.box)))
    parts = []
    for at in without(need.at, index):
        box = list(need.box)
        for place, dim in enumerate(perm):
            shift = need.box[dim][0] - need.at[extra + place][0]
            box[dim] = (at[extra + place][0] + shift, at[extra + place][1] + shift)
        parts.append(replace(need, box=tuple(box), at=at))
    needs = (*each[0].needs[:which], *parts, *each[0].needs[which + 1 :])
    with pytest.raises(IncompletePlan) as refusal:
        plan(trainer, {class_: [replace(each[0], needs=needs)]})
    (hole,) = json.loads(refusal.value.facts["missing"])
    assert hole == {"coordinate": f"{class_}/{each[0].id}", "param": need.parameter.name, "box": [[i, i + 1] for i in index]}


@few
@given(facts=layouts(), seed=st.integers(0, 1000), redundancy=st.integers(1, 2))
def test_the_order_of_the_facts_decides_nothing(facts: Layouts, seed: int, redundancy: int) -> None:
    trainer, classes = facts
    rng = Random(seed)

    def shuffled(values: tuple[Shard, ...] | tuple[Need, ...]) -> tuple[object, ...]:
        return tuple(rng.sample(values, len(values)))

    other_trainer = [replace(rank, shards=shuffled(rank.shards)) for rank in rng.sample(trainer, len(trainer))]
    other_classes = {
        c: [replace(needs, needs=shuffled(needs.needs)) for needs in rng.sample(classes[c], len(classes[c]))] for c in rng.sample(list(classes), len(classes))
    }
    one, other = plan(trainer, classes, redundancy), plan(other_trainer, other_classes, redundancy)
    assert one.runs == other.runs
    assert one.slots == other.slots
    shards, other_shards = ({rank.rank: rank.shards for rank in facts} for facts in (trainer, other_trainer))
    for rank in shards:
        mine, theirs = one.source(rank), other.source(rank)
        assert mine.offsets == theirs.offsets
        assert [(copy.offset, shards[rank][copy.shard], copy.box) for copy in mine.copies] == [
            (copy.offset, other_shards[rank][copy.shard], copy.box) for copy in theirs.copies
        ]
    for class_, id_ in one.coordinates:
        assert [replace(copy, need=0) for copy in one.coordinate(class_, id_).copies] == [
            replace(copy, need=0) for copy in other.coordinate(class_, id_).copies
        ]


@few
@given(facts=layouts())
def test_the_same_facts_give_the_same_plan(facts: Layouts) -> None:
    trainer, classes = facts
    one, other = plan(trainer, classes), plan(trainer, classes)
    assert one.runs == other.runs
    assert [one.source(rank) for rank in one.ranks] == [other.source(rank) for rank in other.ranks]


@few
@given(facts=layouts(), data=st.data())
def test_contents_names_what_bytes_of_a_run_are(facts: Layouts, data: st.DataObject) -> None:
    trainer, classes = facts
    found = plan(trainer, classes)
    assume(found.runs)
    run = data.draw(st.sampled_from(found.runs))
    start = data.draw(st.integers(0, run.bytes - 1))
    size = data.draw(st.integers(1, run.bytes - start))
    facts_of = next(rank for rank in trainer if rank.rank == run.owners[0])
    expected, source = [], found.source(run.owners[0])
    for copy in source.copies:
        at = copy.offset - source.offsets.get(run.index, 0)
        if copy.run == run.index and at < start + size and start < at + copy.nbytes:
            shard = facts_of.shards[copy.shard]
            expected.append((shard.tensor.name, tuple((lo + a, lo + b) for (lo, _), (a, b) in zip(shard.box, copy.box, strict=True))))
    assert list(found.contents(run.index, start, size)) == expected


@few
@given(facts=layouts())
def test_strips_in_place_are_those_of_memory(facts: Layouts) -> None:
    trainer, classes = facts
    found = plan(trainer, classes)
    for entry in trainer:
        lengths = []
        for copy in found.source(entry.rank).copies:
            frame = box_shape(entry.shards[copy.shard].box)
            at = np.arange(prod(frame)).reshape(frame)[tuple(slice(lo, hi) for lo, hi in copy.box)].ravel()
            lengths += [len(strip) * copy.dtype.bytes for strip in np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)]
        assert found.strips(entry.rank) == (len(lengths), min(lengths, default=0))


def test_chunks_cover_a_run() -> None:
    run = plan(*_simple(1000)).runs[0]
    assert [(chunk.offset, chunk.bytes) for chunk in chunks(run, 400)] == [(0, 400), (400, 400), (800, 200)]
    assert [(chunk.offset, chunk.bytes) for chunk in chunks(run, 1 << 20)] == [(0, 1000)]


def _simple(rows: int, ranks: int = 1, names: tuple[str, ...] = ("w",)) -> tuple[list[RankShards], dict[str, list[CoordinateNeeds]]]:
    tensors = [TensorSpec(name, Dtype.UINT8, (rows,)) for name in names]
    needs = tuple(Need(t.name, whole(t.shape), Parameter(t.name, t.dtype, t.shape), whole(t.shape)) for t in tensors)
    return [RankShards(r, r, tuple(Shard(t, whole(t.shape)) for t in tensors)) for r in range(ranks)], {"class": [CoordinateNeeds("tp0", needs)]}


def test_runs_are_in_layer_order() -> None:
    names = ("lm_head.weight", "model.embed.weight", "model.layers.10.w", "model.layers.2.w", "model.layers.2.w.scale_inv", "model.norm.weight")
    found = plan(*_simple(8, names=names))
    order = [tensor for tensor, _ in found.contents(0, 0, found.runs[0].bytes)]
    assert order == ["lm_head.weight", "model.embed.weight", "model.layers.2.w", "model.layers.2.w.scale_inv", "model.layers.10.w", "model.norm.weight"]


def test_large_items_come_first_so_that_each_lies_at_a_multiple_of_its_size() -> None:
    tensors = [TensorSpec("a.scale", Dtype.FLOAT32, (3,)), TensorSpec("a.weight", Dtype.UINT8, (5,)), TensorSpec("b.bias", Dtype.BFLOAT16, (3,))]
    needs = tuple(Need(t.name, whole(t.shape), Parameter(t.name, t.dtype, t.shape), whole(t.shape)) for t in tensors)
    found = plan([RankShards(0, 0, tuple(Shard(t, whole(t.shape)) for t in reversed(tensors)))], {"class": [CoordinateNeeds("tp0", needs)]})
    assert [(copy.tensor, copy.offset) for copy in found.coordinate("class", "tp0").copies] == [("a.scale", 0), ("b.bias", 12), ("a.weight", 18)]


def test_a_subset_moves_what_it_selects_and_is_proven_as_a_whole() -> None:
    names = ("model.embed.weight", "model.layers.1.w", "model.layers.11.w")
    trainer, classes = _simple(8, names=names)
    for subset, moved in (
        (Subset(), 24),
        (Subset(layers=frozenset({1})), 8),
        (Subset(layers=frozenset({99})), 0),
        (Subset(params=frozenset({"model.embed.weight"}), layer_groups=frozenset({"11"})), 16),
    ):
        assert sum(run.bytes for run in plan(trainer, classes, subset=subset).runs) == moved
    with pytest.raises(IncompletePlan):
        plan([replace(trainer[0], shards=tuple(replace(shard, box=((0, 7),)) for shard in trainer[0].shards))], classes, subset=Subset(layers=frozenset({99})))


@pytest.mark.parametrize(("change", "word"), [("rank", "trainer rank 0"), ("coordinate", "coordinate tp0"), ("redundancy", "redundancy 0")])
def test_facts_that_contradict_themselves_are_refused(change: str, word: str) -> None:
    trainer, classes = _simple(4)
    with pytest.raises(UnsupportedLayout, match=word):
        plan(trainer * (1 + (change == "rank")), {"class": classes["class"] * (1 + (change == "coordinate"))}, 0 if change == "redundancy" else 1)


def test_no_class_no_runs() -> None:
    found = plan(_simple(4)[0], {})
    assert (found.runs, found.slots, found.source(0).arena_bytes) == ((), (), 0)

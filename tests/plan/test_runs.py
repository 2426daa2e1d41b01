"""Runs as readers meet them: few, of equal shares, laid out once for all replicas of a class, and with nothing in them that a coordinate does not need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec, box_elements, box_shape, whole
from refit_runtime.plan import roles
from refit_runtime.plan.key import PlanDocument, encode_needs, encode_shards, layout_hash, plan_document, plan_key
from refit_runtime.plan.plan import Plan, Subset, plan
from refit_runtime.subset import between, within

from tests.examples import examples
from tests.plan.layouts import Layouts, layouts

BF16 = Dtype.BFLOAT16
HIDDEN, FFN, MOE, EXPERTS, LAYERS = 64, 128, 32, 16, 4
few = examples(25)

Part = tuple[str, Shape, Box]


def dense(tp: int, rank: int) -> list[Part]:
    """One rank's part of the dense tensors, engine and trainer alike."""
    pieces = [*roles.vocabulary("model.embed.weight", 256, 256, HIDDEN, rank, tp), roles.replicated("model.norm.weight", (HIDDEN,))]
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        pieces += [roles.row(f"{at}.o.weight", (HIDDEN, HIDDEN), rank, tp), roles.replicated(f"{at}.norm.weight", (HIDDEN,))]
        pieces += roles.qkv([f"{at}.{name}.weight" for name in "qkv"], 8, 2, 8, HIDDEN, rank, tp)
        pieces += [*roles.gated((f"{at}.gate.weight", f"{at}.up.weight"), (FFN, HIDDEN), rank, tp), roles.row(f"{at}.down.weight", (HIDDEN, FFN), rank, tp)]
    return [(piece.tensor, piece.shape, piece.box) for piece in pieces]


def routed(experts: Iterable[int]) -> list[Part]:
    shapes = {"gate": (MOE, HIDDEN), "up": (MOE, HIDDEN), "down": (HIDDEN, MOE)}
    return [(f"model.layers.{i}.experts.{e}.{name}.weight", shape, whole(shape)) for i in range(LAYERS) for e in experts for name, shape in shapes.items()]


def holding(rank: int, replica: int, parts: list[Part]) -> RankShards:
    return RankShards(rank, replica, tuple(Shard(TensorSpec(name, BF16, shape), box) for name, shape, box in parts))


def needing(id_: str, parts: list[Part]) -> CoordinateNeeds:
    return CoordinateNeeds(id_, tuple(_need(i, *part) for i, part in enumerate(parts)))


def _need(index: int, name: str, shape: Shape, box: Box) -> Need:
    """Each part is a parameter of its own: QKV bands of one tensor may be several."""
    parameter = Parameter(f"{index}.{name}", BF16, box_shape(box))
    return Need(name, box, parameter, whole(box_shape(box)), shape=shape)


def trainer(tp: int, dp: int = 1, ep: int = 0) -> list[RankShards]:
    """Ranks tp fastest; with `ep`, expert-parallel groups over all ranks of a replica."""
    ranks = []
    for replica in range(dp):
        for rank in range(max(tp, ep)):
            experts = routed(range(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep)) if ep else []
            ranks.append(holding(replica * max(tp, ep) + rank, replica, dense(tp, rank % tp) + experts))
    return ranks


def engines(tp: int) -> list[CoordinateNeeds]:
    return [needing(f"tp{rank}", dense(tp, rank)) for rank in range(tp)]


def loads(found: Plan) -> Counter[int]:
    served = Counter(dict.fromkeys(found.ranks, 0))
    for run in found.runs:
        served[run.owners[0]] += run.bytes
    return served


@few
@given(facts=layouts(), redundancy=st.integers(1, 3))
def test_a_coordinate_reads_at_most_one_run_of_each_owner_tuple_and_needer_set(facts: Layouts, redundancy: int) -> None:
    found = plan(*facts, redundancy)
    assert len({(run.owners, run.needers) for run in found.runs}) == len(found.runs)
    for place in found.coordinates:
        mine = [found.runs[run] for run in found.coordinate_runs(*place)]
        assert len(mine) <= len({run.owners for run in mine}) * len({run.needers for run in mine})
        assert all(place in run.needers for run in mine)


FEW = {  # trainer, engines: most runs of a coordinate
    "TP2 to TP1": (trainer(2), {"a": engines(1)}, 2),
    "TP2 to TP2": (trainer(2), {"a": engines(2)}, 3),  # QKV bands and what is replicated: for one, and for both
    "TP2 to TP4": (trainer(2), {"a": engines(4)}, 6),
    "TP4 to TP2": (trainer(4), {"a": engines(2)}, 6),
    "TP2 DP4 to TP1": (trainer(2, 4), {"a": engines(1)}, 9),  # one of each rank, and what all hold from one of them
    "TP2 EP4 to TP2": (trainer(2, 1, 4), {"a": [needing(f"tp{r}", dense(2, r) + routed(range(EXPERTS))) for r in range(2)]}, 12),
}


@pytest.mark.parametrize(("ranks", "classes", "most"), FEW.values(), ids=FEW)
def test_real_layouts_take_few_runs(ranks: list[RankShards], classes: dict[str, list[CoordinateNeeds]], most: int) -> None:
    """A handful, of hundreds of tensors, however they are cut."""
    found = plan(ranks, classes)
    assert max(len(found.coordinate_runs(*place)) for place in found.coordinates) <= most
    assert sum(run.atoms for run in found.runs) > 5 * most


@few
@given(dp=st.integers(1, 6), tp=st.sampled_from([1, 2, 4]), ep=st.sampled_from([0, 4, 8]), redundancy=st.integers(1, 3))
def test_replicas_serve_equal_shares_and_arenas_stay_small(dp: int, tp: int, ep: int, redundancy: int) -> None:
    ranks = trainer(tp, dp, ep)
    found = plan(ranks, {"a": [needing("tp0", dense(1, 0) + (routed(range(EXPERTS)) if ep else []))]}, redundancy)
    width = max(tp, ep)
    served = loads(found)
    replicas = [sum(served[replica * width + rank] for rank in range(width)) for replica in range(dp)]
    assert max(replicas) <= 1.05 * min(replicas)
    assert all(len(run.owners) == min(redundancy, _holders(run.owners[0], dp, tp, ep, found, run.index)) for run in found.runs)


def _holders(rank: int, dp: int, tp: int, ep: int, found: Plan, run: int) -> int:
    """How many ranks hold a run: experts lie once in a replica, dense parts on every rank of one place of TP, the rest everywhere."""
    names = {name for name, _ in found.contents(run, 0, found.runs[run].bytes)}
    if any(".experts." in name for name in names):
        return dp
    if all("norm" in name for name in names):
        return dp * max(tp, ep)
    return dp * max(tp, ep) // tp


def test_the_layout_of_an_arena_is_that_of_the_class_not_of_the_replica() -> None:
    """What makes every generator a source for the next: replicas are not even in the document that is planned from."""
    ranks, needs = trainer(2), engines(2)
    blobs = {layout_hash(blob): blob for blob in [*map(encode_shards, ranks), *map(encode_needs, needs)]}
    document = PlanDocument(
        {rank.rank: layout_hash(encode_shards(rank)) for rank in ranks}, {"class": {each.id: layout_hash(encode_needs(each)) for each in needs}}
    )
    for_one, for_another = (plan_document(PlanDocument.decode(document.encode()), blobs.__getitem__) for _ in range(2))
    for id_ in ("tp0", "tp1"):
        assert for_one.coordinate("class", id_) == for_another.coordinate("class", id_)
    shuffled = [replace(each, needs=tuple(reversed(each.needs))) for each in needs]
    assert [layout_hash(encode_needs(each)) for each in shuffled] == [layout_hash(encode_needs(each)) for each in needs], "one class, whoever found the needs"
    assert plan_key(document) == plan_key(PlanDocument.decode(document.encode()))


def test_classes_of_tp2_and_tp4_are_served_from_one_snapshot() -> None:
    """While a template rolls: each trainer byte lies once in the arenas, whoever needs it, and each coordinate gets what it got alone."""
    ranks = trainer(2)
    both = plan(ranks, {"two": engines(2), "four": engines(4)})
    for class_, needs in (("two", engines(2)), ("four", engines(4))):
        alone = plan(ranks, {class_: needs})
        for each in needs:
            assert both.coordinate(class_, each.id).bytes == alone.coordinate(class_, each.id).bytes
    assert sum(run.bytes for run in both.runs) == 2 * sum(box_elements(box) for _, _, box in dense(1, 0)), "each byte lies in one run, whoever needs it"
    assert all({class_ for class_, _ in run.needers} == {"two", "four"} for run in both.runs)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_experts_of_others_never_cross_the_wire(ep: int) -> None:
    local = [range(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep) for rank in range(ep)]
    found = plan(trainer(2, 2, 4), {"a": [needing(f"ep{rank}", dense(1, 0) + routed(experts)) for rank, experts in enumerate(local)]})
    for rank, experts in enumerate(local):
        seen = {name for run in found.coordinate_runs("a", f"ep{rank}") for name, _ in found.contents(run, 0, found.runs[run].bytes) if ".experts." in name}
        assert seen == {name for name, _, _ in routed(experts)}
        assert found.coordinate("a", f"ep{rank}").bytes == 2 * sum(box_elements(box) for _, _, box in dense(1, 0) + routed(experts))


@few
@given(layers=st.frozensets(st.integers(0, LAYERS)), groups=st.frozensets(st.sampled_from([".q.", ".experts.3.", "norm"])), size=st.integers(1000, 60000))
def test_what_a_subset_replaces_in_a_whole_plan_is_what_its_tensors_have_there(layers: frozenset[int], groups: frozenset[str], size: int) -> None:
    """And the rest is what the others have: byte for byte, also when it is asked for chunk by chunk."""
    subset = Subset(params=frozenset({"no such tensor"}), layers=layers, layer_groups=groups)
    needs = [needing(f"tp{rank}", dense(2, rank) + routed(range(rank, EXPERTS, 2))) for rank in range(2)]
    found = plan(trainer(2, 2, 4), {"a": needs})
    selected = found.selected(subset, range(len(found.runs)))
    for run in found.runs:
        inside = [(subset.keeps(name), 2 * box_elements(box)) for name, box in found.contents(run.index, 0, run.bytes)]
        kept = np.repeat([keeps for keeps, _ in inside], [extent for _, extent in inside])
        ranges = selected[run.index]
        assert np.array_equal(mask(ranges, run.bytes), kept)
        assert np.array_equal(mask(between(ranges, run.bytes), run.bytes), ~kept)
        assert all(lo + extent < following for (lo, extent), (following, _) in pairwise(ranges))
        parts = [within(ranges, at, min(size, run.bytes - at)) for at in range(0, run.bytes, size)]
        assert np.array_equal(mask([one for part in parts for one in part], run.bytes), kept)
        assert all(at * size <= lo and lo + extent <= (at + 1) * size for at, part in enumerate(parts) for lo, extent in part)


def mask(ranges: Iterable[tuple[int, int]], size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Each byte once."""
    times = np.zeros(size, np.int64)
    for at, extent in ranges:
        times[at : at + extent] += 1
    assert times.max(initial=0) <= 1
    return times > 0


@few
@given(layers=st.frozensets(st.integers(0, LAYERS)), groups=st.frozensets(st.sampled_from([".q.", ".experts.3.", "norm", "nothing"])))
def test_a_subset_prunes_runs_and_copies_alike(layers: frozenset[int], groups: frozenset[str]) -> None:
    """The kept tensors cross the wire and are installed, the others do neither."""
    subset = Subset(layers=layers, layer_groups=groups)
    needs = [needing(f"tp{rank}", dense(2, rank) + routed(range(rank, EXPERTS, 2))) for rank in range(2)]
    found = plan(trainer(2, 2, 4), {"a": needs}, subset=subset)
    moved = {name for run in found.runs for name, _ in found.contents(run.index, 0, run.bytes)}
    assert moved == {need.tensor for each in needs for need in each.needs if subset.keeps(need.tensor)}
    for each in needs:
        kept = [need for need in each.needs if subset.keeps(need.tensor)]
        mine = found.coordinate("a", each.id)
        assert mine.bytes == 2 * sum(box_elements(need.box) for need in kept)
        assert {copy.need for copy in mine.copies} == {i for i, need in enumerate(each.needs) if subset.keeps(need.tensor)}

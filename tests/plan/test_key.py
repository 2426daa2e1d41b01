"""Layouts and plan documents are equal bytes for equal facts, and everybody plans the same from them."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refit_api.errors import WireMismatch
from refit_api.tensors import CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec
from refit_runtime.plan.key import (
    PlanDocument,
    canonical_order,
    decode_needs,
    decode_shards,
    encode_needs,
    encode_shards,
    layout_hash,
    plan_document,
    plan_key,
)
from refit_runtime.plan.plan import plan

from tests.examples import examples
from tests.plan.layouts import Layouts, layouts

few = settings(examples(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

SHARDS = RankShards(3, 1, (Shard(TensorSpec("b", Dtype.BFLOAT16, (4, 2)), ((2, 4), (0, 2))), Shard(TensorSpec("a", Dtype.FLOAT32, ()), ())))
NEEDS = CoordinateNeeds(
    "tp0",
    (
        Need("b", ((0, 4), (0, 2)), Parameter("w", Dtype.BFLOAT16, (1, 2, 4)), ((0, 1), (0, 2), (0, 4)), (1, 0), (4, 2)),
        Need("a", (), Parameter("s", Dtype.FLOAT32, ()), ()),
    ),
    (Parameter("rotary", Dtype.FLOAT32, (8,)),),
)


def test_blobs_are_fixed() -> None:
    """Pods of different builds compare these hashes: another form is another protocol version."""
    assert encode_shards(SHARDS).decode().splitlines() == [
        '["a","b"]',
        '{"kind":"AAAAAAEAAAA=","kinds":[["float32",[],[]],["bfloat16",[4,2],[[2,4],[0,2]]]],"layout":"shards","name":"AAAAAAEAAAA=","replica":1}',
    ]
    assert encode_needs(NEEDS).decode().splitlines() == [
        '["a","b"]',
        '["s","w"]',
        '{"kind":"AAAAAAEAAAA=","kinds":[[[],[],"float32",[],null,null],[[[0,4],[0,2]],[[0,1],[0,2],[0,4]],"bfloat16",[1,2,4],[1,0],[4,2]]],'
        '"layout":"needs","name":"AAAAAAEAAAA=","param":"AAAAAAEAAAA=","unwritten":[["rotary","float32",[8]]]}',
    ]


def test_blobs_say_neither_rank_nor_coordinate() -> None:
    assert encode_shards(replace(SHARDS, rank=7)) == encode_shards(SHARDS)
    assert encode_needs(replace(NEEDS, id="tp1")) == encode_needs(NEEDS)


def test_blobs_keep_every_fact_in_canonical_order() -> None:
    assert decode_shards(encode_shards(SHARDS), 3) == replace(SHARDS, shards=tuple(SHARDS.shards[i] for i in canonical_order(SHARDS)))
    assert decode_needs(encode_needs(NEEDS), "tp0") == replace(NEEDS, needs=tuple(NEEDS.needs[i] for i in canonical_order(NEEDS)))
    assert canonical_order(SHARDS) == (1, 0)


@few
@given(facts=layouts(), seed=st.integers(0, 1000))
def test_the_order_found_decides_nothing(facts: Layouts, seed: int) -> None:
    trainer, classes = facts
    rng = Random(seed)
    for rank in trainer:
        assert encode_shards(replace(rank, shards=tuple(rng.sample(rank.shards, len(rank.shards))))) == encode_shards(rank)
    for needs in (needs for coordinates in classes.values() for needs in coordinates):
        assert encode_needs(replace(needs, needs=tuple(rng.sample(needs.needs, len(needs.needs))))) == encode_needs(needs)


@few
@given(facts=layouts(), redundancy=st.integers(1, 2))
def test_a_document_plans_what_its_facts_plan(facts: Layouts, redundancy: int) -> None:
    trainer, classes = facts
    blobs = {layout_hash(blob): blob for blob in map(encode_shards, trainer)}
    blobs |= {layout_hash(blob): blob for coordinates in classes.values() for blob in map(encode_needs, coordinates)}
    document = PlanDocument(
        {rank.rank: layout_hash(encode_shards(rank)) for rank in trainer},
        {class_: {needs.id: layout_hash(encode_needs(needs)) for needs in coordinates} for class_, coordinates in classes.items()},
        redundancy,
    )
    assert PlanDocument.decode(document.encode()) == document
    found, direct = plan_document(document, blobs.__getitem__), plan(trainer, classes, redundancy)
    assert found.runs == direct.runs
    for rank in trainer:
        back = canonical_order(rank)
        assert [replace(copy, shard=back[copy.shard]) for copy in found.source(rank.rank).copies] == list(direct.source(rank.rank).copies)
    for class_, needs in ((class_, needs) for class_, coordinates in classes.items() for needs in coordinates):
        back = canonical_order(needs)
        copies = [replace(copy, need=back[copy.need]) for copy in found.coordinate(class_, needs.id).copies]
        assert copies == list(direct.coordinate(class_, needs.id).copies)


def _key(**changes: object) -> str:
    return plan_key(replace(PlanDocument({0: "a", 1: "b"}, {"c": {"tp0": "d"}}), **changes))  # type: ignore[arg-type]


def test_the_key_covers_every_part_of_the_document() -> None:
    keys = [_key(), _key(trainer={0: "a", 1: "c"}), _key(trainer={0: "a"}), _key(classes={"c": {"tp0": "e"}}), _key(classes={}), _key(redundancy=2)]
    assert len(set(keys)) == len(keys)
    assert _key() == _key(trainer={1: "b", 0: "a"})


DAMAGED = {
    "not JSON": b"\xff",
    "a list": b"[]",
    "a field too many": json.dumps({"trainer": {}, "classes": {}, "redundancy": 1, "more": 1}, sort_keys=True, separators=(",", ":")).encode(),
    "spaces": b'{"classes": {}, "redundancy": 1, "trainer": {}}',
    "no redundancy": b'{"classes":{},"trainer":{}}',
    "a rank that is no number": b'{"classes":{},"redundancy":1,"trainer":{"x":"y"}}',
}


@pytest.mark.parametrize("blob", DAMAGED.values(), ids=DAMAGED)
def test_a_document_of_another_form_is_refused(blob: bytes) -> None:
    with pytest.raises(WireMismatch):
        PlanDocument.decode(blob)


@pytest.mark.parametrize("blob", [b"", b"[]\n{}", encode_needs(NEEDS), encode_shards(SHARDS).replace(b"bfloat16", b"bfloat17"), encode_shards(SHARDS)[:-2]])
def test_a_layout_of_another_form_is_refused(blob: bytes) -> None:
    with pytest.raises(WireMismatch):
        decode_shards(blob, 0)


def test_a_layout_under_a_hash_that_is_not_its_own_is_refused() -> None:
    with pytest.raises(WireMismatch, match="have another"):
        plan_document(PlanDocument({0: layout_hash(b"x")}, {}), lambda _: encode_shards(SHARDS))

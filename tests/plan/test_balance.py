"""Ranks that hold the same bytes share the work: no rank of a replica serves more than 5 % above another's, in few runs."""

from __future__ import annotations

from collections import Counter

import pytest
from refit_api.tensors import CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec, whole
from refit_runtime.plan import roles
from refit_runtime.plan.plan import Plan, plan

BF16 = Dtype.BFLOAT16


def _model(layers: int, tp: int, rank: int, hidden: int = 64) -> list[roles.Piece]:
    pieces = [*roles.vocabulary("model.embed.weight", 1000, 1024, hidden, rank, tp), roles.replicated("model.norm.weight", (hidden,))]
    for i in range(layers):
        at = f"model.layers.{i}"
        pieces += roles.qkv([f"{at}.{n}.weight" for n in "qkv"], 8, 2, hidden // 8, hidden, rank, tp)
        pieces += [roles.row(f"{at}.o.weight", (hidden, hidden), rank, tp), roles.replicated(f"{at}.norm.weight", (hidden,))]
        pieces += [*roles.gated((f"{at}.gate.weight", f"{at}.up.weight"), (256, hidden), rank, tp), roles.row(f"{at}.down.weight", (hidden, 256), rank, tp)]
    return pieces


def _planned(layers: int, tp: int, dp: int, coordinates: int, redundancy: int = 1) -> Plan:
    trainer = [
        RankShards(t + tp * d, d, tuple(Shard(TensorSpec(p.tensor, BF16, p.shape), p.box) for p in _model(layers, tp, t))) for d in range(dp) for t in range(tp)
    ]
    specs = {shard.tensor.name: shard.tensor for rank in trainer for shard in rank.shards}
    needs = tuple(Need(s.name, whole(s.shape), Parameter(s.name, BF16, s.shape), whole(s.shape)) for s in specs.values())
    return plan(trainer, {"class": [CoordinateNeeds(f"dp{i}", needs) for i in range(coordinates)]}, redundancy)


def _loads(found: Plan) -> Counter[int]:
    loads = Counter(dict.fromkeys(found.ranks, 0))
    for run in found.runs:
        loads[run.owners[0]] += run.bytes
    return loads


@pytest.mark.parametrize(("layers", "tp", "dp"), [(1, 1, 2), (2, 2, 2), (8, 2, 4), (4, 1, 8), (12, 4, 3)])
def test_replicas_and_their_ranks_serve_equal_shares(layers: int, tp: int, dp: int) -> None:
    found = _planned(layers, tp, dp, 2)
    loads = _loads(found).values()
    assert max(loads) <= 1.05 * min(loads)
    assert len(found.runs) <= len(found.ranks) + 1, "a share is one run, and what all ranks hold is too small to be spread"


@pytest.mark.parametrize("redundancy", [1, 2, 3])
def test_alternates_are_of_other_replicas(redundancy: int) -> None:
    tp, dp = 2, 3
    found = _planned(4, tp, dp, 1, redundancy)
    for run in found.runs:
        assert len({rank // tp for rank in run.owners}) == len(run.owners) == redundancy
    arenas = [found.source_bytes(rank) for rank in found.ranks]
    total = sum(run.bytes for run in found.runs)
    assert max(arenas) <= 1.1 * total * redundancy / (tp * dp)


def test_ranks_that_serve_something_alone_get_less_of_what_all_hold() -> None:
    alone, shared = TensorSpec("alone", BF16, (1000, 8)), TensorSpec("shared", BF16, (3000, 8))
    trainer = [
        RankShards(0, 0, (Shard(alone, whole(alone.shape)), Shard(shared, whole(shared.shape)))),
        RankShards(1, 1, (Shard(shared, whole(shared.shape)),)),
    ]
    needs = tuple(Need(s.name, whole(s.shape), Parameter(s.name, BF16, s.shape), whole(s.shape)) for s in (alone, shared))
    loads = _loads(plan(trainer, {"class": [CoordinateNeeds("tp0", needs)]}))
    assert loads == {0: 32_000, 1: 32_000}

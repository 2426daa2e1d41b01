"""The geometry cases that concern planning, by id: which case files state them, and what a case file cannot say.

Verdicts, bytes and contents hold as stated. Counts of runs and of copies are those of the packed arena, where a run takes what an exact plan takes many for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refit_api.errors import DtypeMismatch, IncompletePlan, PlanError, ShapeMismatch, UnknownTensor
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec, box_shape, whole
from refit_runtime.plan.plan import Plan, plan

from tests.plan.answers import answer

CASES = Path(__file__).parent / "cases"

STATED = {
    "C1": ("c01-", "ok"),
    "C2": ("c02-", "ok"),
    "C5": ("c05-", "ok"),
    "C7": ("c07-", "ok"),
    "C10 without KV heads": ("c10a-", "invalid"),
    "C10 without head dim": ("c10b-", "invalid"),
    "C10 other interleave": ("c10c-", "refused"),
    "C10 63 query heads": ("c10d-", "refused"),
    "C13": ("c13-", "ok"),
    "C14": ("c14", "ok"),
    "C15 head dim only": ("c15c-", "invalid"),
    "C16": ("c16-", "ok"),
    "C18": ("c18-", "ok"),
    "C20": ("c20-", "refused"),
    "C21": ("c21-", "refused"),
    "C22": ("c22-", "ok"),
    "C23": ("c23", "refused"),
    "C26": ("c26-", "ok"),
    "C29": ("c29-", "refused"),
    "C30": ("c30", "invalid"),
    "C31": ("c31-", "refused"),
    "C32": ("c32-", "ok"),
    "C33": ("c33-", "ok"),
    "C34": ("c34-", "ok"),
    "C36": ("c36", "refused"),
    "C38": ("c38-", "ok"),
    "C40": ("c40-", "refused"),
    "C42 in a case file": ("c42-", "refused"),
    "C43": ("c43-", "ok"),
    "C44": ("c44-", "ok"),
    "C45 the wire carries no more than C44": ("c44-", "ok"),
    "C48": ("c48-", "ok"),
    "C49": ("c49-", "ok"),
    "C52": ("c52-", "ok"),
    "C56": ("c56-", "ok"),
    "C58": ("c58-", "refused"),
    "C80": ("c80-", "ok"),
    "C83": ("c83-", "ok"),
    "C84": ("c84", "refused"),
    "C87": ("c87-", "refused"),
    "C90": ("c90-", "ok"),
    "C105": ("c105-", "ok"),
    "C108": ("c108", "ok"),
    "C110": ("c110-", "ok"),
    "C112": ("c112", "ok"),
    "C113": ("c113", "ok"),
    "C115 provable": ("c115[abcd]-", "ok"),
    "C115 not provable": ("c115e-", "refused"),
}


ELSEWHERE = {
    "C10 other rows": "adapters/megatron/test_refusals.py::test_a_fused_projection_of_other_rows_is_refused_with_both",
    "C15 strided memory": "adapters/fsdp/test_plain.py::test_strided_memory_is_published_as_its_values",
    "C47": "adapters/vllm/test_recorder.py::test_a_loader_that_does_anything_else_is_named_and_the_others_are_recorded",
    "C55": "adapters/vllm/test_recorder.py::test_a_loader_that_collects_first_does_not_hide_who_fails",
    "C57 wrong": "runtime/test_faults.py::test_bytes_that_stay_wrong_fail_the_stage_and_name_tensor_block_and_source",
    "C57 absent": "runtime/test_reference_cases.py::test_c57_bytes_without_a_digest_are_never_read",
    "C58 before any read": "runtime/test_faults.py::test_what_no_trainer_holds_is_refused_before_any_byte_moves",
    "C62": "seams/test_transport.py::test_an_agent_after_the_process_group_is_refused",
    "C63, C64, C65": "runtime/test_order.py::test_o5_and_o8_lease_then_manifest_then_all_reads_then_waiting_then_digests",
    "C68, C70": "seams/test_manifests.py::test_a_holder_that_is_gone_is_unavailable_soon",
    "C72": "runtime/test_reference_cases.py::test_c72_only_who_is_read_from_is_dialled",
    "C74": "runtime/test_agent.py::test_leaving_closes_what_is_offered",
    "C75, C78": "wire/test_codec.py::test_an_absent_optional_is_none_and_a_zero_is_a_zero",
    "C76": "runtime/test_collisions.py::test_c76_is_told_apart",
    "C82": "runtime/test_reference_cases.py::test_c82_bytes_that_moved_at_an_impossible_rate_are_not_installed",
    "C92": "runtime/test_reference_cases.py::test_c92_a_manifest_that_does_not_give_the_catalog_s_root_is_left_out",
    "C93": "runtime/test_faults.py::test_a_holder_that_dies_is_replaced_by_the_next_owner",
    "C95": "runtime/test_reference_cases.py::test_c95_a_lease_that_cannot_be_given_back_hides_nothing",
    "C96": "runtime/test_reference_cases.py::test_c96_a_version_that_is_not_ready_is_waited_for_until_the_deadline_without_a_lease",
    "C98 binding": "runtime/test_order.py::test_o2_a_rank_binds_once",
    "C98 releasing": "runtime/test_reference_cases.py::test_c98_a_version_is_released_once",
    "C99": "seams/test_manifests.py::test_a_port_in_use_is_said",
    "C102": "catalog/test_workers.py::test_missed_heartbeats",
    "C104": "adapters/fsdp/test_plain.py::test_c104_what_is_not_what_was_bound_is_refused_by_name",
}
"""Cases of engines, the wire and a version's life: the test that states each. C82's ceiling is replaced by what it stands for: ADR 0016."""


@pytest.mark.parametrize("test", ELSEWHERE.values(), ids=ELSEWHERE)
def test_stated_elsewhere(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (Path(__file__).parents[1] / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(("files", "verdict"), STATED.values(), ids=STATED)
def test_stated_by_case_files(files: str, verdict: str) -> None:
    paths = list(CASES.glob(f"{files}*.yaml"))
    assert paths
    for path in paths:
        assert answer(path.read_bytes())[1]["verdict"] == verdict, path.name


# ---------------------------------------------------------------- what a case file cannot say

BF16, FP32, FP8 = Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT8_E4M3FN


def _held(name: str, dtype: Dtype, shape: Shape, box: Box | None = None, rank: int = 0) -> RankShards:
    return RankShards(rank, 0, (Shard(TensorSpec(name, dtype, shape), box if box is not None else whole(shape)),))


def _need(name: str, box: Box, param: str, dtype: Dtype, param_shape: Shape, at: Box, **more: Any) -> Need:
    return Need(name, box, Parameter(param, dtype, param_shape), at, **more)


def _planned(trainer: list[RankShards], *needs: Need) -> Plan:
    return plan(trainer, {"class": [CoordinateNeeds("tp0", needs)]})


def test_c12_a_fused_tensor_of_one_row_is_not_the_projection_that_the_engine_knows() -> None:
    """64 query heads and 2 KV heads of 128: the trainer's table says one row, the engine expects all."""
    with pytest.raises(ShapeMismatch, match=r"\[8704, 4\] and \[1, 4\]") as caught:
        _planned([_held("qkv", BF16, (1, 4))], _need("qkv", ((0, 1), (0, 4)), "qkv", BF16, (8704, 4), ((0, 1), (0, 4)), shape=(8704, 4)))
    assert caught.value.facts["tensor"] == "qkv"


def test_c31_the_engine_expects_another_shape() -> None:
    with pytest.raises(ShapeMismatch, match=r"\[16, 8\] and \[8, 8\]"):
        _planned([_held("w", BF16, (8, 8))], _need("w", ((0, 8), (0, 8)), "w", BF16, (8, 8), ((0, 8), (0, 8)), shape=(16, 8)))


def test_c34_one_run_at_its_offset_in_the_fused_parameter() -> None:
    needs = (_need("w", whole((2, 4)), "fused", FP32, (8, 4), ((4, 6), (0, 4))), _need("rest", whole((6, 4)), "other", FP32, (6, 4), whole((6, 4))))
    trainer = [RankShards(0, 0, (Shard(TensorSpec("w", FP32, (2, 4)), whole((2, 4))), Shard(TensorSpec("rest", FP32, (6, 4)), whole((6, 4)))))]
    with pytest.raises(IncompletePlan, match="fused"):
        _planned(trainer, *needs)
    found = plan(trainer, {"class": [CoordinateNeeds("tp0", needs, (needs[0].parameter,))]})
    copy = next(copy for copy in found.coordinate("class", "tp0").copies if copy.tensor == "w")
    assert (copy.nbytes, copy.at, (copy.at[0][0] * 4 + copy.at[1][0]) * 4) == (32, ((4, 6), (0, 4)), 64)


def test_c42_a_bf16_tensor_in_a_wider_parameter_travels_as_bf16() -> None:
    found = _planned([_held("w", BF16, (4, 4))], _need("w", whole((4, 4)), "w", FP32, (4, 4), whole((4, 4))))
    (copy,) = found.coordinate("class", "tp0").copies
    assert (found.runs[0].bytes, copy.dtype, copy.nbytes) == (32, BF16, 32)


def test_c42_members_of_a_wider_fused_parameter_have_places_of_their_own() -> None:
    trainer = [RankShards(0, 0, (Shard(TensorSpec("q", BF16, (8, 4)), whole((8, 4))), Shard(TensorSpec("k", BF16, (2, 4)), whole((2, 4)))))]
    needs = (_need("q", whole((8, 4)), "qk", FP32, (10, 4), ((0, 8), (0, 4))), _need("k", whole((2, 4)), "qk", FP32, (10, 4), ((8, 10), (0, 4))))
    copies = {copy.tensor: (copy.offset, copy.nbytes) for copy in _planned(trainer, *needs).coordinate("class", "tp0").copies}
    assert copies == {"k": (0, 16), "q": (16, 64)}


def test_a_wide_tensor_travels_as_what_all_needs_want() -> None:
    """fp32 masters, bf16 engine: the cast happens once, at the snapshot."""
    found = _planned([_held("w", FP32, (4, 4))], _need("w", whole((4, 4)), "w", BF16, (4, 4), whole((4, 4))))
    assert (found.runs[0].bytes, found.source(0).copies[0].dtype) == (32, BF16)


def test_a_tensor_that_classes_want_differently_travels_as_it_is() -> None:
    needs = {dtype.value: [CoordinateNeeds("tp0", (_need("w", whole((4, 4)), "w", dtype, (4, 4), whole((4, 4))),))] for dtype in (BF16, FP32)}
    found = plan([_held("w", FP32, (4, 4))], needs)
    assert [(run.bytes, len(run.needers)) for run in found.runs] == [(64, 2)]


@pytest.mark.parametrize(("held", "needed"), [(BF16, FP8), (FP8, BF16), (Dtype.INT8, BF16), (Dtype.FLOAT8_E5M2, FP8), (Dtype.INT32, Dtype.INT8)])
def test_a_cast_that_needs_a_scale_is_refused(held: Dtype, needed: Dtype) -> None:
    with pytest.raises(DtypeMismatch) as caught:
        _planned([_held("w", held, (4,))], _need("w", ((0, 4),), "w", needed, (4,), ((0, 4),)))
    assert (caught.value.facts["seen"], caught.value.facts["expected"]) == (held.value, needed.value)


def test_c48_replicas_share_the_work_and_nothing_is_read_twice() -> None:
    for replicas in (1, 2, 8):
        trainer = [RankShards(2 * d + r, d, (Shard(TensorSpec("x", BF16, (8, 4)), ((4 * r, 4 * r + 4), (0, 4))),)) for d in range(replicas) for r in range(2)]
        found = _planned(trainer, _need("x", whole((8, 4)), "x", BF16, (8, 4), whole((8, 4))))
        assert sum(run.bytes for run in found.runs) == 64
        assert len(found.runs) <= 2 * replicas


def test_c52_the_choice_of_owners_is_deterministic() -> None:
    def planned(order: int) -> list[tuple[int, ...]]:
        tensors = [TensorSpec(name, BF16, (4, 4)) for name in ("a", "b")][::order]
        trainer = [RankShards(rank, rank, tuple(Shard(tensor, whole((4, 4))) for tensor in tensors)) for rank in (0, 1)][::order]
        needs = [_need(tensor.name, whole((4, 4)), tensor.name, BF16, (4, 4), whole((4, 4))) for tensor in tensors]
        return [run.owners for run in _planned(trainer, *needs).runs]

    assert planned(1) == planned(-1)
    assert len(planned(1)) == 2


def test_c56_the_half_that_nobody_needs_is_not_read() -> None:
    trainer = [_held("x", FP32, (4, 4), ((0, 4), (0, 2)), 0), _held("x", FP32, (4, 4), ((0, 4), (2, 4)), 1)]
    found = _planned(trainer, _need("x", ((0, 4), (0, 2)), "x", FP32, (4, 2), whole((4, 2))))
    assert [(run.owners, run.bytes) for run in found.runs] == [((0,), 32)]
    assert found.source_bytes(1) == 0


def test_c105_full_size_one_run_for_each_generator_rank() -> None:
    trainer = [_held("w13", BF16, (128, 4096, 2048), ((16 * r, 16 * r + 16), (0, 4096), (0, 2048)), r) for r in range(8)]
    shape = (16, 4096, 2048)
    classes = {"ep8": [CoordinateNeeds(f"ep{r}", (_need("w13", trainer[r].shards[0].box, "w13", BF16, shape, whole(shape)),)) for r in range(8)]}
    assert [(run.owners, run.needers, run.bytes) for run in plan(trainer, classes).runs] == [((r,), {("ep8", f"ep{r}")}, 268_435_456) for r in range(8)]


def test_c108_full_size_four_runs() -> None:
    for ranks, parts in ((4, 2), (2, 4)):
        rows, mine = 4096 // ranks, 4096 // parts
        trainer = [_held("w", BF16, (4096, 4096), ((r * rows, r * rows + rows), (0, 4096)), r) for r in range(ranks)]
        boxes = [((p * mine, p * mine + mine), (0, 4096)) for p in range(parts)]
        needs = [CoordinateNeeds(f"tp{p}", (_need("w", box, "w", BF16, box_shape(box), whole(box_shape(box))),)) for p, box in enumerate(boxes)]
        runs = plan(trainer, {"class": needs}).runs
        assert [(run.owners[0], run.bytes) for run in runs] == [(r if ranks == 4 else r // 2, 8_388_608) for r in range(4)]


def test_c45_columns_cost_nothing_on_the_wire() -> None:
    """One read of the 64 bytes that are needed, where an exact plan takes four and a cheap one reads 64 bytes more."""
    found = _planned([_held("row", FP32, (4, 8))], _need("row", ((0, 4), (0, 4)), "row", FP32, (4, 4), whole((4, 4))))
    assert [(run.bytes, run.atoms) for run in found.runs] == [(64, 1)]


def test_c88_a_tensor_that_the_trainer_does_not_have_is_named() -> None:
    needs = (_need("weight", whole((2, 2)), "weight", FP8, (2, 2), whole((2, 2))), _need("unknown.weight", whole((2,)), "more", FP8, (2,), whole((2,))))
    with pytest.raises(UnknownTensor, match=r"unknown\.weight") as caught:
        _planned([_held("weight", FP8, (2, 2))], *needs)
    assert caught.value.facts["tensor"] == "unknown.weight"


@pytest.mark.parametrize("published", [True, False])
def test_c114_a_scale_over_the_whole_tensor_is_published_or_refused(published: bool) -> None:
    """The rank reads half of the rows and the one scale; it is never worked out from half of the data."""
    tensors = [TensorSpec("w", FP8, (4096, 4096)), *([TensorSpec("w.scale", FP32, ())] if published else [])]
    trainer = [RankShards(0, 0, tuple(Shard(tensor, whole(tensor.shape)) for tensor in tensors))]
    needs = (
        _need("w", ((0, 2048), (0, 4096)), "w", FP8, (2048, 4096), whole((2048, 4096))),
        _need("w.scale", (), "w.scale", FP32, (), ()),
    )
    if published:
        assert sum(run.bytes for run in _planned(trainer, *needs).runs) == 2048 * 4096 + 4
    else:
        with pytest.raises(UnknownTensor, match=r"w\.scale"):
            _planned(trainer, *needs)


@pytest.mark.parametrize(("block", "plans"), [(128, True), (3000, False)], ids=["inside the shard", "over its border"])
def test_c114_block_scales_follow_the_rows(block: int, plans: bool) -> None:
    """Scale rows that lie inside the shard are needed like any rows; half a scale row is no box at all."""
    scales = -(-4096 // block)
    trainer = [RankShards(0, 0, (Shard(TensorSpec("w.scale", FP32, (scales, 32)), whole((scales, 32))),))]
    wanted = ((0, 2048 // block), (0, 32))
    if plans:
        found = _planned(trainer, _need("w.scale", wanted, "w.scale", FP32, box_shape(wanted), whole(box_shape(wanted))))
        assert found.runs[0].bytes == 16 * 32 * 4
    else:
        with pytest.raises(IncompletePlan, match=r"w\.scale"):
            _planned(trainer, _need("w.scale", ((0, 1), (0, 32)), "w.scale", FP32, (2, 32), ((0, 1), (0, 32))))


@pytest.mark.parametrize("missing", ["weight", "weight_scale"])
def test_c87_a_weight_is_not_planned_without_its_scale(missing: str) -> None:
    shards = {"weight": Shard(TensorSpec("weight", FP8, (2, 2)), whole((2, 2))), "weight_scale": Shard(TensorSpec("weight_scale", FP32, (2, 1)), whole((2, 1)))}
    needs = [_need(name, whole(shard.tensor.shape), name, shard.tensor.dtype, shard.tensor.shape, whole(shard.tensor.shape)) for name, shard in shards.items()]
    with pytest.raises(PlanError) as caught:
        _planned([RankShards(0, 0, tuple(shard for name, shard in shards.items() if name != missing))], *needs)
    assert caught.value.facts["tensor"] == missing

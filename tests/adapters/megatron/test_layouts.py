"""Every layout that Megatron can give a model: what all ranks offer, put together by its boxes, is the checkpoint, and nothing is left over."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, whole
from refit_runtime.adapters.host_memory import HostMemory
from refit_runtime.adapters.megatron.source import MegatronSource
from refit_runtime.adapters.memory import Fabric, MemoryTransport
from refit_runtime.inplace import InPlace
from refit_runtime.pieces import parts_of
from refit_runtime.plan.plan import SourcePlan, plan
from refit_runtime.snapshot import Snapshot, typed

from tests.adapters.megatron.reference import PADDED_WORDS, Trainer, World, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron.*")  # notes about deprecated defaults and absent CUDA extensions

WORDS = 100
Offered = list[MegatronSource]


@dataclass(frozen=True)
class Case:
    family: str
    world: World
    model: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    dtype: Dtype | None = None


QWEN_MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "qk_layernorm": True}
SHARED = {"moe_shared_expert_intermediate_size": 48}
DEEPSEEK = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "qk_layernorm": True,
    "rope_type": "rope", "moe_layer_freq": [0, 1], "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "q_lora_rank": 12,
}  # fmt: skip
LAYER_NORM = {"normalization": "LayerNorm"}
MASTERS = {"params_dtype": torch.float32, "bf16": False, "pipeline_dtype": torch.float32}
AROUND_ZERO = {"layernorm_zero_centered_gamma": True}

CASES = {
    "one rank": Case("llama", World()),
    "grouped queries": Case("llama", World(2, tp=2)),
    "as many KV heads as query heads": Case("llama", World(4, tp=4), {"num_query_groups": 8}),
    "fewer KV heads than ranks": Case("llama", World(8, tp=8), {"num_query_groups": 2, "ffn_hidden_size": 128}),
    "biases of the fused projection": Case("qwen2", World(4, tp=4), {"num_query_groups": 2, "add_qkv_bias": True}),
    "tied embeddings": Case("qwen2", World(2, tp=2), {"add_qkv_bias": True}, tied=True),
    "query and key norms": Case("qwen3", World(2, tp=2), {"qk_layernorm": True, "kv_channels": 16}),
    "pipeline stages": Case("llama", World(4, tp=2, pp=2), {"num_layers": 4}),
    "virtual stages": Case("llama", World(4, tp=2, pp=2, vp=2), {"num_layers": 8}),
    "virtual stages and tied embeddings on two stages": Case("qwen2", World(4, tp=2, pp=2, vp=2), {"num_layers": 4, "add_qkv_bias": True}, tied=True),
    "uneven stages": Case("llama", World(2, pp=2), {"num_layers": 3, "num_layers_in_first_pipeline_stage": 1}),
    "data-parallel replicas": Case("llama", World(4, tp=2)),
    "context-parallel replicas": Case("llama", World(4, tp=2, cp=2)),
    "context-parallel and data-parallel replicas": Case("llama", World(4, cp=2)),
    "sequence parallel": Case("qwen3", World(2, tp=2, sp=True), {"qk_layernorm": True, **LAYER_NORM}),
    "weights in float32, published in bfloat16": Case(
        "qwen3", World(2, tp=2), {**MASTERS, "qk_layernorm": True, **LAYER_NORM, **AROUND_ZERO}, dtype=Dtype.BFLOAT16
    ),
    "norms around zero": Case("qwen3", World(2, tp=2), {"qk_layernorm": True, **LAYER_NORM, **AROUND_ZERO}),
    "norms around zero in trainer and engine": Case("gemma", World(2, tp=2), {"kv_channels": 16, **LAYER_NORM, **AROUND_ZERO}, tied=True),
    "experts on every rank": Case("qwen3_moe", World(2, tp=2), QWEN_MOE),
    "experts spread over ranks": Case("qwen3_moe", World(4, ep=4), QWEN_MOE),
    "experts spread and cut": Case("mixtral", World(4, tp=2, ep=2, etp=2), {**QWEN_MOE, "qk_layernorm": False}),
    "experts spread and not cut": Case("qwen3_moe", World(4, tp=2, ep=2, etp=1), QWEN_MOE),
    "experts cut where dense tensors are not": Case("qwen3_moe", World(4, ep=2, etp=2), QWEN_MOE),
    "experts in replicas": Case("qwen3_moe", World(8, tp=2, ep=2, etp=2), QWEN_MOE),
    "experts with context-parallel replicas": Case("qwen3_moe", World(4, cp=2, ep=2), QWEN_MOE),
    "experts on virtual stages": Case("qwen3_moe", World(4, pp=2, vp=2, ep=2), {**QWEN_MOE, "num_layers": 4}),
    "experts on two stages": Case("qwen3_moe", World(8, tp=2, pp=2, ep=2, etp=1), QWEN_MOE),
    "a gated shared expert": Case(
        "qwen2_moe", World(2, tp=2, ep=2, etp=1), {**QWEN_MOE, **SHARED, "qk_layernorm": False, "moe_shared_expert_gate": True, "add_qkv_bias": True}
    ),
    "latent attention": Case("deepseek_v3", World(2, tp=2), {**QWEN_MOE, **SHARED, **DEEPSEEK}),
    "predictions of several tokens": Case("glm4_moe", World(2, tp=2), {**QWEN_MOE, **SHARED, "moe_layer_freq": [0, 1], "mtp_num_layers": 2}),
    "predictions of several tokens on the last of two stages": Case("deepseek_v3", World(2, pp=2), {**QWEN_MOE, **SHARED, **DEEPSEEK, "mtp_num_layers": 1}),
    "latent attention without a query bottleneck": Case("deepseek_v2", World(2, tp=2, ep=2, etp=1), {**QWEN_MOE, **SHARED, **DEEPSEEK, "q_lora_rank": None}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_ranks_hold_the_checkpoint(case: Case) -> None:
    trainer = Trainer(case.world, case.model, case.tied)
    config = case.world.config(**case.model)
    offered: Offered = []
    for rank in trainer.ranks(config):
        source = MegatronSource(rank.chunks, rank.mesh, case.family, WORDS, case.dtype)
        shards = source.shards().shards
        once = [index for index, shard in enumerate(shards) if not re.search(r"layers\..*(embed_tokens|shared_head\.head)", shard.tensor.name)]
        elements = sum(source.view(index).numel() for index in once)
        assert elements == tensors_of(rank.chunks) - padding_of(rank.chunks, rank.mesh.tp.rank), "every element once"
        offered.append(source)
    expected = checkpoint(trainer.whole, config, case.family, WORDS)
    if case.dtype is not None:
        expected = {name: tensor.to(getattr(torch, case.dtype.value)) for name, tensor in expected.items()}
    assert_equal(assemble(offered), expected)
    for halves in (1, 2):
        for found in refitted(offered, expected, halves):
            assert_equal(found, expected)


def tensors_of(chunks: Iterable[Any]) -> int:
    kept = [tensor for chunk in chunks for tensor in chunk.parameters()]
    kept += [chunk.state_dict()[name] for chunk in chunks for name, _ in chunk.named_buffers() if name in chunk.state_dict()]
    return sum(tensor.numel() for tensor in kept)


def padding_of(chunks: Iterable[Any], rank: int) -> int:
    """Elements of this rank's rows beyond the checkpoint's words."""
    tables = [p for chunk in chunks for name, p in chunk.named_parameters() if name in ("embedding.word_embeddings.weight", "output_layer.weight")]
    return sum(p.shape[1] * max(0, min(p.shape[0], (rank + 1) * p.shape[0] - WORDS)) for p in tables)


def assemble(offered: Offered) -> dict[str, torch.Tensor]:
    """Whole tensors from boxes; boxes of different ranks are equal, with equal bytes, or disjoint."""
    boxes: dict[str, dict[Box, torch.Tensor]] = {}
    shapes = {}
    for source in offered:
        for index, shard in enumerate(source.shards().shards):
            name, view = shard.tensor.name, source.view(index)
            view = (view + shard.plus if shard.plus else view).to(getattr(torch, shard.tensor.dtype.value))
            assert shapes.setdefault(name, (shard.tensor.shape, shard.tensor.dtype)) == (shard.tensor.shape, shard.tensor.dtype)
            assert torch.equal(boxes.setdefault(name, {}).setdefault(shard.box, view), view), f"{name} {shard.box} differs between ranks"
    return {name: place(shapes[name][0], parts) for name, parts in boxes.items()}


def place(shape: tuple[int, ...], parts: dict[Box, torch.Tensor]) -> torch.Tensor:
    tensor = torch.zeros(shape, dtype=next(iter(parts.values())).dtype)
    count = torch.zeros(shape, dtype=torch.int8)
    for box, view in parts.items():
        tensor[as_slices(box)] = view
        count[as_slices(box)] += 1
    assert bool((count == 1).all()), "a hole or an overlap"
    return tensor


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def refitted(offered: Offered, expected: dict[str, torch.Tensor], ranks: int) -> Iterator[dict[str, torch.Tensor]]:
    """The checkpoint as an engine of so many ranks gets it, each with its part of the rows; once from the first and once from the last owners."""
    coordinates = [CoordinateNeeds(f"tp{rank}", tuple(rows_of(name, tensor, rank, ranks) for name, tensor in expected.items())) for rank in range(ranks)]
    made = plan([source.shards() for source in offered], {"engine": coordinates}, redundancy=2)
    sources = {source.shards().rank: made.source(source.shards().rank) for source in offered}
    arenas = {}
    for source in offered:
        facts = source.shards()
        arena = arenas[facts.rank] = torch.zeros(sources[facts.rank].arena_bytes, dtype=torch.uint8)
        Snapshot(sources[facts.rank], range(len(facts.shards)), source, arena, HostMemory()).take()
        if not any(shard.plus or source.view(index).dtype != getattr(torch, shard.tensor.dtype.value) for index, shard in enumerate(facts.shards)):
            assert_the_same_in_place(sources[facts.rank], source, arena)
    for owner in (0, -1):
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        for coordinate in coordinates:
            mine = made.coordinate("engine", coordinate.id)
            arena = torch.zeros(mine.arena_bytes, dtype=torch.uint8)
            for index, at in mine.offsets.items():
                run = made.runs[index]
                start = sources[run.owners[owner]].offsets[index]
                arena[at : at + run.bytes] = arenas[run.owners[owner]][start : start + run.bytes]
            for copy in mine.copies:
                part = found[copy.parameter][as_slices(coordinate.needs[copy.need].box)]
                part[as_slices(copy.at)] = typed(arena[copy.offset : copy.offset + copy.nbytes], copy.dtype.value, copy.shape)
        yield found


def assert_the_same_in_place(made: SourcePlan, source: MegatronSource, arena: torch.Tensor) -> None:
    """Readers of live memory find in its pieces what a copy has in its arena."""
    live = InPlace(made, range(len(source.shards().shards)), source, HostMemory(), MemoryTransport(Fabric()))
    live.take()
    sizes = Counter[int]()
    for copy in made.copies:
        sizes[copy.run] += copy.nbytes
    for run, offset in made.offsets.items():
        found = b"".join(ctypes.string_at(address, size) for address, size in parts_of(live.pieces[run], 0, sizes[run]))
        assert found == arena[offset : offset + sizes[run]].numpy().tobytes()


def rows_of(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> Need:
    """This rank's part of the rows, as a parameter of its own; everything where they do not divide."""
    rows, rest = tensor.shape[0], whole(tuple(tensor.shape[1:]))
    lo, hi = (rank * rows // ranks, (rank + 1) * rows // ranks) if rows % ranks == 0 else (0, rows)
    parameter = Parameter(name, Dtype(str(tensor.dtype).removeprefix("torch.")), (hi - lo, *tensor.shape[1:]))
    return Need(name, ((lo, hi), *rest), parameter, whole(parameter.shape))


def as_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


def test_the_padded_rows_of_the_last_ranks_are_no_shards() -> None:
    trainer = Trainer(World(8, tp=8), {"num_query_groups": 8, "ffn_hidden_size": 64})
    words = {rank.mesh.rank: MegatronSource(rank.chunks, rank.mesh, "llama", 60).shards() for rank in trainer.ranks()}
    rows = {rank: [shard.box[0] for shard in facts.shards if shard.tensor.name == "lm_head.weight"] for rank, facts in words.items()}
    assert rows == {0: [(0, 16)], 1: [(16, 32)], 2: [(32, 48)], 3: [(48, 60)], 4: [], 5: [], 6: [], 7: []}
    assert PADDED_WORDS == 128


def test_views_follow_memory_that_megatron_moves() -> None:
    """Megatron points `parameter.data` elsewhere when it builds its buffers: a shard is never read at the old address."""
    for rank in Trainer(World(2, tp=2), {}).ranks():
        source = MegatronSource(rank.chunks, rank.mesh, "llama", WORDS)
        index = [shard.tensor.name for shard in source.shards().shards].index("model.layers.1.mlp.up_proj.weight")
        weight = rank.chunks[0].decoder.layers[1].mlp.linear_fc1.weight
        half = weight.shape[0] // 2
        assert source.view(index).data_ptr() == weight.data[half:].data_ptr()
        weight.data = torch.full_like(weight.data, 3.0)
        assert source.view(index).unique().tolist() == [3.0]


def test_parameters_are_published_in_the_given_dtype_and_buffers_in_their_own() -> None:
    model = {**QWEN_MOE, **SHARED, **DEEPSEEK}
    (rank,) = Trainer(World(), model).ranks()
    shards = MegatronSource(rank.chunks, rank.mesh, "deepseek_v3", WORDS, dtype=Dtype.FLOAT16).shards().shards
    assert {shard.tensor.dtype for shard in shards if "correction" not in shard.tensor.name} == {Dtype.FLOAT16}
    assert {shard.tensor.dtype for shard in shards if "correction" in shard.tensor.name} == {Dtype.FLOAT32}

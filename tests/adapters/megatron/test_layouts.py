"""Every layout that Megatron can give a model: what all ranks offer, put together by its boxes, is the checkpoint, and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from refit_api.tensors import Box, Dtype, RankShards
from refit_runtime.adapters.megatron.source import MegatronSource

from tests.adapters.megatron.reference import PADDED_WORDS, Trainer, World, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron.*")  # notes about deprecated defaults and absent CUDA extensions

WORDS = 100


@dataclass(frozen=True)
class Case:
    family: str
    world: World
    model: dict[str, Any] = field(default_factory=dict)
    tied: bool = False


QWEN_MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "qk_layernorm": True}
SHARED = {"moe_shared_expert_intermediate_size": 48}
DEEPSEEK = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "qk_layernorm": True,
    "rope_type": "rope", "moe_layer_freq": [0, 1], "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "q_lora_rank": 12,
}  # fmt: skip

CASES = {
    "one rank": Case("llama", World()),
    "grouped queries": Case("llama", World(2, tp=2)),
    "as many KV heads as query heads": Case("llama", World(4, tp=4), {"num_query_groups": 8}),
    "fewer KV heads than ranks": Case("llama", World(8, tp=8), {"num_query_groups": 2, "ffn_hidden_size": 128}),
    "biases of the fused projection": Case("qwen2", World(4, tp=4), {"num_query_groups": 2, "add_qkv_bias": True}),
    "tied embeddings": Case("qwen2", World(2, tp=2), {"add_qkv_bias": True}, tied=True),
    "query and key norms": Case("qwen3", World(2, tp=2), {"qk_layernorm": True, "kv_channels": 16}),
    "pipeline stages": Case("llama", World(4, tp=2, pp=2), {"num_layers": 4}),
    "virtual stages and tied embeddings on two stages": Case("qwen2", World(4, tp=2, pp=2, vp=2), {"num_layers": 4, "add_qkv_bias": True}, tied=True),
    "uneven stages": Case("llama", World(2, pp=2), {"num_layers": 3, "num_layers_in_first_pipeline_stage": 1}),
    "data-parallel replicas": Case("llama", World(4, tp=2)),
    "experts on every rank": Case("qwen3_moe", World(2, tp=2), QWEN_MOE),
    "experts spread over ranks": Case("qwen3_moe", World(4, ep=4), QWEN_MOE),
    "experts spread and cut": Case("mixtral", World(4, tp=2, ep=2, etp=2), {**QWEN_MOE, "qk_layernorm": False}),
    "experts spread and not cut": Case("qwen3_moe", World(4, tp=2, ep=2, etp=1), QWEN_MOE),
    "experts on two stages": Case("qwen3_moe", World(8, tp=2, pp=2, ep=2, etp=1), QWEN_MOE),
    "a gated shared expert": Case(
        "qwen2_moe", World(2, tp=2, ep=2, etp=1), {**QWEN_MOE, **SHARED, "qk_layernorm": False, "moe_shared_expert_gate": True, "add_qkv_bias": True}
    ),
    "latent attention": Case("deepseek_v3", World(2, tp=2), {**QWEN_MOE, **SHARED, **DEEPSEEK}),
    "latent attention without a query bottleneck": Case("deepseek_v2", World(2, tp=2, ep=2, etp=1), {**QWEN_MOE, **SHARED, **DEEPSEEK, "q_lora_rank": None}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_ranks_hold_the_checkpoint(case: Case) -> None:
    trainer = Trainer(case.world, case.model, case.tied)
    config = case.world.config(**case.model)
    offered = []
    for rank in trainer.ranks(config):
        source = MegatronSource(rank.chunks, rank.mesh, case.family, WORDS)
        facts = source.shards()
        views = [source.view(index).clone() for index in range(len(facts.shards))]
        assert sum(view.numel() for view in views) == tensors_of(rank.chunks) - padding_of(rank.chunks, rank.mesh.tp.rank), "every element once"
        offered.append((facts, views))
    expected = checkpoint(trainer.whole, config, case.family, WORDS)
    assert_equal(assemble(offered), expected)


def tensors_of(chunks: Iterable[Any]) -> int:
    kept = [tensor for chunk in chunks for tensor in chunk.parameters()]
    kept += [chunk.state_dict()[name] for chunk in chunks for name, _ in chunk.named_buffers() if name in chunk.state_dict()]
    return sum(tensor.numel() for tensor in kept)


def padding_of(chunks: Iterable[Any], rank: int) -> int:
    """Elements of this rank's rows beyond the checkpoint's words."""
    tables = [p for chunk in chunks for name, p in chunk.named_parameters() if name in ("embedding.word_embeddings.weight", "output_layer.weight")]
    return sum(p.shape[1] * max(0, min(p.shape[0], (rank + 1) * p.shape[0] - WORDS)) for p in tables)


def assemble(offered: Iterable[tuple[RankShards, list[torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Whole tensors from boxes; boxes of different ranks are equal, with equal bytes, or disjoint."""
    boxes: dict[str, dict[Box, torch.Tensor]] = {}
    shapes = {}
    for facts, views in offered:
        for shard, view in zip(facts.shards, views, strict=True):
            name = shard.tensor.name
            assert shapes.setdefault(name, (shard.tensor.shape, shard.tensor.dtype)) == (shard.tensor.shape, shard.tensor.dtype)
            assert torch.equal(boxes.setdefault(name, {}).setdefault(shard.box, view), view), f"{name} {shard.box} differs between ranks"
    return {name: place(shapes[name][0], parts) for name, parts in boxes.items()}


def place(shape: tuple[int, ...], parts: dict[Box, torch.Tensor]) -> torch.Tensor:
    whole = torch.zeros(shape, dtype=next(iter(parts.values())).dtype)
    count = torch.zeros(shape, dtype=torch.int8)
    for box, view in parts.items():
        where = tuple(slice(lo, hi) for lo, hi in box)
        whole[where] = view
        count[where] += 1
    assert bool((count == 1).all()), "a hole or an overlap"
    return whole


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


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


def test_parameters_are_published_in_the_wire_dtype_and_buffers_in_their_own() -> None:
    model = {**QWEN_MOE, **SHARED, **DEEPSEEK}
    (rank,) = Trainer(World(), model).ranks()
    shards = MegatronSource(rank.chunks, rank.mesh, "deepseek_v3", WORDS, wire=Dtype.FLOAT16).shards().shards
    assert {shard.tensor.dtype for shard in shards if "correction" not in shard.tensor.name} == {Dtype.FLOAT16}
    assert {shard.tensor.dtype for shard in shards if "correction" in shard.tensor.name} == {Dtype.FLOAT32}

"""Whatever Megatron can build and we cannot name is refused at bind, with the module and the tensor: nothing is guessed, nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import ShapeMismatch, UnsupportedLayout
from refit_runtime.adapters.megatron.mesh import Axis, Mesh
from refit_runtime.adapters.megatron.names import FAMILIES, Family, Slot, family
from refit_runtime.adapters.megatron.source import MegatronSource

from tests.adapters.megatron.reference import Rank, Trainer, World

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron.*")

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}


def layer(rank: Rank) -> Any:
    return rank.chunks[0].decoder.layers[0]


class Stranger(torch.nn.Linear):
    """A module that Megatron does not have."""


class Quantised(torch.Tensor):
    """Memory that is not plain."""


def add_module(rank: Rank) -> None:
    layer(rank).mlp.adapter = Stranger(2, 2)


def add_buffer(rank: Rank) -> None:
    layer(rank).self_attention.register_buffer("sinks", torch.zeros(4))


def derive_mlp(rank: Rank) -> None:
    mlp = layer(rank).mlp
    mlp.__class__ = type("OwnMLP", (type(mlp),), {"__module__": __name__})


def quantise(rank: Rank) -> None:
    weight = layer(rank).mlp.linear_fc1.weight
    layer(rank).mlp.linear_fc1.weight = torch.nn.Parameter(weight.data.as_subclass(Quantised))


def transpose(rank: Rank) -> None:
    layer(rank).self_attention.linear_proj.weight.partition_dim = 0


def interleave(rank: Rank) -> None:
    layer(rank).self_attention.linear_qkv.weight.partition_stride = 3


def shrink(rank: Rank) -> None:
    weight = layer(rank).mlp.linear_fc2.weight
    weight.data = weight.data[:, 1:]


def complex_weight(rank: Rank) -> None:
    layer(rank).mlp.linear_fc2.weight.data = layer(rank).mlp.linear_fc2.weight.data.to(torch.complex64)


def flag(name: str, value: object = True) -> Callable[[Rank], None]:
    def set_it(rank: Rank) -> None:
        setattr(rank.chunks[0].config, name, value)

    return set_it


def two_of_a_kind(rank: Rank) -> None:
    rank.chunks.append(rank.chunks[0])


def not_a_model(rank: Rank) -> None:
    rank.chunks[0] = torch.nn.Linear(2, 2)


def lose_an_expert(rank: Rank) -> None:
    layer(rank).mlp.local_expert_indices = [0, 1, 2, 2]


SPOILED: dict[str, tuple[Callable[[Rank], None], tuple[str, ...]]] = {
    "a module nobody knows": (add_module, ("decoder.layers.0.mlp.adapter", "Stranger", "weight")),
    "a buffer nobody knows": (add_buffer, ("decoder.layers.0.self_attention", "sinks")),
    "a type derived from one we know": (derive_mlp, ("decoder.layers.0.mlp.linear_fc1", "weight")),
    "memory that is not plain": (quantise, ("decoder.layers.0.mlp.linear_fc1.weight", "Quantised")),
    "a cut along another dim": (transpose, ("decoder.layers.0.self_attention.linear_proj.weight", "partition_dim 0", "expected dim 1")),
    "another interleave": (interleave, ("decoder.layers.0.self_attention.linear_qkv.weight", "partition_stride 3")),
    "another shape": (shrink, ("decoder.layers.0.mlp.linear_fc2.weight", "(32, 31)", "(32, 32)")),
    "a dtype that nobody sends": (complex_weight, ("decoder.layers.0.mlp.linear_fc2.weight", "complex64")),
    "norms that do not add what the flag says": (
        flag("layernorm_zero_centered_gamma"),
        ("decoder.layers.0.input_layernorm.weight", "RMSNorm", "layernorm_zero_centered_gamma"),
    ),
    "gates in the fused projection": (flag("attention_output_gate"), ("decoder.layers.0.self_attention", "attention_output_gate")),
    "rotation by pairs": (flag("rotary_interleaved"), ("decoder.layers.0.self_attention", "rotary_interleaved")),
    "gate and up in blocks": (flag("moe_mlp_glu_interleave_size", 32), ("decoder.layers.0.mlp.linear_fc1", "moe_mlp_glu_interleave_size")),
    "the same layers twice": (two_of_a_kind, ("model[1].embedding.word_embeddings.weight", "model[0].embedding", "model.embed_tokens.weight")),
    "another kind of model": (not_a_model, ("Linear", "GPTModel")),
}


@pytest.mark.parametrize(("spoil", "words"), SPOILED.values(), ids=SPOILED.keys())
def test_a_model_we_cannot_name_is_refused(spoil: Callable[[Rank], None], words: tuple[str, ...]) -> None:
    rank = next(iter(Trainer(World(2, tp=2), {}).ranks()))
    spoil(rank)
    with pytest.raises(UnsupportedLayout) as refusal:
        MegatronSource(rank.chunks, rank.mesh, "llama", 100)
    for word in words:
        assert word in refusal.value.message


def llama_with(slot: Slot, stem: str) -> Family:
    return Family({**FAMILIES["llama"].names, slot: stem})


REFUSED: dict[str, tuple[dict[str, Any], Any, int, tuple[str, ...]]] = {
    "query norms in a family without": ({"qk_layernorm": True}, "llama", 100, ("q_layernorm", "query norm", "none")),
    "experts in a family without": (EXPERTS, "llama", 100, ("decoder.layers.0.mlp.router", "router")),
    "one name for two halves": ({}, llama_with(Slot.FC1, "h.{layer}.fc1"), 100, ("linear_fc1", "h.{layer}.fc1", "2")),
    "one name for two tensors": ({}, llama_with(Slot.FINAL_NORM, "lm_head"), 100, ("output_layer.weight", "decoder.final_layernorm.weight")),
    "predictions of several tokens in a family without": ({"mtp_num_layers": 1}, "llama", 100, ("mtp.layers.0.enorm.weight", "multi-token prediction")),
    "sinks of attention": ({"softmax_type": "learnable"}, "llama", 100, ("decoder.layers.0.self_attention.core_attention", "softmax_offset")),
    "more words than rows": ({}, "llama", 129, ("129", "128")),
    "no such family": ({}, "palm", 100, ("palm", "llama", "mapping")),
    "biases everywhere": ({"add_bias_linear": True}, Family({Slot.EMBEDDING: "e"}), 100, ("none",)),
}


@pytest.mark.parametrize(("model", "names", "words", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_names_that_do_not_fit_are_refused(model: dict[str, Any], names: Any, words: int, expected: tuple[str, ...]) -> None:
    (rank,) = Trainer(World(), model).ranks()
    with pytest.raises(UnsupportedLayout) as refusal:
        MegatronSource(rank.chunks, rank.mesh, names, words)
    for word in expected:
        assert word in refusal.value.message


@pytest.mark.parametrize("rows", [1024, 1], ids=["C10", "C12"])
def test_a_fused_projection_of_other_rows_is_refused_with_both(rows: int) -> None:
    """64 query and 2 KV heads of width 128 on eight ranks are 8,704 rows, 1,088 on each."""
    rank = next(iter(Trainer(World(8, tp=8), {"num_attention_heads": 64, "num_query_groups": 2, "kv_channels": 128}).ranks()))
    weight = layer(rank).self_attention.linear_qkv.weight
    weight.data = weight.data[:rows]
    with pytest.raises(UnsupportedLayout) as refusal:
        MegatronSource(rank.chunks, rank.mesh, "llama", 100)
    for word in ("decoder.layers.0.self_attention.linear_qkv.weight", f"({rows}, 32)", "(1088, 32)", "(8704, 32)"):
        assert word in refusal.value.message


def test_an_expert_that_no_rank_or_two_would_hold_is_refused() -> None:
    (rank,) = Trainer(World(), EXPERTS).ranks()
    lose_an_expert(rank)
    with pytest.raises(UnsupportedLayout, match=r"decoder\.layers\.0\.mlp\.local_expert_indices: \[0, 1, 2, 2\]"):
        MegatronSource(rank.chunks, rank.mesh, "mixtral", 100)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "etp"])
def test_a_mesh_of_other_sizes_than_the_model_was_built_for_is_refused(axis: str) -> None:
    (rank,) = Trainer(World(), EXPERTS).ranks()
    with pytest.raises(UnsupportedLayout, match=rf"mesh\.{axis} has size 2"):
        MegatronSource(rank.chunks, replace(rank.mesh, **{axis: Axis(0, 2)}), "mixtral", 100)


@pytest.mark.parametrize("place", [(0.5, 2), (False, 2), (0, 2.5), (0, True), (2, 2), (-1, 2), (0, 0)], ids=str)
def test_a_place_that_is_none_is_refused(place: tuple[Any, Any]) -> None:
    with pytest.raises(UnsupportedLayout, match="whole numbers"):
        Axis(*place)


def test_a_shape_that_changes_after_the_binding_is_never_read_at_the_old_box() -> None:
    rank = next(iter(Trainer(World(2, tp=2), {}).ranks()))
    source = MegatronSource(rank.chunks, rank.mesh, "llama", 100)
    index = [shard.tensor.name for shard in source.shards().shards].index("model.layers.0.mlp.down_proj.weight")
    shrink(rank)
    with pytest.raises(ShapeMismatch, match=r"linear_fc2\.weight"):
        source.view(index)


def test_families_are_named_after_the_model_type_of_checkpoints() -> None:
    assert sorted(FAMILIES) == [
        "deepseek_v2", "deepseek_v3", "gemma", "glm4_moe", "glm4_moe_lite", "granite", "kimi_k2", "llama", "ministral3", "mistral", "mixtral",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    ]  # fmt: skip
    assert family("qwen3").names[Slot.Q_NORM] == "model.layers.{layer}.self_attn.q_norm"
    assert Mesh(rank=3).tp == Axis(0, 1)

"""The same model in other modules offers the same shards: norms inside linears, grouped experts, wrappers.

Transformer Engine and grouped GEMM need CUDA, so real models are rearranged: the same tensors under the types and attributes that those modules have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refit_api.tensors import Shard
from refit_runtime.adapters.megatron.source import MegatronSource
from torch import nn

from tests.adapters.megatron.reference import Trainer, World

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron.*")

MEGATRON, ENGINE = "megatron.core.extensions.transformer_engine", "transformer_engine.pytorch"
DENSE: dict[str, Any] = {"add_qkv_bias": True}
AROUND_ZERO: dict[str, Any] = {"add_qkv_bias": True, "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True}
MIXTURE: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "qk_layernorm": True}


def of_type(name: str, host: str, **attributes: Any) -> nn.Module:
    module: nn.Module = type(name, (nn.Module,), {"__module__": host})()
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def linear_with_norm(linear: Any, norm: Any) -> nn.Module:
    found = of_type("TELayerNormColumnParallelLinear", MEGATRON, weight=linear.weight, config=linear.config)
    found.bias = linear.bias if linear.bias is not None else torch.Tensor()  # as Transformer Engine leaves it
    found.zero_centered_gamma = getattr(norm, "zero_centered_gamma", False)
    for name, parameter in norm.named_parameters():
        found.register_parameter(f"layer_norm_{name}", parameter)
    return found


def engine_norm(norm: Any) -> nn.Module:
    return of_type("RMSNorm", ENGINE, zero_centered_gamma=getattr(norm, "zero_centered_gamma", False), **dict(norm.named_parameters()))


def with_engine_linears(chunk: Any) -> Any:
    """As `get_gpt_layer_with_transformer_engine_spec` arranges it: norms live in the linears that follow them."""
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        attention.linear_qkv = linear_with_norm(attention.linear_qkv, layer.input_layernorm)
        layer.input_layernorm = nn.Identity()
        attention.linear_proj = of_type("TERowParallelLinear", MEGATRON, weight=attention.linear_proj.weight)
        if hasattr(layer.mlp, "linear_fc1"):
            layer.mlp.linear_fc1 = linear_with_norm(layer.mlp.linear_fc1, layer.pre_mlp_layernorm)
            layer.pre_mlp_layernorm = nn.Identity()
            layer.mlp.linear_fc2 = of_type("TERowParallelLinear", MEGATRON, weight=layer.mlp.linear_fc2.weight)
        else:
            layer.pre_mlp_layernorm = engine_norm(layer.pre_mlp_layernorm)
            attention.q_layernorm, attention.k_layernorm = engine_norm(attention.q_layernorm), engine_norm(attention.k_layernorm)
    chunk.decoder.final_layernorm = engine_norm(chunk.decoder.final_layernorm)
    return chunk


def with_grouped_linears(chunk: Any) -> Any:
    """As `TEGroupedMLP` holds them: `weight0`, `weight1`, ... of one module."""
    for layer in chunk.decoder.layers:
        experts = layer.mlp.experts.local_experts
        layer.mlp.experts = of_type("TEGroupedMLP", "megatron.core.transformer.moe.experts")
        for name, kind in (("linear_fc1", "TEColumnParallelGroupedLinear"), ("linear_fc2", "TERowParallelGroupedLinear")):
            weights = {f"weight{index}": getattr(expert, name).weight for index, expert in enumerate(experts)}
            setattr(layer.mlp.experts, name, of_type(kind, MEGATRON, **weights))
            layer.mlp.experts.config = layer.mlp.config
    return with_engine_linears(chunk)


def with_grouped_weights(chunk: Any) -> Any:
    """As `GroupedMLP` holds them: two tensors, each expert transposed, seen as (experts, inputs, outputs)."""
    for layer in chunk.decoder.layers:
        experts = layer.mlp.experts.local_experts
        stacked = {name: torch.stack([getattr(expert, name).weight.data.T for expert in experts]) for name in ("linear_fc1", "linear_fc2")}
        hidden = chunk.config.hidden_size
        layer.mlp.experts = of_type(
            "GroupedMLP",
            "megatron.core.transformer.moe.experts",
            config=layer.mlp.config,
            weight1=nn.Parameter(stacked["linear_fc1"].reshape(hidden, -1)),
            weight2=nn.Parameter(stacked["linear_fc2"].reshape(-1, hidden)),
        )
    return chunk


def wrapped(chunk: Any) -> Any:
    inner = of_type("Float16Module", "megatron.core.transformer.module", module=chunk)
    return of_type("DistributedDataParallel", "megatron.core.distributed.distributed_data_parallel", module=inner)


ARRANGED: dict[str, tuple[str, World, dict[str, Any], Callable[[Any], Any]]] = {
    "norms in the linears that follow": ("qwen2", World(2, tp=2), DENSE, with_engine_linears),
    "norms around zero in the linears that follow": ("qwen2", World(2, tp=2), AROUND_ZERO, with_engine_linears),
    "norms before experts stay": ("qwen3_moe", World(4, tp=2, ep=2, etp=2), MIXTURE, with_engine_linears),
    "experts as grouped linears": ("qwen3_moe", World(4, tp=2, ep=2, etp=2), MIXTURE, with_grouped_linears),
    "experts as two tensors": ("qwen3_moe", World(4, tp=2, ep=2, etp=2), MIXTURE, with_grouped_weights),
    "experts as two tensors, not cut": ("qwen3_moe", World(4, tp=2, ep=2, etp=1), MIXTURE, with_grouped_weights),
    "wrapped for training": ("qwen2", World(2, tp=2), DENSE, wrapped),
}


@pytest.mark.parametrize(("family", "world", "model", "arrange"), ARRANGED.values(), ids=ARRANGED.keys())
def test_the_same_tensors_in_other_modules_are_the_same_shards(family: str, world: World, model: dict[str, Any], arrange: Callable[[Any], Any]) -> None:
    for rank in Trainer(world, model).ranks():
        expected = offered(MegatronSource(rank.chunks, rank.mesh, family, 100))
        found = offered(MegatronSource([arrange(rank.chunks[0])], rank.mesh, family, 100))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[shard], expected[shard]) for shard in expected)


def offered(source: MegatronSource) -> dict[Shard, torch.Tensor]:
    return {shard: source.view(index).clone() for index, shard in enumerate(source.shards().shards)}

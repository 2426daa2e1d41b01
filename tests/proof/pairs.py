"""Trainers and engines of one model: megatron.core ranks with weights, the checkpoint that they export, and vLLM's classes of any rank.

Both sides get their sizes from one description, so that only the layouts differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from refit_api.mounted import TransportSettings
from refit_runtime.adapters.megatron.source import MegatronSource
from refit_runtime.adapters.nixl import NixlTransport
from refit_runtime.adapters.vllm.loading import keep_plain_linears, observed
from refit_runtime.adapters.vllm.remade import tensors
from refit_runtime.adapters.vllm.target import VllmTarget, coordinate
from refit_runtime.ports import Transport
from safetensors.torch import save_file

from tests.adapters.megatron.reference import Trainer, World, checkpoint
from tests.adapters.vllm import models
from tests.runtime import conftest as runtime


class NixlWorld(runtime.World):
    def transport(self) -> Transport:
        return NixlTransport(TransportSettings(), {})


WORDS = 100
ALONE = models.Rank(0, 1)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "ministral3": "Ministral3ForCausalLM", "granite": "GraniteForCausalLM", "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}  # fmt: skip
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16,
    "qk_layernorm": True, "rope_type": "rope", "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """So many tensor-parallel ranks; `experts`: whole ones, spread over the ranks."""

    ranks: int
    experts: bool = False


@dataclass(frozen=True)
class Pair:
    """`facts`: what the family's config.json says beside the sizes. `dies`: the trainer rank that is gone after its first chunk."""

    family: str
    world: World
    engines: Mapping[str, Engine]
    model: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    redundancy: int = 1
    dies: int | None = None


# fmt: off
PAIRS = {
    "TP2 -> TP1": Pair("llama", World(2, tp=2), {"one": Engine(1)}),
    "PP2 -> TP2": Pair("llama", World(2, pp=2), {"pair": Engine(2)}),
    "TP2, EP4 -> TP4": Pair("qwen3_moe", World(4, tp=2, ep=4, etp=1), {"four": Engine(4)}, {**EXPERTS, "qk_layernorm": True}),
    "EP2 -> TP1": Pair("qwen3_moe", World(2, ep=2), {"one": Engine(1)}, {**EXPERTS, "qk_layernorm": True}),
    "EP8 -> TP2": Pair("qwen3_moe", World(8, ep=8), {"pair": Engine(2)}, {**EXPERTS, "qk_layernorm": True}),
    "EP8 -> TP2, EP2": Pair("mixtral", World(8, ep=8), {"pair": Engine(2, experts=True)}, EXPERTS),
    "TP8, 64 query and 2 KV heads -> TP1 and TP4": Pair(
        "llama", World(8, tp=8), {"one": Engine(1), "four": Engine(4)},
        {"hidden_size": 64, "num_attention_heads": 64, "num_query_groups": 2, "ffn_hidden_size": 128}
    ),
    "DP2 -> 2 x TP1, one owner dies": Pair(
        "llama", World(2), {"first": Engine(1), "second": Engine(1)}, {"hidden_size": 256, "ffn_hidden_size": 1024}, redundancy=2, dies=0
    ),
    "latent attention, TP2, EP2 -> TP2, EP2": Pair(
        "deepseek_v3", World(2, tp=2, ep=2, etp=1), {"pair": Engine(2, experts=True)}, {**EXPERTS, **LATENT}
    ),
    "Ministral 3, TP2 -> TP1": Pair("ministral3", World(2, tp=2), {"one": Engine(1)}, facts={"sliding_window": None}),
    "Granite, tied, PP2 -> TP2": Pair("granite", World(2, pp=2), {"pair": Engine(2)}, facts=models.GRANITE, tied=True),
    "Seed-OSS, QKV biases, TP2 -> TP1": Pair(
        "seed_oss", World(2, tp=2), {"one": Engine(1)}, {"add_qkv_bias": True}, {"attention_bias": True, "attention_out_bias": False}
    ),
    "SmolLM3, tied, TP2 -> TP1": Pair("smollm3", World(2, tp=2), {"one": Engine(1)}, facts={"pad_token_id": 0}, tied=True),
    "GLM-4.7-Flash, latent attention, EP2 -> TP2": Pair(
        "glm4_moe_lite", World(2, ep=2), {"pair": Engine(2)}, {**EXPERTS, **LATENT}, {"mlp_layer_types": ["dense", "sparse"]}
    ),
}
# fmt: on


@dataclass(slots=True)
class EngineRank:
    target: VllmTarget
    coordinate: str
    module: Any
    config: Any
    reference: Any
    """The same class, loaded by its own loader from the exported checkpoint."""


class Case:
    """A pair with its memory: what trainers hold, and engines with other weights."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair = pair
        trainer = Trainer(pair.world, pair.model, pair.tied)
        built = trainer.world.config(**pair.model)
        self.sources = [MegatronSource(rank.chunks, rank.mesh, pair.family, WORDS) for rank in trainer.ranks(built)]
        facts = json.dumps(facts_of(pair, built))
        (self.bare, self.full) = (folder / "bare", folder / "full")
        for directory in (self.bare, self.full):
            directory.mkdir()
            (directory / "config.json").write_text(facts)
        whole = checkpoint(trainer.whole, built, pair.family, WORDS)
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, self.full / "model.safetensors")
        self.engines = {name: [self._rank(engine, rank) for rank in range(engine.ranks)] for name, engine in pair.engines.items()}

    def _rank(self, engine: Engine, number: int) -> EngineRank:
        rank = models.Rank(number, engine.ranks, engine.experts)
        config = models.engine_config(self.bare, rank)
        reference = self._loaded(rank)
        with observed() as found:
            module = models.built(config, rank, "cpu")
            for parameter in module.parameters():
                parameter.data.normal_()
            self._process(module, config, rank)
        found[0].require()
        place = coordinate(config, number)
        target = VllmTarget(place, found[0])
        return EngineRank(target, place, module, config, reference)

    def _loaded(self, rank: models.Rank) -> Any:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        config = models.engine_config(self.full, rank)
        module = models.built(config, rank, "cpu")
        config.load_config.load_format = "safetensors"
        with models.loading(config, rank):
            DefaultModelLoader(config.load_config).load_weights(module, config.model_config)
        self._process(module, config, rank)
        return module

    def _process(self, module: Any, config: Any, rank: models.Rank) -> None:
        """What engines do after loading, as a generator does it."""
        from vllm.model_executor.layers import utils
        from vllm.model_executor.model_loader import base_loader

        with mock.patch.object(utils, "dispatch_cpu_unquantized_gemm"), models.loading(config, rank):
            keep_plain_linears()
            base_loader.process_weights_after_loading(module, config.model_config, torch.device("cpu"))


def facts_of(pair: Pair, built: Any) -> dict[str, Any]:
    """The checkpoint's config.json."""
    facts = models.BASE | {
        "model_type": pair.family, "architectures": [ARCHITECTURES[pair.family]], "vocab_size": WORDS, "hidden_size": built.hidden_size,
        "intermediate_size": built.ffn_hidden_size, "num_hidden_layers": built.num_layers, "num_attention_heads": built.num_attention_heads,
        "num_key_value_heads": built.num_query_groups, "head_dim": built.kv_channels,
    }  # fmt: skip
    if built.num_moe_experts:
        count, ffn = built.num_moe_experts, built.moe_ffn_hidden_size
        facts |= {"num_experts": count, "num_local_experts": count, "n_routed_experts": count, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        facts |= {"intermediate_size": ffn} if pair.family == "mixtral" else {"moe_intermediate_size": ffn}
    if built.multi_latent_attention:
        facts |= {
            "q_lora_rank": built.q_lora_rank, "kv_lora_rank": built.kv_lora_rank, "qk_nope_head_dim": built.qk_head_dim,
            "qk_rope_head_dim": built.qk_pos_emb_head_dim, "v_head_dim": built.v_head_dim, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "num_key_value_heads": built.num_attention_heads,
        }  # fmt: skip
        facts.pop("head_dim")
    return facts | {"tie_word_embeddings": pair.tied} | pair.facts


def logits(one: EngineRank, module: Any) -> torch.Tensor:
    """Of one forward pass over a few words, with plain causal attention in place of the paged kernel, which holds no weights."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention

    def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        heads, kv, width = layer.num_heads, layer.num_kv_heads, layer.head_size
        q, k, v = (x.view(-1, count, width).transpose(0, 1) for x, count in ((query, heads), (key, kv), (value, kv)))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=width**-0.5, enable_gqa=True)
        return found.transpose(0, 1).reshape(-1, heads * width)

    words = torch.tensor([3, 14, 15, 92, 65, 35])
    with mock.patch.object(Attention, "forward", attend), models.loading(one.config, ALONE), set_forward_context(None, one.config), torch.no_grad():
        return module.compute_logits(module.eval()(words, torch.arange(len(words))))


def assert_same(module: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Every tensor of every module, derived ones too."""
    for (name, ours), (_, theirs) in zip(module.named_modules(), reference.named_modules(), strict=True):
        expected, found = tensors(theirs), tensors(ours)
        assert found.keys() == expected.keys()
        assert [own for own, tensor in expected.items() if not same(tensor, found[own])] == [], name


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))

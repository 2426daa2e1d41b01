"""Real megatron.core models, rank after rank in one process, and what Megatron itself says about where their tensors lie.

Process groups are torch's fake ones: sizes and ranks are real, nothing is sent. Weights come from Megatron's own sharded state dict: each
whole tensor is drawn from its key, and every rank gets the part that Megatron's checkpointing says it holds. The checkpoint in Hugging Face
names is then made from those whole tensors with nothing but reshapes: it shares no code with the adapter under test.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from refit_runtime.adapters.megatron.mesh import Mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from e2e.workloads.megatron_cpu import GPTModel, TransformerConfig, cpu, get_gpt_decoder_block_spec, parallel_state, replaced

PADDED_WORDS = 128


@dataclass(frozen=True, slots=True)
class World:
    """Sizes of a trainer. `dp` follows from the world."""

    size: int = 1
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    sp: bool = False

    def config(self, **model: Any) -> TransformerConfig:
        from megatron.core.transformer import MLATransformerConfig

        base: dict[str, Any] = {
            "num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 8, "ffn_hidden_size": 64,
            "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm", "add_bias_linear": False,
            "use_cpu_initialization": True, "params_dtype": torch.bfloat16, "bf16": True, "pipeline_dtype": torch.bfloat16,
            "bias_activation_fusion": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        }  # fmt: skip
        latent = model.get("multi_latent_attention", False)
        if latent:
            del base["num_query_groups"], base["kv_channels"]
        return (MLATransformerConfig if latent else TransformerConfig)(
            **base | model,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vp,
            context_parallel_size=self.cp,
            sequence_parallel=self.sp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
        )


@dataclass(slots=True)
class Rank:
    chunks: list[Any]
    mesh: Mesh


@dataclass(slots=True)
class Trainer:
    """A trainer of `world.size` ranks, visited one after another."""

    world: World
    model: Mapping[str, Any]
    tied: bool = False
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    """Megatron's whole tensors by Megatron's key."""

    def ranks(self, config: TransformerConfig | None = None) -> Iterator[Rank]:
        for rank in range(self.world.size):
            with groups(rank, self.world):
                chunks = build(self.world, config if config is not None else self.world.config(**self.model), self.tied)
                for chunk in chunks:
                    self.fill(chunk)
                yield Rank(chunks, Mesh.of(parallel_state, rank))

    def fill(self, chunk: Any) -> None:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for entry in chunk.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True}).values():
            parts = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            for part in parts:
                if isinstance(part, ShardedTensor):
                    whole = self.whole.get(part.key)
                    if whole is None:
                        draw = torch.Generator().manual_seed(zlib.crc32(part.key.encode()))
                        whole = self.whole[part.key] = torch.randn(part.global_shape, generator=draw).to(part.data.dtype)
                    with torch.no_grad():
                        part.data.copy_(whole[part.global_slice()])


def build(world: World, config: TransformerConfig, tied: bool) -> list[Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    chunks = []
    for stage in [None] if world.vp is None else range(world.vp):
        with norms_of_megatron() if config.normalization == "LayerNorm" else ExitStack():
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage)
            predictions = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage) if config.mtp_num_layers else None
        if config.multi_latent_attention or world.cp > 1:
            without_core_attention(spec)
        chunks.append(
            GPTModel(
                config,
                spec,
                vocab_size=PADDED_WORDS,
                max_sequence_length=16,
                position_embedding_type="rope",
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=tied,
                vp_stage=stage,
                mtp_block_spec=predictions,
            )
        )
    return chunks


@contextmanager
def norms_of_megatron() -> Iterator[None]:
    """Its own LayerNorm, which knows zero-centred weights and sequence parallelism; only its forward pass needs Apex."""
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    fused_layer_norm.HAVE_FUSED_LAYER_NORM = True
    norm = fused_layer_norm.FusedLayerNorm
    with replaced(gpt_layer_specs, LNImpl=norm), replaced(backends, LNImpl=norm):
        yield


def without_core_attention(spec: Any) -> None:
    """Megatron's own attention kernel knows neither latent attention nor context parallelism; it holds no tensors. And without Transformer Engine, say so."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp

    multi_latent_attention.HAVE_TE = False  # it looks at whether the wrappers import, and they do

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = IdentityOp


@contextmanager
def groups(rank: int, world: World) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world.size, store=FakeStore())
    try:
        with cpu():
            parallel_state.initialize_model_parallel(
                world.tp,
                world.pp,
                world.vp,
                context_parallel_size=world.cp,
                expert_model_parallel_size=world.ep,
                expert_tensor_parallel_size=world.etp,
                create_gloo_process_groups=False,
            )
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
LATENT = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
}


PREDICTION = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def checkpoint(whole: Mapping[str, torch.Tensor], config: TransformerConfig, family: str, words: int) -> dict[str, torch.Tensor]:
    """Whole Megatron tensors in Hugging Face names, shapes and values."""
    top = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    found = {}
    for key, tensor in whole.items():
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", key)
        prediction = re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", key)
        if key in top:
            found[top[key]] = tensor[:words]
        elif key.startswith("decoder.final_layernorm."):
            found[key.replace("decoder.final_layernorm", "model.norm")] = tensor
        elif prediction is not None:
            number, inside = config.num_layers + int(prediction[1]), prediction[2]
            parts = [(PREDICTION[inside], tensor)] if inside in PREDICTION else layer_tensors(inside.removeprefix("transformer_layer."), tensor, config, family)
            found |= {f"model.layers.{number}.{name}": part for name, part in parts}
            found |= {f"model.layers.{number}.embed_tokens.weight": whole["embedding.word_embeddings.weight"][:words]}
            found |= {f"model.layers.{number}.shared_head.head.weight": whole["output_layer.weight"][:words]}
        else:
            assert layer is not None, key
            found |= {f"model.layers.{layer[1]}.{name}": part for name, part in layer_tensors(layer[2], tensor, config, family)}
    if config.layernorm_zero_centered_gamma and family != "gemma":
        found = {name: (1 + tensor.float()).to(tensor.dtype) if name.endswith("norm.weight") else tensor for name, tensor in found.items()}
    return found


def layer_tensors(key: str, tensor: torch.Tensor, config: TransformerConfig, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    names = ATTENTION | LATENT if config.multi_latent_attention else ATTENTION
    names |= {key[:-6] + "bias": name[:-6] + "bias" for key, name in names.items() if key.endswith("weight")}
    mixtral = family == "mixtral"
    if key.startswith("self_attention.linear_qkv.") and "layer_norm" not in key:
        groups, width = config.num_query_groups, config.kv_channels
        fused = tensor.reshape(groups, -1, width, *tensor.shape[1:])
        for letter, part in (("q", fused[:, :-2]), ("k", fused[:, -2]), ("v", fused[:, -1])):
            yield f"self_attn.{letter}_proj.{key.rpartition('.')[2]}", part.reshape(-1, *tensor.shape[1:])
    elif key in ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"):
        where = "mlp" if key == "mlp.linear_fc1.weight" else shared(family)
        for name, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
            yield f"{where}.{name}.weight", half
    elif key == "mlp.shared_experts.linear_fc2.weight":
        yield f"{shared(family)}.down_proj.weight", tensor
    elif key.startswith("mlp.experts.experts."):
        for expert, one in enumerate(tensor):
            where = f"block_sparse_moe.experts.{expert}" if mixtral else f"mlp.experts.{expert}"
            if "fc1" in key:
                for name, half in zip(("w1", "w3") if mixtral else ("gate_proj", "up_proj"), one.chunk(2), strict=True):
                    yield f"{where}.{name}.weight", half
            else:
                yield f"{where}.{'w2' if mixtral else 'down_proj'}.weight", one
    elif key == "mlp.router.weight" and mixtral:
        yield "block_sparse_moe.gate.weight", tensor
    else:
        yield names[key], tensor


def shared(family: str) -> str:
    return "mlp.shared_expert" if family.startswith("qwen") else "mlp.shared_experts"

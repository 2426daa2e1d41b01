"""What the tensors of a Megatron model are called in checkpoints: one table per model family, chosen by name, never by looks.

A name is a stem: `.weight` or `.bias` is appended. `{layer}` is the global layer number from 0, `{expert}` the global expert id.
Fused tensors have one stem for each part, in the order of memory. A family without a name for a slot refuses models that fill it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from refit_api.errors import UnsupportedLayout


class Slot(str, Enum):
    """The places of a Megatron GPT model where tensors are held."""

    EMBEDDING = "embedding"
    OUTPUT = "output"
    FINAL_NORM = "final norm"
    ATTENTION_NORM = "attention norm"
    QKV = "qkv"  # (q, k, v)
    ATTENTION_OUT = "attention out"
    Q_NORM = "query norm"
    K_NORM = "key norm"
    MLA_Q = "latent attention q"
    MLA_Q_DOWN = "latent attention q down"
    MLA_Q_NORM = "latent attention q norm"
    MLA_Q_UP = "latent attention q up"
    MLA_KV_DOWN = "latent attention kv down"
    MLA_KV_NORM = "latent attention kv norm"
    MLA_KV_UP = "latent attention kv up"
    MLP_NORM = "mlp norm"
    FC1 = "mlp fc1"  # (gate, up), or one stem if the MLP is not gated
    FC2 = "mlp fc2"
    ROUTER = "router"
    ROUTER_CORRECTION = "router correction"  # a whole name: nothing is appended
    EXPERT_FC1 = "expert fc1"
    EXPERT_FC2 = "expert fc2"
    SHARED_FC1 = "shared expert fc1"
    SHARED_FC2 = "shared expert fc2"
    SHARED_GATE = "shared expert gate"
    MTP_EMBEDDING = "multi-token prediction embedding"  # the model's own, under the name that a draft engine asks for
    MTP_EMBEDDING_NORM = "multi-token prediction embedding norm"
    MTP_HIDDEN_NORM = "multi-token prediction hidden norm"
    MTP_PROJECTION = "multi-token prediction projection"
    MTP_FINAL_NORM = "multi-token prediction final norm"
    MTP_OUTPUT = "multi-token prediction output"  # the model's own, too


Names = Mapping[Slot, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """`norms_around_zero`: its checkpoints, and so its engines, keep what a norm adds to 1."""

    names: Names
    norms_around_zero: bool = False


_LAYER = "model.layers.{layer}"

_LLAMA: dict[Slot, str | tuple[str, ...]] = {
    Slot.EMBEDDING: "model.embed_tokens",
    Slot.OUTPUT: "lm_head",
    Slot.FINAL_NORM: "model.norm",
    Slot.ATTENTION_NORM: f"{_LAYER}.input_layernorm",
    Slot.QKV: (f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.self_attn.k_proj", f"{_LAYER}.self_attn.v_proj"),
    Slot.ATTENTION_OUT: f"{_LAYER}.self_attn.o_proj",
    Slot.MLP_NORM: f"{_LAYER}.post_attention_layernorm",
    Slot.FC1: (f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
    Slot.FC2: f"{_LAYER}.mlp.down_proj",
}
_QK_NORMS: dict[Slot, str | tuple[str, ...]] = {
    Slot.Q_NORM: f"{_LAYER}.self_attn.q_norm",
    Slot.K_NORM: f"{_LAYER}.self_attn.k_norm",
}
_EXPERTS: dict[Slot, str | tuple[str, ...]] = {
    Slot.ROUTER: f"{_LAYER}.mlp.gate",
    Slot.EXPERT_FC1: (f"{_LAYER}.mlp.experts.{{expert}}.gate_proj", f"{_LAYER}.mlp.experts.{{expert}}.up_proj"),
    Slot.EXPERT_FC2: f"{_LAYER}.mlp.experts.{{expert}}.down_proj",
}
_SHARED_EXPERT: dict[Slot, str | tuple[str, ...]] = {
    Slot.SHARED_FC1: (f"{_LAYER}.mlp.shared_expert.gate_proj", f"{_LAYER}.mlp.shared_expert.up_proj"),
    Slot.SHARED_FC2: f"{_LAYER}.mlp.shared_expert.down_proj",
    Slot.SHARED_GATE: f"{_LAYER}.mlp.shared_expert_gate",
}
_MIXTRAL: dict[Slot, str | tuple[str, ...]] = {
    Slot.ROUTER: f"{_LAYER}.block_sparse_moe.gate",
    Slot.EXPERT_FC1: (f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w1", f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w3"),
    Slot.EXPERT_FC2: f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w2",
}
_LATENT: dict[Slot, str | tuple[str, ...]] = {
    Slot.MLA_Q: f"{_LAYER}.self_attn.q_proj",
    Slot.MLA_Q_DOWN: f"{_LAYER}.self_attn.q_a_proj",
    Slot.MLA_Q_NORM: f"{_LAYER}.self_attn.q_a_layernorm",
    Slot.MLA_Q_UP: f"{_LAYER}.self_attn.q_b_proj",
    Slot.MLA_KV_DOWN: f"{_LAYER}.self_attn.kv_a_proj_with_mqa",
    Slot.MLA_KV_NORM: f"{_LAYER}.self_attn.kv_a_layernorm",
    Slot.MLA_KV_UP: f"{_LAYER}.self_attn.kv_b_proj",
}
_SIGMOID_EXPERTS: dict[Slot, str | tuple[str, ...]] = {
    Slot.ROUTER_CORRECTION: f"{_LAYER}.mlp.gate.e_score_correction_bias",
    Slot.SHARED_FC1: (f"{_LAYER}.mlp.shared_experts.gate_proj", f"{_LAYER}.mlp.shared_experts.up_proj"),
    Slot.SHARED_FC2: f"{_LAYER}.mlp.shared_experts.down_proj",
}
_MTP: dict[Slot, str | tuple[str, ...]] = {
    Slot.MTP_EMBEDDING: f"{_LAYER}.embed_tokens",
    Slot.MTP_EMBEDDING_NORM: f"{_LAYER}.enorm",
    Slot.MTP_HIDDEN_NORM: f"{_LAYER}.hnorm",
    Slot.MTP_PROJECTION: f"{_LAYER}.eh_proj",
    Slot.MTP_FINAL_NORM: f"{_LAYER}.shared_head.norm",
    Slot.MTP_OUTPUT: f"{_LAYER}.shared_head.head",
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA),
    "mistral": Family(_LLAMA),
    "ministral3": Family(_LLAMA),
    "granite": Family(_LLAMA),
    "seed_oss": Family(_LLAMA),
    "smollm3": Family(_LLAMA),
    "mixtral": Family(_LLAMA | _MIXTRAL),
    "gemma": Family(_LLAMA, norms_around_zero=True),
    "qwen2": Family(_LLAMA),
    "qwen2_moe": Family(_LLAMA | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Family(_LLAMA | _QK_NORMS),
    "qwen3_moe": Family(_LLAMA | _QK_NORMS | _EXPERTS),
    "glm4_moe": Family(_LLAMA | _QK_NORMS | _EXPERTS | _SIGMOID_EXPERTS | _MTP),
    "glm4_moe_lite": Family(_LLAMA | _EXPERTS | _SIGMOID_EXPERTS | _LATENT | _MTP),
    "deepseek_v2": Family(_LLAMA | _EXPERTS | _SIGMOID_EXPERTS | _LATENT),
    "deepseek_v3": Family(_LLAMA | _EXPERTS | _SIGMOID_EXPERTS | _LATENT | _MTP),
    "kimi_k2": Family(_LLAMA | _EXPERTS | _SIGMOID_EXPERTS | _LATENT),
}
"""By the `model_type` of the checkpoint's config.json."""


def family(model_type: str) -> Family:
    """Raises UnsupportedLayout for a family without a table."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        raise UnsupportedLayout(
            f"model family {model_type!r} has no table of checkpoint names; known: {', '.join(sorted(FAMILIES))}. Give a mapping instead", seen=model_type
        ) from None

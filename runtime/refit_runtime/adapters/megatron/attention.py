"""Attention: grouped queries with one fused projection, and multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator

from refit_api.errors import UnsupportedLayout

from refit_runtime.adapters.megatron.layout import Heads
from refit_runtime.adapters.megatron.linear import At, Leaf, kind_of, linear, norm
from refit_runtime.adapters.megatron.names import Slot


def attention(at: At) -> Iterator[Leaf]:
    kind = kind_of(at.module)
    if kind == "SelfAttention":
        yield from grouped(at)
    elif kind == "MLASelfAttention":
        yield from latent(at)


def grouped(at: At) -> Iterator[Leaf]:
    """Rows of `linear_qkv`, per KV group: its query rows, its key rows, its value rows. A rank's cut may fall inside a group."""
    config, tp = at.module.config, at.mesh.tp
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    for flag, why in (("attention_output_gate", "it adds gate rows to linear_qkv"), ("rotary_interleaved", "checkpoints rotate halves, not pairs")):
        if getattr(config, flag, False):
            raise UnsupportedLayout(
                f"{at.path}: {flag} is on and {why}; train with it off, or give the tensors from your own source", module=at.path, tensor="linear_qkv"
            )
    fused = (heads + 2 * groups) * width
    yield from linear(at, "linear_qkv", Slot.QKV, (fused, config.hidden_size), tp, Heads(heads, groups, width))
    yield from norm(at, "q_layernorm", Slot.Q_NORM, width)
    yield from norm(at, "k_layernorm", Slot.K_NORM, width)
    yield from linear(at, "linear_proj", Slot.ATTENTION_OUT, (config.hidden_size, heads * width), tp)


def latent(at: At) -> Iterator[Leaf]:
    """Per head, the up projections hold the part without rotation, then the rotated part or the values: the order of checkpoints."""
    config, tp = at.module.config, at.mesh.tp
    heads, query = config.num_attention_heads, config.qk_head_dim + config.qk_pos_emb_head_dim
    if config.q_lora_rank is None:
        yield from linear(at, "linear_q_proj", Slot.MLA_Q, (heads * query, config.hidden_size), tp)
    else:
        yield from linear(at, "linear_q_down_proj", Slot.MLA_Q_DOWN, (config.q_lora_rank, config.hidden_size), tp)
        yield from norm(at, "q_layernorm", Slot.MLA_Q_NORM, config.q_lora_rank)
        yield from linear(at, "linear_q_up_proj", Slot.MLA_Q_UP, (heads * query, config.q_lora_rank), tp)
    yield from linear(at, "linear_kv_down_proj", Slot.MLA_KV_DOWN, (config.kv_lora_rank + config.qk_pos_emb_head_dim, config.hidden_size), tp)
    yield from norm(at, "kv_layernorm", Slot.MLA_KV_NORM, config.kv_lora_rank)
    yield from linear(at, "linear_kv_up_proj", Slot.MLA_KV_UP, (heads * (config.qk_head_dim + config.v_head_dim), config.kv_lora_rank), tp)
    yield from linear(at, "linear_proj", Slot.ATTENTION_OUT, (config.hidden_size, heads * config.v_head_dim), tp)

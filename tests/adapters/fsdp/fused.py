"""A Hugging Face model whose experts the library fuses."""

from __future__ import annotations

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion


def tiny_moe(seed: int = 7) -> transformers.PreTrainedModel:
    """Twelve experts a layer: none for two of eight ranks, two for each of the others."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, num_experts=12, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def saved(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """By the library's own way to its checkpoint."""
    return {name: tensor.detach().clone() for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}

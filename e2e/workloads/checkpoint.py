"""A version as a Hugging Face checkpoint, made the plain way: gather all ranks, put their parts side by side, take the fused tensors apart.

It shares no code with the adapter that publishes the same model, so comparing the two checks both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from e2e.workloads.tiny_llama import TinyLlama

State = dict[str, torch.Tensor]


def export(model: torch.nn.Module, sizes: TinyLlama, folder: Path) -> None:
    """Every rank calls it; the first writes. The folder appears whole or not at all."""
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ranks: list[State] | None = [{} for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object(state, ranks)
    if ranks is None or folder.exists():
        return
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    sizes.write_config(part)
    save_file(merged(ranks, sizes), part / "model.safetensors", metadata={"format": "pt"})
    os.replace(part, folder)


def merged(ranks: Sequence[State], sizes: TinyLlama) -> State:
    found: State = {
        "model.embed_tokens.weight": beside(ranks, "embedding.word_embeddings.weight", 0)[: sizes.words],
        "model.norm.weight": ranks[0]["decoder.final_layernorm.weight"],
        "lm_head.weight": beside(ranks, "output_layer.weight", 0)[: sizes.words],
    }
    for layer in range(sizes.layers):
        theirs, ours = f"decoder.layers.{layer}", f"model.layers.{layer}"
        groups = beside(ranks, f"{theirs}.self_attention.linear_qkv.weight", 0).view(sizes.kv_heads, -1, sizes.head, sizes.hidden)
        halves = [state[f"{theirs}.mlp.linear_fc1.weight"].chunk(2) for state in ranks]
        found |= {
            f"{ours}.input_layernorm.weight": ranks[0][f"{theirs}.input_layernorm.weight"],
            f"{ours}.self_attn.q_proj.weight": groups[:, :-2].reshape(-1, sizes.hidden),
            f"{ours}.self_attn.k_proj.weight": groups[:, -2].reshape(-1, sizes.hidden),
            f"{ours}.self_attn.v_proj.weight": groups[:, -1].reshape(-1, sizes.hidden),
            f"{ours}.self_attn.o_proj.weight": beside(ranks, f"{theirs}.self_attention.linear_proj.weight", 1),
            f"{ours}.post_attention_layernorm.weight": ranks[0][f"{theirs}.pre_mlp_layernorm.weight"],
            f"{ours}.mlp.gate_proj.weight": torch.cat([gate for gate, _ in halves]),
            f"{ours}.mlp.up_proj.weight": torch.cat([up for _, up in halves]),
            f"{ours}.mlp.down_proj.weight": beside(ranks, f"{theirs}.mlp.linear_fc2.weight", 1),
        }
    return {name: tensor.contiguous() for name, tensor in found.items()}


def beside(ranks: Sequence[State], name: str, dim: int) -> torch.Tensor:
    return torch.cat([state[name] for state in ranks], dim=dim)

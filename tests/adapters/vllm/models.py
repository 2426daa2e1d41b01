"""Tiny models of each family, and vLLM's classes built for any rank without a process group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

BASE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
DEEPSEEK = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.01}

# fmt: off
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama, tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama, one kv head": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1},
    "llama, biases": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2 (qkv bias, tied)": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3 (q and k norms)": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3 moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "decoder_sparse_step": 1, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek v2 (no query bottleneck)": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], **EXPERTS, **MLA, **DEEPSEEK,
        "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax",
    },
    "deepseek v3 (mla, shared expert)": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **EXPERTS, **MLA, **DEEPSEEK},
    "gemma": {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3": {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    "gpt-oss (transposed experts, sinks)": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
        "num_key_value_heads": 4, "intermediate_size": 128, "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4 (stacked experts)": {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1,
    },
    "qwen3-next (linear attention, gated shared expert)": {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_experts": 4, "shared_expert_intermediate_size": 64, **EXPERTS,
        "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 4,
    },
    "olmo2 (norms cut by rank)": {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
    "phi3 (fused qkv on disk)": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "glm4 (norms around both halves)": {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "pad_token_id": 0},
    "glm4 moe": {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], **EXPERTS, **DEEPSEEK, "use_qk_norm": True, "attention_bias": True},
    "glm4 moe lite (mla)": {
        "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], **EXPERTS, **MLA, **DEEPSEEK, "mlp_layer_types": ["dense", "sparse"],
    },
    "kimi k2 (a type of its own, another's class)": {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], **EXPERTS, **MLA, **DEEPSEEK},
    "ministral3": {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "sliding_window": None},
    "seed oss": {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False},
    "smollm3": {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "tie_word_embeddings": True, "pad_token_id": 0},
    "granite": {"model_type": "granite", "architectures": ["GraniteForCausalLM"], **GRANITE, "tie_word_embeddings": True},
    "granite moe, shared expert": {
        "model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"], **GRANITE,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
    },
    "olmoe": {
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    },
    "qwen2 moe": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64, **EXPERTS,
    },
    "minimax m2": {
        "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8,
        "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True,
    },
    "ernie 4.5": {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], "use_bias": False, "tie_word_embeddings": True},
    "exaone4": {"model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "cohere2": {
        "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "layer_norm_eps": 1e-5, "logit_scale": 1.0, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n (inputs of each layer)": {
        "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200, "num_hidden_layers": 4, "num_kv_shared_layers": 1, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4": {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200, "global_head_dim": 16, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "lfm2 moe (short convolutions)": {
        "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "layer_types": ["conv", "full_attention"], "norm_eps": 1e-5,
        "tie_word_embeddings": True, "num_experts": 4, "num_dense_layers": 1, "use_expert_bias": True, **EXPERTS,
    },
}
NOT_FOLLOWED: dict[str, dict[str, Any]] = {
    "granite hybrid (mamba 2)": {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], **GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 64, "position_embedding_type": "rope",
    },
    "jamba (mamba)": {
        "model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8, "pad_token_id": 0,
    },
    "ernie 4.5 moe": {
        "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_intermediate_size": 32, "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1, "use_bias": False,
    },
    "glm4, a padding word beyond the vocabulary": {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "attention_bias": True},
}
# fmt: on


QUANTISED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "moe_intermediate_size": 256, "quantization_config": QUANTISED}
ROUTERS = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
LATENT_BLOCKS = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
FAMILIES |= {
    "llama, wide": FAMILIES["llama"] | {name: size for name, size in BLOCKS.items() if name != "quantization_config"},
    "llama, block FP8": FAMILIES["llama"] | BLOCKS,
    "qwen3 moe, block FP8": FAMILIES["qwen3 moe"] | BLOCKS | {"quantization_config": QUANTISED | {"modules_to_not_convert": ROUTERS}},
    "deepseek v3, block FP8": FAMILIES["deepseek v3 (mla, shared expert)"] | BLOCKS | LATENT_BLOCKS,
}
EXPERT_FAMILIES = tuple(family for family, facts in FAMILIES.items() if any("expert" in fact for fact in facts))


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a tensor-parallel engine; `experts`: experts spread whole over the ranks instead of cut. `stage` of `stages`: of its pipeline."""

    rank: int
    size: int
    experts: bool = False
    stage: int = 0
    stages: int = 1


def directory(tmp: Path, family: str) -> Path:
    """A model directory that holds a configuration and no weights."""
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / "config.json").write_text(json.dumps(BASE | (FAMILIES | NOT_FOLLOWED)[family]))
    return tmp


def engine_config(model: Path, rank: Rank, load_format: str = "dummy", **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    args = EngineArgs(
        str(model), skip_tokenizer_init=True, load_format=load_format, enforce_eager=True, max_model_len=64,
        tensor_parallel_size=rank.size, pipeline_parallel_size=rank.stages, enable_expert_parallel=rank.experts, distributed_executor_backend="mp",
        **arguments,
    )  # fmt: skip
    with mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):  # a minute for each new family otherwise
        return args.create_engine_config()


@contextmanager
def faked(rank: Rank) -> Iterator[None]:
    """vLLM believes it is `rank`: the groups it asks for sizes and ranks are plain objects."""
    from vllm.distributed import parallel_state

    def group(of: int, size: int) -> Any:
        return SimpleNamespace(
            rank_in_group=of, world_size=size, rank=of, local_rank=of, is_first_rank=of == 0, is_last_rank=of == size - 1, ranks=list(range(size)),
            device_group=SimpleNamespace(size=lambda: size, rank=lambda: of), cpu_group=None, use_custom_op_call=False, device_communicator=None,
        )  # fmt: skip

    many, stages, one = group(rank.rank, rank.size), group(rank.stage, rank.stages), group(0, 1)
    with ExitStack() as stack:
        for name in ("_TP", "_EP", "_WORLD"):
            stack.enter_context(mock.patch.object(parallel_state, name, many))
        stack.enter_context(mock.patch.object(parallel_state, "_PP", stages))
        for name in ("_DP", "_DCP", "_PCP"):
            stack.enter_context(mock.patch.object(parallel_state, name, one))
        yield


class WithoutKernel:
    """Stands where vLLM would choose an FP8 kernel: on processors without AMX it has none. Parameters and loaders are made before it is asked."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as they were loaded."""


@contextmanager
def without_kernels() -> Iterator[None]:
    from vllm.model_executor.layers.quantization import fp8

    with (
        mock.patch.object(fp8, "init_fp8_linear_kernel", return_value=WithoutKernel()),
        mock.patch.object(fp8, "select_fp8_moe_backend", return_value=(None, None)),
    ):
        yield


def built(config: Any, rank: Rank, device: str) -> torch.nn.Module:
    """The engine's model as `rank` builds it, before any weight is loaded; where an engine's loader builds it, so that it can be observed."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.models import utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    utils._model_to_pp_missing_layer_names.clear()  # by the id of a model: one that is gone may have had it
    config.compilation_config.static_forward_context.clear()
    with faked(rank), without_kernels(), set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device(device):
        return base_loader.initialize_model(vllm_config=config, model_config=config.model_config)


def load(model: Any, config: Any, rank: Rank, tensors: dict[str, torch.Tensor]) -> None:
    """The model's own loader, in the engine's surroundings."""
    with loading(config, rank), torch.no_grad():
        model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())  # some loaders write into what they get


@contextmanager
def loading(config: Any, rank: Rank) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    with faked(rank), set_current_vllm_config(config):
        yield

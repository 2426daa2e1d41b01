"""The tiny Llama as a Megatron-core model on CPU, and how it is trained: bf16 weights, fp32 masters, generated text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everybody reads)

from e2e.workloads.megatron_cpu import GPTModel, TransformerConfig, get_gpt_decoder_block_spec, parallel_state
from e2e.workloads.text import BATCH, LENGTH, text
from e2e.workloads.tiny_llama import TinyLlama


@contextmanager
def groups(ranks: int, seconds: float) -> Iterator[None]:
    """Gloo, and Megatron's groups over it, all of them tensor-parallel; torchrun's environment says where the ranks meet."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(sizes: TinyLlama, ranks: int, seed: int) -> GPTModel:
    """This rank's part; needs Megatron's process groups. Equal on every rank that has the same seed."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.query_heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head,
        ffn_hidden_size=sizes.ffn,
        tensor_model_parallel_size=ranks,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.epsilon,
        add_bias_linear=False,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        cuda_graph_scope=[],
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=sizes.padded_words,
        max_sequence_length=sizes.positions,
        position_embedding_type="rope",
        rotary_base=sizes.rotary_base,
        share_embeddings_and_output_weights=False,
    )
    return model.bfloat16()  # the norms are made in fp32


class Training:
    """One object for the life of a run: a step is a batch."""

    def __init__(self, model: GPTModel, sizes: TinyLlama, rate: float, seed: int) -> None:
        self._model = model
        self._masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
        self._optimizer = torch.optim.AdamW(self._masters, lr=rate)
        self._text = text(sizes.words, seed)

    def step(self) -> float:
        """The loss before the step."""
        tokens = next(self._text)
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        later = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
        loss = self._model(tokens[:, :-1], positions, later, labels=tokens[:, 1:]).float().mean()
        self._model.zero_grad()
        loss.backward()
        parameters = list(self._model.parameters())
        for master, parameter in zip(self._masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, parameters, strict=True):
                parameter.copy_(master)
        return loss.item()

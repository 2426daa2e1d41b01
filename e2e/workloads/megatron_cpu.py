"""Lets megatron.core build and train models on CPU: the three places where it assumes CUDA get a CPU answer, and nothing is compiled.

`cpu()` is entered before a model is built and left after its last step: the substitutes are process-wide.
Import this module before any other that imports megatron.core: the import is where Megatron decides to compile, which needs a C++ compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of `owner` have these values within it."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


with warnings.catch_warnings(), replaced(torch, compile=lambda function: function):
    warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed": true, and wanted here
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer import TransformerConfig

__all__ = ["GPTModel", "TransformerConfig", "cpu", "get_gpt_decoder_block_spec", "parallel_state"]


class _OneGenerator(parallel_random.CudaRNGStatesTracker):  # type: ignore[misc]
    """Every region draws from torch's CPU generator: with CPU initialisation all ranks draw the whole tensor and keep their part."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def cpu() -> Iterator[None]:
    """Within it, megatron.core's current device is the CPU, moving to CUDA stays where it is, and its generators are one."""
    with (
        replaced(torch.cuda, current_device=lambda: torch.device("cpu")),
        replaced(torch.Tensor, cuda=lambda tensor, *_, **__: tensor),
        replaced(parallel_random, _CUDA_RNG_STATE_TRACKER=_OneGenerator(), _CUDA_RNG_STATE_TRACKER_INITIALIZED=True),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")  # advice about CUDA streams
        yield

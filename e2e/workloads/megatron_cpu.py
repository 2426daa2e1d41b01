"""Lets megatron.core build and train models on CPU: the three places where it assumes CUDA get a CPU answer.

`cpu()` is entered before a model is built and left after its last step: the substitutes are process-wide.
Importing this module before any other that imports megatron.core keeps its notes about absent CUDA extensions out of the log.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

with warnings.catch_warnings():
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
    device, move = torch.cuda.current_device, torch.Tensor.cuda
    tracker = parallel_random._CUDA_RNG_STATE_TRACKER, parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    parallel_random._CUDA_RNG_STATE_TRACKER, parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _OneGenerator(), True
    try:
        yield
    finally:
        torch.cuda.current_device = device
        torch.Tensor.cuda = move  # type: ignore[method-assign]
        parallel_random._CUDA_RNG_STATE_TRACKER, parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker

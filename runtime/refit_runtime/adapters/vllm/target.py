"""The live parameters of one vLLM worker as a weight target, and its coordinate."""

from __future__ import annotations

from typing import Any

import torch
from refit_api.tensors import CoordinateNeeds

from refit_runtime.adapters.vllm.loading import Loaded

_RANKS = "refit_ranks"


class VllmTarget:
    """Views are those of the tensors that loaders fill: parameters may get other names later (LoRA wraps modules), not other memory."""

    def __init__(self, coordinate: str, loaded: Loaded) -> None:
        self._needs = CoordinateNeeds(coordinate, loaded.recording.needs, loaded.recording.unwritten)
        self._tensors, self._remade = loaded.tensors, loaded.remade

    def needs(self) -> CoordinateNeeds:
        return self._needs

    def view(self, parameter: str) -> torch.Tensor:
        return self._tensors[parameter]

    def remake(self) -> None:
        for one in self._remade:
            one.make()
        if self._remade and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def coordinate(config: Any, rank: int) -> str:
    """Where rank `rank` of an engine core stands on the axes that cut weights; the same in every replica of a class.

    Experts of a mixture are also cut over data-parallel cores; otherwise those are replicas of each other.
    """
    parallel = config.parallel_config
    tensor, context, pipeline = parallel.tensor_parallel_size, getattr(parallel, "prefill_context_parallel_size", 1), parallel.pipeline_parallel_size
    parts = [f"tp{rank % tensor}"]
    if pipeline > 1:
        parts.append(f"pp{rank // (tensor * context) % pipeline}")
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        parts.append(f"dp{parallel.data_parallel_index}")
    return "-".join(parts)


def note_ranks(config: Any) -> None:
    """Writes down how many ranks the generator has: a core of several that need not act together is told that it is alone."""
    config.additional_config = {**(config.additional_config or {}), _RANKS: config.parallel_config.data_parallel_size * config.parallel_config.world_size}


def place(config: Any, rank: int) -> tuple[int, int]:
    """`(rank, world)` over all engine cores of the generator."""
    parallel = config.parallel_config
    return parallel.data_parallel_index * parallel.world_size + rank, config.additional_config[_RANKS]

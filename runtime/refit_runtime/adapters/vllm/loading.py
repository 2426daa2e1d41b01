"""What is seen while the engine loads its model: the needs, before the engine repacks anything, and what it repacked.

vLLM loads in the layout of its loaders, then lets each module rearrange its weights for its kernels. Needs are recorded in between. A module whose
memory differs afterwards (other shape, other place, other contents, or tensors derived from its weights) does not compute with what copies into the
recorded places would change: it is named, and the engine is refused until such modules can be reloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from refit_api.errors import EngineMismatch

from refit_runtime.adapters.vllm.checkpoint import checkpoint_tensors
from refit_runtime.adapters.vllm.recorder import UNWRITTEN, Recording, live_tensors, record

WORDS = 1 << 20  # of a tensor, weighed at a time


@dataclass(frozen=True, slots=True)
class Loaded:
    """One model that the engine loaded; `tensors` are its live ones by the names they had when they were loaded."""

    module: torch.nn.Module
    name: str
    recording: Recording
    tensors: dict[str, torch.Tensor]
    repacked: tuple[str, ...]

    def require(self) -> None:
        """Raises UnsupportedLayout, EngineMismatch."""
        self.recording.require(self.name)
        if self.repacked:
            raise EngineMismatch(
                f"{self.name}: the engine repacks {len(self.repacked)} modules for its kernels after loading ({', '.join(self.repacked[:8])}), "
                "and copies would not reach what it computes with; use a model, data type or kernel backend whose weights stay as they are loaded",
                seen=len(self.repacked),
            )


@contextmanager
def observed() -> Iterator[list[Loaded]]:
    """Collects every model that is loaded inside."""
    from vllm.model_executor.model_loader import base_loader

    found: list[Loaded] = []
    repack = base_loader.process_weights_after_loading

    def watched(model: torch.nn.Module, model_config: Any, target_device: torch.device) -> None:
        specs = checkpoint_tensors(model_config.model, model_config.hf_config, model_config.dtype)
        loader: Any = model
        recording = record(model, specs, loader.load_weights)
        tensors, before = live_tensors(model), _marks(model)
        repack(model, model_config, target_device)
        after = _marks(model)
        changed = tuple(name for name in after if after[name] != before.get(name, {}))
        found.append(Loaded(model, model_config.model, recording, tensors, changed))

    base_loader.process_weights_after_loading = watched
    try:
        yield found
    finally:
        base_loader.process_weights_after_loading = repack


def keep_plain_linears() -> None:
    """On CPU vLLM packs the weights of linear layers and drops the originals: copies into them would change nothing. They stay plain.

    Process-wide and once: layers look the function up when they are loaded, or loaded again.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # the attribute that vLLM looks for

    utils.dispatch_cpu_unquantized_gemm = plain


def _marks(model: torch.nn.Module) -> dict[str, dict[str, tuple[Any, ...]]]:
    """By module and attribute: where each tensor lies, how it is laid out, and a number that any change of its contents changes."""
    return {
        name: {
            attribute: _mark(tensor)
            for attribute, tensor in {**module._parameters, **module._buffers, **vars(module)}.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and not attribute.removesuffix("_cpu").endswith(UNWRITTEN)
        }
        for name, module in model.named_modules()
    }


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, _weight(tensor)


def _weight(tensor: torch.Tensor) -> int:
    """A sum over the bytes in which every place counts differently; wraps at 64 bits."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    places = torch.arange(1, WORDS + 1, dtype=torch.int64, device=data.device)
    total = 0
    for start in range(0, data.numel(), WORDS):
        part = data[start : start + WORDS].to(torch.int64) + 1
        total = (total * 1_000_003 + int((part * places[: part.numel()]).sum())) % (1 << 64)
    return total

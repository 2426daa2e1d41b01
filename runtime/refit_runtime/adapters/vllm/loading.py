"""What is seen while the engine loads its model: the needs, before the engine repacks anything, and what it repacked.

vLLM loads in the layout of its loaders, then lets each module rearrange its weights for its kernels. Needs are recorded in between. A module whose
memory differs afterwards (other shape, other place, other contents, or tensors derived from its weights) does not compute with what copies into the
recorded places would change: it is made again after each install, or named and the engine is refused.
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
from refit_runtime.adapters.vllm.remade import Filled, Remade, filled, known, tensors

WORDS = 1 << 20  # of a tensor, weighed at a time


@dataclass(frozen=True, slots=True)
class Loaded:
    """One model that the engine loaded; `tensors` are those that loaders fill, by the names they had then.

    `repacked`: modules that compute with something else, and cannot be made again.
    """

    module: torch.nn.Module
    name: str
    recording: Recording
    tensors: dict[str, torch.Tensor]
    remade: tuple[Remade, ...]
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
        live, before, kept = live_tensors(model), _marks(model), filled(model)
        repack(model, model_config, target_device)
        after = _marks(model)
        changed = [name for name in after if after[name] != before.get(name, {})]
        modules = dict(model.named_modules())
        remade = tuple(_remade(name, modules[name], kept[name], before[name], after[name]) for name in changed if known(modules[name]))
        live |= {f"{one.name}.{own}": spare.tensor for one in remade for own, spare in one.spare.items()}
        others = tuple(name for name in changed if not known(modules[name]))
        found.append(Loaded(model, model_config.model, recording, live, tuple(sorted(remade, key=lambda one: one.attends)), others))

    base_loader.process_weights_after_loading = watched
    try:
        yield found
    finally:
        base_loader.process_weights_after_loading = repack


def _remade(name: str, module: torch.nn.Module, kept: dict[str, Filled], before: dict[str, Any], after: dict[str, Any]) -> Remade:
    from vllm.config import get_current_vllm_config

    return Remade.of(name, module, {own: one for own, one in kept.items() if before.get(own) != after.get(own)}, get_current_vllm_config())


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
        name: {attribute: _mark(tensor) for attribute, tensor in tensors(module).items() if not attribute.removesuffix("_cpu").endswith(UNWRITTEN)}
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

"""What is seen while the engine loads its model: the needs, before the engine repacks anything, and what it repacked.

vLLM loads in the layout of its loaders, then lets each module rearrange its weights for its kernels. Needs are recorded in between; those of a model that
is quantised while it loads, before, when some of its parameters have no memory yet. A module whose
memory differs afterwards (other shape, other place, other contents, or tensors derived from its weights) does not compute with what copies into the
recorded places would change: it is made again after each install, or named and the engine is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
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
    early: dict[torch.nn.Module, _Recorded] = {}
    create, repack = base_loader.initialize_model, base_loader.process_weights_after_loading

    def created(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = create(*args, **kwargs)
        if any(parameter.is_meta for parameter in model.parameters()):
            early[model] = _recorded(model, kwargs["model_config"])
        return model

    def watched(model: torch.nn.Module, model_config: Any, target_device: torch.device) -> None:
        recorded = early.pop(model, None)
        if recorded is not None:
            recorded.recording.fill()
        else:
            recorded = _recorded(model, model_config)
        before = _marks(model)
        repack(model, model_config, target_device)
        found.append(_loaded(model, model_config.model, recorded, before, target_device))

    base_loader.initialize_model, base_loader.process_weights_after_loading = created, watched
    try:
        yield found
    finally:
        base_loader.initialize_model, base_loader.process_weights_after_loading = create, repack


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Before anything is rearranged: `live` by name, `kept` by module and attribute."""

    recording: Recording
    live: dict[str, torch.Tensor]
    kept: dict[str, dict[str, Filled]]


def _recorded(model: Any, config: Any) -> _Recorded:
    specs = checkpoint_tensors(config.model, config.hf_config, config.dtype)
    with _unwrapped(model):
        recording = record(model, specs, model.load_weights)
    return _Recorded(recording, live_tensors(model), filled(model))


@contextmanager
def _unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Parameters that are quantised while they load have loaders that collect weights; inside them are those that fill."""
    waiting: list[Any] = [parameter for parameter in model.parameters() if parameter.is_meta]
    wrapped = [(parameter, parameter.weight_loader) for parameter in waiting]
    for parameter, loader in wrapped:
        parameter.weight_loader = unwrap(loader)
    try:
        yield
    finally:
        for parameter, loader in wrapped:
            parameter.weight_loader = loader


def _loaded(model: torch.nn.Module, name: str, recorded: _Recorded, before: dict[str, dict[str, Any]], device: torch.device) -> Loaded:
    from vllm.config import get_current_vllm_config

    after, modules, config = _marks(model), dict(model.named_modules()), get_current_vllm_config()
    remade, repacked = [], []
    for path, module in modules.items():
        meta = {own for own, one in recorded.kept[path].items() if one.tensor.is_meta}
        changed = {own for own in before[path].keys() | after[path].keys() if before[path].get(own) != after[path].get(own)} | meta
        if changed and known(module):
            kept = {own: one for own, one in recorded.kept[path].items() if own in changed}
            remade.append(Remade.of(path, module, kept, config, device))
        elif changed:
            repacked.append(path)
    live = recorded.live | {f"{one.name}.{own}": spare.tensor for one in remade for own, spare in one.spare.items()}
    return Loaded(model, name, recorded.recording, live, tuple(sorted(remade, key=lambda one: one.attends)), tuple(repacked))


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

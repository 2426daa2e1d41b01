"""What is seen while the engine loads its model: the needs, before the engine repacks anything, and what it repacked.

vLLM loads in the layout of its loaders, then lets each module rearrange its weights for its kernels. Needs are recorded, and tried with the engine's own
loader, as soon as the model is there; what each module does with its weights is tried where the engine does it. A module whose memory differs afterwards
(other shape, other place, other contents, or tensors derived from its weights) does not compute with what copies into the recorded places would change:
it is made again after each install if it passed, else named and the engine is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import unwrap
from time import monotonic
from typing import Any

import structlog
import torch
from refit_api.errors import EngineMismatch

from refit_runtime.adapters.vllm.checkpoint import checkpoint_tensors
from refit_runtime.adapters.vllm.recorder import Recording, live_tensors, record
from refit_runtime.adapters.vllm.rehearsal import rehearsed
from refit_runtime.adapters.vllm.remade import Remade
from refit_runtime.adapters.vllm.selftest import UNTOUCHED, Marks, SelfTest, marks

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One model that the engine loaded; `tensors` are those that loaders fill, by the names they had then.

    `repacked`: modules that compute with something else and cannot be made again, with the reasons.
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
                f"{self.name}: the engine repacks {len(self.repacked)} modules for its kernels after loading ({'; '.join(self.repacked[:8])}), "
                "and copies would not reach what it computes with; use a model, data type or kernel backend whose weights stay as they are loaded",
                seen=len(self.repacked),
            )


@contextmanager
def observed() -> Iterator[list[Loaded]]:
    """Collects every model that is loaded inside."""
    from vllm.model_executor.model_loader import base_loader

    found: list[Loaded] = []
    began: dict[torch.nn.Module, _Recorded] = {}
    create, repack = base_loader.initialize_model, base_loader.process_weights_after_loading
    with ExitStack() as stack:

        def created(*args: Any, **kwargs: Any) -> torch.nn.Module:
            model: torch.nn.Module = create(*args, **kwargs)
            with torch.device("cpu"):  # as when the engine runs its loaders
                began[model] = _recorded(model, kwargs["model_config"])
            stack.enter_context(began[model].selftest.watching(model))
            return model

        def watched(model: torch.nn.Module, model_config: Any, target_device: torch.device) -> None:
            recorded = began.pop(model)
            recorded.recording.fill()
            live, before = live_tensors(model), {path: marks(module) for path, module in model.named_modules()}
            repack(model, model_config, target_device)
            found.append(_loaded(model, model_config.model, recorded, live, before))

        base_loader.initialize_model, base_loader.process_weights_after_loading = created, watched
        try:
            yield found
        finally:
            base_loader.initialize_model, base_loader.process_weights_after_loading = create, repack


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Before anything is loaded. `seconds`: what trying the recording took."""

    recording: Recording
    selftest: SelfTest
    seconds: float


def _recorded(model: Any, config: Any) -> _Recorded:
    from vllm.config import get_current_vllm_config

    specs = checkpoint_tensors(config.model, config.hf_config, config.dtype)
    with _unwrapped(model):
        recording = record(model, specs, model.load_weights)
        start = monotonic()
        recording = rehearsed(recording, model, specs, model.load_weights)
    return _Recorded(recording, SelfTest(get_current_vllm_config(), monotonic), monotonic() - start)


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


def _loaded(model: torch.nn.Module, name: str, recorded: _Recorded, live: dict[str, torch.Tensor], before: dict[str, Marks]) -> Loaded:
    selftest, remade, repacked = recorded.selftest, [], []
    for path, module in model.named_modules():
        outcome = selftest.outcomes.get(path, UNTOUCHED)
        if outcome.refused:
            repacked.append(f"{path}: {outcome.refused}")
        elif (outcome.marks if outcome.marks is not None else before[path]) != marks(module):
            repacked.append(f"{path}: something else than its own processing rearranges it")
        elif outcome.remade is not None:
            remade.append(outcome.remade)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()  # what was tried is gone: the arena needs the room
    log.info(
        "self-test of loading done", model=name, modules=len(selftest.outcomes), remade=len(remade), refused=len(repacked),
        seconds=round(selftest.seconds, 3), loader_seconds=round(recorded.seconds, 3),
    )  # fmt: skip
    live |= {f"{one.name}.{own}": spare.tensor for one in remade for own, spare in one.spare.items()}
    return Loaded(model, name, recorded.recording, live, tuple(sorted(remade, key=lambda one: one.attends)), tuple(repacked))


def keep_plain_linears() -> None:
    """On CPU vLLM packs the weights of linear layers and drops the originals: copies into them would change nothing. They stay plain.

    Process-wide and once: layers look the function up when they are loaded, or loaded again.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # the attribute that vLLM looks for

    utils.dispatch_cpu_unquantized_gemm = plain

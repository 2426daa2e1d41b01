"""Modules that the engine rearranges after loading (packed, quantised, multiplied out): after an install they are made again.

An install writes what loaders write; such a module computes with something else, made from that. What its loaders fill is kept beside it and receives
the copies: memory as large as those weights, and none for what the engine left in place. The engine's own processing then turns it into the tensors that
the module computes with, and their addresses stay.

Invariants: only what is known to keep all it derives in the module's own tensors is made again (`KNOWN`), everything else is refused; what loaders fill
survives, so that a version can be read back, gathered and installed once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from refit_api.errors import InstallError

KNOWN = frozenset({"Fp8LinearMethod", "Fp8PerBlockOnlineLinearMethod", "MLAAttention", "UnquantizedFusedMoEMethod"})
"""Types of quantisation methods and attention modules whose processing was compared with that of a fresh engine."""

_ONCE = "_already_called_process_weights_after_loading"


@dataclass(frozen=True, slots=True)
class Filled:
    """A parameter as loaders see it: the memory they fill, and what makes it one."""

    tensor: torch.Tensor
    kind: type
    facts: dict[str, Any]

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> Filled:
        return cls(parameter.detach(), type(parameter), dict(vars(parameter)))

    def apart(self, device: torch.device) -> Filled:
        """With memory of its own."""
        tensor = torch.zeros_like(self.tensor, device=device) if self.tensor.is_meta else self.tensor.clone()
        return replace(self, tensor=tensor)

    def copy(self) -> Any:
        """Processing may write into what it gets."""
        made: Any = torch.nn.Parameter(self.tensor.clone(), requires_grad=False)
        made.__class__ = self.kind
        vars(made).update(self.facts)
        return made


def filled(model: torch.nn.Module) -> dict[str, dict[str, Filled]]:
    """All parameters, by module and attribute; taken before the engine processes them."""
    return {
        name: {own: Filled.of(parameter) for own, parameter in module._parameters.items() if parameter is not None} for name, module in model.named_modules()
    }


def known(module: torch.nn.Module) -> bool:
    return type(_processor(module)).__name__ in KNOWN


def _processor(module: torch.nn.Module) -> Any:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) and not isinstance(module, _attention()) else module


def _attention() -> type:
    from vllm.model_executor.layers.attention import MLAAttention

    found: type = MLAAttention
    return found


@dataclass(frozen=True, slots=True)
class Remade:
    """`spare`: by attribute, what receives the copies. `config` is the engine's: processing asks for it."""

    name: str
    module: Any
    spare: dict[str, Filled]
    config: Any

    @classmethod
    def of(cls, name: str, module: Any, before: dict[str, Filled], config: Any, device: torch.device) -> Remade:
        """`before`: the parameters that processing changed. One whose memory is in use, or that never had any, gets memory of its own."""
        used = {tensor.untyped_storage()._cdata for tensor in tensors(module).values()}
        taken = {own for own, one in before.items() if one.tensor.is_meta or one.tensor.untyped_storage()._cdata in used}
        return cls(name, module, {own: one.apart(device) if own in taken else one for own, one in before.items()}, config)

    @property
    def attends(self) -> bool:
        """Attention is made after the projections that it multiplies out."""
        return isinstance(self.module, _attention())

    def make(self) -> None:
        """Raises InstallError."""
        try:
            with torch.no_grad(), _surroundings(self.config), _restored(self.module):
                for own, one in self.spare.items():
                    self.module._parameters[own] = one.copy()
                self._process()
                made = tensors(self.module)
            with torch.no_grad():
                for own, tensor in tensors(self.module).items():
                    _replace(f"{self.name}.{own}", tensor, made.get(own))
        except InstallError:
            raise
        except Exception as error:
            message = f"{self.name}: the engine failed to process its new weights ({type(error).__name__}: {error}); restart the engine"
            raise InstallError(message, module=self.name) from error

    def _process(self) -> None:
        vars(self.module).pop(_ONCE, None)
        processor = _processor(self.module)
        if processor is self.module:
            processor.process_weights_after_loading(self.config.model_config.dtype)
            return
        if getattr(processor, "moe_kernel", None) is not None:
            processor.moe_kernel = None  # weights are packed where the kernel is made
        processor.process_weights_after_loading(self.module)


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain attributes."""
    own = {**module._parameters, **module._buffers, **vars(module)}
    return {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor) and not tensor.is_meta}


def _replace(name: str, live: torch.Tensor, made: torch.Tensor | None) -> None:
    if made is live:
        return
    if made is None or (made.shape, made.dtype) != (live.shape, live.dtype):
        seen = "nothing" if made is None else f"{made.dtype} {list(made.shape)}"
        raise InstallError(f"{name}: processing made {seen} this time, {live.dtype} {list(live.shape)} at the start; restart the engine", tensor=name)
    live.data.copy_(made)


@contextmanager
def _surroundings(config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        yield


@contextmanager
def _restored(module: torch.nn.Module) -> Iterator[None]:
    """Afterwards module and quantisation method have the attributes that they have now: kernels and captured graphs know these objects."""
    kept = [(vars(owner), dict(vars(owner))) for owner in {id(one): one for one in (module, _processor(module))}.values()]
    kept += [(held, dict(held)) for held in (module._parameters, module._buffers)]
    try:
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.update(before)

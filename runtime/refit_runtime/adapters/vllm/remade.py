"""Modules that the engine rearranges after loading (packed, quantised, multiplied out): after an install they are made again.

An install writes what loaders write; such a module computes with something else, made from that. What its loaders fill is kept beside it and receives
the copies: memory as large as those weights, and none for what the engine left in place. The engine's own processing then turns it into the tensors that
the module computes with, and their addresses stay.

Invariants: processing starts where module and quantisation method were before the engine processed them (`Pristine`), so that it does what it did then;
only what passed the start-up self-test is made again (`selftest`); what loaders fill survives, so that a version can be read back, gathered and
installed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from refit_api.errors import InstallError

Watch = Callable[[Iterable[torch.Tensor]], AbstractContextManager[Any]]
"""Given the copies that processing starts from: what is around it."""

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Filled:
    """A parameter as loaders see it: the memory they fill, and what makes it one."""

    tensor: torch.Tensor
    kind: type
    facts: dict[str, Any]

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> Filled:
        return cls(parameter.detach(), type(parameter), dict(vars(parameter)))

    def apart(self) -> Filled:
        """With memory of its own."""
        return replace(self, tensor=self.tensor.clone())

    def copy(self) -> Any:
        """Processing may write into what it gets."""
        made: Any = torch.nn.Parameter(self.tensor.clone(), requires_grad=False)
        made.__class__ = self.kind
        vars(made).update(self.facts)
        return made


def attends(module: torch.nn.Module) -> bool:
    """Attention processes itself, after the projections that it multiplies out."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(module, AttentionLayerBase) and callable(getattr(module, "process_weights_after_loading", None))


def processor(module: torch.nn.Module) -> Any:
    """Who processes its weights after loading: its quantisation method, an attention module itself, or nobody."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if attends(module):
        return module
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


Contents = list[tuple[dict[str, Any], dict[str, Any]]]
"""Dictionaries that hold attributes, and what they held."""


def contents(module: torch.nn.Module, processor: Any) -> Contents:
    owners = {id(one): vars(one) for one in (module, processor)}.values()
    inner = [held[part] for held in owners for part in ("_parameters", "_buffers", "_modules") if part in held]
    return [(held, dict(held)) for held in (*owners, *inner)]


@dataclass(frozen=True, slots=True)
class Pristine:
    """What processing filled, replaced or flagged, with what was there before. The rest is left alone: engines bind caches to modules later."""

    module: torch.nn.Module
    processor: Any
    changed: Contents

    @classmethod
    def since(cls, module: torch.nn.Module, processor: Any, before: Contents) -> Pristine:
        differences = [
            (held, {name: then.get(name, _ABSENT) for name in held.keys() | then.keys() if held.get(name, _ABSENT) is not then.get(name, _ABSENT)})
            for held, then in before
        ]
        return cls(module, processor, differences)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is as it was; afterwards as it is now: kernels and captured graphs know these objects."""
        now = contents(self.module, self.processor)
        for held, then in self.changed:
            for name, value in then.items():
                if value is _ABSENT:
                    held.pop(name, None)
                else:
                    held[name] = value
        try:
            yield
        finally:
            for held, then in now:
                held.clear()
                held.update(then)


@dataclass(frozen=True, slots=True)
class Remade:
    """`spare`: by attribute, what loaders fill. `config` is the engine's: processing asks for it."""

    name: str
    pristine: Pristine
    spare: dict[str, Filled]
    config: Any

    @property
    def module(self) -> Any:
        return self.pristine.module

    @property
    def attends(self) -> bool:
        return self.pristine.processor is self.module

    def make(self) -> None:
        """Raises InstallError."""
        with self.processed():
            made = tensors(self.module)
        for own, tensor in tensors(self.module).items():
            _replace(f"{self.name}.{own}", tensor, made.get(own))

    @contextmanager
    def processed(self, watch: Watch = nullcontext) -> Iterator[None]:
        """Inside, the module is what the engine's own processing makes of the spare memory. Raises InstallError."""
        with self.pristine.again():
            try:
                with torch.no_grad(), _surroundings(self.config):
                    for own, one in self.spare.items():
                        self.module._parameters[own] = one.copy()
                    with watch(self.module._parameters[own] for own in self.spare):
                        self.pristine.processor.process_weights_after_loading(self.config.model_config.dtype if self.attends else self.module)
            except Exception as error:
                message = f"{self.name}: the engine failed to process its new weights ({type(error).__name__}: {error}); restart the engine"
                raise InstallError(message, module=self.name) from error
            yield


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain attributes."""
    own = {**module._parameters, **module._buffers, **vars(module)}
    return {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor) and not tensor.is_meta}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: numbers that are none are equal too."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _replace(name: str, live: torch.Tensor, made: torch.Tensor | None) -> None:
    if made is live:
        return
    if made is None or (made.shape, made.dtype) != (live.shape, live.dtype):
        seen = "nothing" if made is None else f"{made.dtype} {list(made.shape)}"
        raise InstallError(f"{name}: processing made {seen} this time, {live.dtype} {list(live.shape)} at the start; restart the engine", tensor=name)
    with torch.no_grad():
        live.data.copy_(made)


@contextmanager
def _surroundings(config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        yield

"""Which checkpoint tensors the tensors of a Hugging Face model hold: transformers fuses some of them when it loads, such as the experts of a layer.

The library's own way back, which it saves models by, is run on tensors without memory. What comes out are views, and the strides of a view say which box of
which tensor it is. So nothing is known here of any model, and nothing guessed: what is no box, because the library computes it, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Box, Shape, whole
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class Part:
    """`box` of a module's tensor is the whole checkpoint tensor `name`; its dims are the tensor's `dims`, the others have extent 1."""

    name: str
    box: Box
    dims: tuple[int, ...]


def as_it_is(name: str, shape: Shape) -> Part:
    return Part(name, whole(shape), tuple(range(len(shape))))


def saved_as(model: torch.nn.Module, shapes: Mapping[str, Shape]) -> dict[str, tuple[Part, ...]]:
    """The parts of every tensor, by the module's own name."""
    if not _fuses(model):
        return {name: (as_it_is(name, shape),) for name, shape in shapes.items()}
    from transformers.core_model_loading import revert_weight_conversion

    given = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in given.items()}
    found: dict[str, list[Part]] = {name: [] for name in shapes}
    with _views_only():
        saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(given))
    for name, view in saved.items():
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is None:
            raise UnsupportedLayout(f"{name}: transformers computes it when it saves {type(model).__name__}: no part of the live tensors is it", tensor=name)
        found[owner].append(_part(name, view, given[owner]))
    return {name: tuple(parts) for name, parts in found.items()}


def _fuses(model: torch.nn.Module) -> bool:
    return any(each.__name__ == "PreTrainedModel" for each in type(model).__mro__) and find_spec("transformers.core_model_loading") is not None


@contextmanager
def _views_only() -> Iterator[None]:
    """The library makes its parts contiguous for the file; for us that would be copies, which say nothing."""

    class Views(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))

    with Views():
        yield


def _part(name: str, view: torch.Tensor, whole_tensor: torch.Tensor) -> Part:
    at, corner = view.storage_offset(), []
    for stride in whole_tensor.stride():
        corner.append(at // stride)
        at %= stride
    sides = [(lo, lo + 1) for lo in corner]
    free = list(range(len(corner)))
    dims = []
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        dim = next((dim for dim in free if whole_tensor.stride(dim) == stride and corner[dim] + extent <= whole_tensor.shape[dim]), None)
        if dim is None:
            raise UnsupportedLayout(f"{name}: no box of the live tensor that transformers saves it from, or one with its dims exchanged", tensor=name)
        sides[dim], free = (corner[dim], corner[dim] + extent), [other for other in free if other > dim]
        dims.append(dim)
    return Part(name, tuple(sides), tuple(dims))

"""Plain torch modules as source and target: their parameters and buffers are the checkpoint's tensors, or known parts and stacks of them.

For trainers whose ranks hold the whole model (also Hugging Face models, under DDP too) and for engines that are a module in a process.
Tensors are looked up again for every view. Modules that keep parts of tensors without saying which are refused, never taken for whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from refit_api.errors import ShapeMismatch, UnknownTensor, UnsupportedLayout
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec, box_shape, whole

from refit_runtime.adapters.hugging_face import Part, saved_as

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile and activation checkpointing: checkpoints leave these out
_ROOTS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
_OTHERS = {  # classes that hold parameters otherwise than by name and shape, and what to do about them
    "FullyShardedDataParallel": "shard it with fully_shard (FSDP2), whose parameters say what part they are",
    "MegatronModule": "bind a MegatronSource, which knows Megatron's layouts",
}


def dtype_of(name: str, tensor: torch.Tensor) -> Dtype:
    """Raises UnsupportedLayout for types that no checkpoint has."""
    try:
        return Dtype(str(tensor.dtype).removeprefix("torch."))
    except ValueError as error:
        raise UnsupportedLayout(f"{name}: dtype {tensor.dtype}; expected one of {', '.join(dtype.value for dtype in Dtype)}", tensor=name) from error


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module keeps a checkpoint tensor, or a part of what it keeps there."""

    owner: torch.nn.Module
    attribute: str
    part: Part

    @property
    def name(self) -> str:
        """The checkpoint's."""
        return self.part.name

    @property
    def shape(self) -> Shape:
        """Of the whole checkpoint tensor."""
        return tuple(self.part.box[dim][1] - self.part.box[dim][0] for dim in self.part.dims)

    def published(self, dtype: Dtype | None) -> Dtype:
        """What it is published in: `dtype`, which is for parameters, else its own."""
        return dtype if dtype is not None and self.attribute in self.owner._parameters else dtype_of(self.name, self.tensor())

    def tensor(self) -> torch.Tensor:
        """What is there now: frameworks put other memory in its place."""
        found = getattr(self.owner, self.attribute, None)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedLayout(f"{self.name}: the module does not have it any more; bind the model again", tensor=self.name)
        return found

    def held(self, local: Box) -> Box | None:
        """What of the checkpoint tensor lies in box `local` of the module's tensor."""
        inside = [(max(lo, a) - lo, min(hi, b) - lo) for (lo, hi), (a, b) in zip(self.part.box, local, strict=True)]
        return tuple(inside[dim] for dim in self.part.dims) if all(lo < hi for lo, hi in inside) else None

    def view(self, memory: torch.Tensor, local: Box) -> torch.Tensor:
        """`memory` is box `local` of the module's tensor; some of it is held."""
        held = self.held(local)
        assert held is not None, "asked of what is held"
        sides = zip(self.part.box, local, strict=True)
        return memory[tuple(slice(max(lo, a) - a, min(hi, b) - a) for (lo, hi), (a, b) in sides)].view(box_shape(held))


def places(module: torch.nn.Module) -> tuple[Place, ...]:
    """Every parameter and persistent buffer once, as checkpoints name them. Tied ones go by the name that Hugging Face models keep, else by the first."""
    while inner := next((_ROOTS[each.__name__] for each in type(module).__mro__ if each.__name__ in _ROOTS), None):
        module = module.get_submodule(inner)
    found: dict[int, tuple[str, torch.nn.Module, str]] = {}
    tied = getattr(module, "_tied_weights_keys", None) or ()
    for path, owner in module.named_modules():
        _refuse_other(path, owner)
        for attribute in _held(owner):
            name = ".".join(part for part in (*path.split("."), attribute) if part and part not in _WRAPPERS)
            known = found.get(id(getattr(owner, attribute)))
            if known is None or (known[0] in tied and name not in tied):
                found[id(getattr(owner, attribute))] = name, owner, attribute
    parts = saved_as(module, {name: tuple(getattr(owner, attribute).shape) for name, owner, attribute in found.values()})
    return tuple(Place(owner, attribute, part) for name, owner, attribute in found.values() for part in parts[name])


def _held(owner: torch.nn.Module) -> list[str]:
    """Masks and other buffers of types that checkpoints do not have are left out: an engine that needs one is told that it is unknown."""
    buffers = {name: tensor for name, tensor in owner._buffers.items() if tensor is not None and name not in owner._non_persistent_buffers_set}
    kept = [name for name, tensor in buffers.items() if tensor.numel() and str(tensor.dtype).removeprefix("torch.") in {dtype.value for dtype in Dtype}]
    return [name for name, tensor in owner._parameters.items() if tensor is not None and tensor.numel()] + kept


def _refuse_other(path: str, module: torch.nn.Module) -> None:
    for each in type(module).__mro__:
        if each.__name__ in _OTHERS:
            raise UnsupportedLayout(f"module {path or 'at the root'} is a {each.__name__}: {_OTHERS[each.__name__]}", module=path, seen=each.__name__)
    for name, parameter in module._parameters.items():
        if hasattr(parameter, "ds_tensor"):
            raise UnsupportedLayout(
                f"{path}.{name} is partitioned by DeepSpeed, which does not say what part is here: give its shards from your own weight source", module=path
            )


def plain_memory(name: str, tensor: torch.Tensor, expected: Shape) -> torch.Tensor:
    """Raises UnsupportedLayout or ShapeMismatch for what cannot be copied from, or is not what was bound."""
    found = tensor.detach()
    if type(found) is not torch.Tensor or found.layout is not torch.strided or found.device.type == "meta":
        what = "without memory" if found.device.type == "meta" else f"of type {type(found).__name__}, layout {found.layout}"
        raise UnsupportedLayout(f"{name}: a tensor {what}; expected plain memory on a device", tensor=name, seen=type(found).__name__)
    if tuple(found.shape) != expected:
        raise ShapeMismatch(f"{name}: shape {tuple(found.shape)}, expected {expected}", tensor=name, seen=tuple(found.shape), expected=expected)
    return found


class TorchSource:
    """`parts`: for a parameter that is a part of its tensor, (the tensor's shape, the box). `dtype`: what parameters are published in, if not their own."""

    def __init__(
        self,
        module: torch.nn.Module,
        rank: int = 0,
        replica: int = 0,
        parts: Mapping[str, tuple[Shape, Box]] | None = None,
        dtype: Dtype | None = None,
    ) -> None:
        self._places = places(module)
        unknown = sorted(set(parts or {}) - {place.name for place in self._places})
        if unknown:
            raise UnknownTensor(f"parts name tensors that the module does not have: {', '.join(unknown)}", seen=", ".join(unknown))
        shards = []
        self._shapes = [tuple(place.tensor().shape) for place in self._places]
        for index, place in enumerate(self._places):
            shape, box = (parts or {}).get(place.name, (place.shape, whole(place.shape)))
            if box_shape(box) != place.shape:
                raise ShapeMismatch(f"{place.name}: the part is {box_shape(box)}, the parameter {place.shape}", tensor=place.name, seen=place.shape)
            shards.append(Shard(TensorSpec(place.name, place.published(dtype), shape), box))
            self.view(index)
        self._shards = RankShards(rank, replica, tuple(shards))

    def shards(self) -> RankShards:
        return self._shards

    def view(self, index: int) -> torch.Tensor:
        place, shape = self._places[index], self._shapes[index]
        return place.view(plain_memory(place.name, place.tensor(), shape), whole(shape))


class TorchTarget:
    """`stacked`: parameters that are several tensors below each other, as (tensor, rows). `needs` takes from a tensor what its parameter holds."""

    def __init__(
        self,
        module: torch.nn.Module,
        coordinate: str = "tp0",
        stacked: Mapping[str, tuple[tuple[str, int], ...]] | None = None,
        parts: Mapping[str, tuple[Shape, Box]] | None = None,
    ) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
        needs: list[Need] = []
        for name, tensor in self._parameters.items():
            parameter = Parameter(name, dtype_of(name, tensor), tuple(tensor.shape))
            if stacked is not None and name in stacked:
                needs += _stack(parameter, stacked[name])
                continue
            shape, box = (parts or {}).get(name, (parameter.shape, whole(parameter.shape)))
            needs.append(Need(name, box, parameter, whole(parameter.shape), shape=shape))
        self._needs = CoordinateNeeds(coordinate, tuple(needs))

    def needs(self) -> CoordinateNeeds:
        return self._needs

    def view(self, parameter: str) -> torch.Tensor:
        return self._parameters[parameter]

    def remake(self) -> None:
        """Nothing is derived."""


def _stack(parameter: Parameter, tensors: tuple[tuple[str, int], ...]) -> list[Need]:
    needs, row = [], 0
    for tensor, rows in tensors:
        shape = (rows, *parameter.shape[1:])
        needs.append(Need(tensor, whole(shape), parameter, ((row, row + rows), *whole(parameter.shape[1:])), shape=shape))
        row += rows
    if row != parameter.shape[0]:
        raise ShapeMismatch(f"{parameter.name}: its tensors have {row} rows, the parameter {parameter.shape[0]}", seen=row, expected=parameter.shape[0])
    return needs

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

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile and activation checkpointing: checkpoints leave these out
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
    """Where a module keeps a tensor; `name` is the checkpoint's."""

    name: str
    owner: torch.nn.Module
    attribute: str

    @property
    def is_parameter(self) -> bool:
        return self.attribute in self.owner._parameters

    def tensor(self) -> torch.Tensor:
        """What is there now: frameworks put other memory in its place."""
        found = getattr(self.owner, self.attribute, None)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedLayout(f"{self.name}: the module does not have it any more; bind the model again", tensor=self.name)
        return found


def places(module: torch.nn.Module) -> tuple[Place, ...]:
    """Every parameter and persistent buffer once, as checkpoints name them. Tied ones go by the name that Hugging Face models keep, else by the first."""
    if any(each.__name__ == "DistributedDataParallel" for each in type(module).__mro__):
        module = module.get_submodule("module")
    found: dict[int, Place] = {}
    tied = getattr(module, "_tied_weights_keys", None) or ()
    for path, owner in module.named_modules():
        _refuse_other(path, owner)
        for attribute in _held(owner):
            place = Place(".".join(part for part in (*path.split("."), attribute) if part and part not in _WRAPPERS), owner, attribute)
            known = found.get(id(place.tensor()))
            if known is None or (known.name in tied and place.name not in tied):
                found[id(place.tensor())] = place
    return tuple(found.values())


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
        for place in self._places:
            tensor = place.tensor()
            shape, box = (parts or {}).get(place.name, (tuple(tensor.shape), whole(tuple(tensor.shape))))
            plain_memory(place.name, tensor, box_shape(box))
            published = dtype if dtype is not None and place.is_parameter else dtype_of(place.name, tensor)
            shards.append(Shard(TensorSpec(place.name, published, shape), box))
        self._shards = RankShards(rank, replica, tuple(shards))

    def shards(self) -> RankShards:
        return self._shards

    def view(self, index: int) -> torch.Tensor:
        return plain_memory(self._places[index].name, self._places[index].tensor(), box_shape(self._shards.shards[index].box))


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


def _stack(parameter: Parameter, tensors: tuple[tuple[str, int], ...]) -> list[Need]:
    needs, row = [], 0
    for tensor, rows in tensors:
        shape = (rows, *parameter.shape[1:])
        needs.append(Need(tensor, whole(shape), parameter, ((row, row + rows), *whole(parameter.shape[1:])), shape=shape))
        row += rows
    if row != parameter.shape[0]:
        raise ShapeMismatch(f"{parameter.name}: its tensors have {row} rows, the parameter {parameter.shape[0]}", seen=row, expected=parameter.shape[0])
    return needs

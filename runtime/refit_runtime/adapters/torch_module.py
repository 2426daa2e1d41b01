"""Plain torch modules as source and target: their parameters are the checkpoint's tensors, or known parts and stacks of them.

For trainers without a framework of their own (examples, tests) and for engines that are a module in a process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from refit_api.errors import ShapeMismatch, UnknownTensor, UnsupportedLayout
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec, box_shape, whole


def dtype_of(tensor: torch.Tensor) -> Dtype:
    """Raises UnsupportedLayout for types that no checkpoint has."""
    try:
        return Dtype(str(tensor.dtype).removeprefix("torch."))
    except ValueError as error:
        raise UnsupportedLayout(f"dtype {tensor.dtype} cannot be published: expected one of {', '.join(dtype.value for dtype in Dtype)}") from error


class TorchSource:
    """`parts`: for a parameter that is a part of its tensor, (the tensor's shape, the box). `dtype`: what is published, if not the parameters' own."""

    def __init__(
        self,
        module: torch.nn.Module,
        rank: int = 0,
        replica: int = 0,
        parts: Mapping[str, tuple[Shape, Box]] | None = None,
        dtype: Dtype | None = None,
    ) -> None:
        found = dict(module.named_parameters())
        unknown = sorted(set(parts or {}) - set(found))
        if unknown:
            raise UnknownTensor(f"parts name parameters that the module does not have: {', '.join(unknown)}", seen=", ".join(unknown))
        shards = []
        for name, parameter in found.items():
            shape, box = (parts or {}).get(name, (tuple(parameter.shape), whole(tuple(parameter.shape))))
            if box_shape(box) != tuple(parameter.shape):
                raise ShapeMismatch(f"{name}: the part is {box_shape(box)}, the parameter {tuple(parameter.shape)}", seen=tuple(parameter.shape))
            shards.append(Shard(TensorSpec(name, dtype if dtype is not None else dtype_of(parameter), shape), box))
        self._parameters = list(found.values())
        self._shards = RankShards(rank, replica, tuple(shards))

    def shards(self) -> RankShards:
        return self._shards

    def view(self, index: int) -> torch.Tensor:
        return self._parameters[index].detach()


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
            parameter = Parameter(name, dtype_of(tensor), tuple(tensor.shape))
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

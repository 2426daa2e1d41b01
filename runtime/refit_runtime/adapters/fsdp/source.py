"""A module with DTensor parameters as a `WeightSource`: facts from their placements, live memory from their local tensors at every `view`.

FSDP2 leaves the parameters of some modules gathered after a forward pass without a backward pass; what is published is the sharded memory, which the
optimizer updates, so modules that are not in their sharded state are put back into it. That frees the gathered copies and needs no communication.
"""

from __future__ import annotations

import torch
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Box, Dtype, RankShards, Shard, TensorSpec, box_shape, whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from refit_runtime.adapters.fsdp.placement import local_box, replicates
from refit_runtime.adapters.torch_module import Place, places, plain_memory


class FsdpSource:
    """`rank` counts all trainer ranks. `dtype`: what parameters are published in, if not their own."""

    def __init__(self, module: torch.nn.Module, rank: int, dtype: Dtype | None = None) -> None:
        self._wrapped = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self._reshard()
        self._held: list[tuple[Place, torch.Tensor, Box]] = []
        shards, found = [], places(module)
        for place in found:
            tensor = place.tensor()
            local = _box(place.name, tensor)
            box = place.held(local) if local is not None else None
            if local is not None and box is not None:
                shards.append(Shard(TensorSpec(place.name, place.published(dtype), place.shape), box))
                self._held.append((place, tensor, local))
                self._memory(len(self._held) - 1)
        replica = replica_of([tensor for tensor in (place.tensor() for place in found) if isinstance(tensor, DTensor)])
        self._facts = RankShards(rank, replica if replica is not None else rank, tuple(shards))

    def shards(self) -> RankShards:
        return self._facts

    def view(self, index: int) -> torch.Tensor:
        place, bound, _ = self._held[index]
        if not _laid_out_as(place.tensor(), bound):
            self._reshard()
        return self._memory(index)

    def _memory(self, index: int) -> torch.Tensor:
        place, bound, local = self._held[index]
        tensor = place.tensor()
        if not _laid_out_as(tensor, bound):
            raise UnsupportedLayout(f"{place.name}: laid out otherwise than when it was bound; bind the model again", tensor=place.name)
        with torch.no_grad():
            memory = plain_memory(place.name, tensor.to_local() if isinstance(tensor, DTensor) else tensor, box_shape(local))
        return place.view(memory, local)

    def _reshard(self) -> None:
        for module in self._wrapped:
            module.reshard()


def _box(name: str, tensor: torch.Tensor) -> Box | None:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return whole(shape)
    place = tensor.device_mesh.get_coordinate()
    return local_box(name, shape, tuple(tensor.device_mesh.shape), place, tensor.placements) if place is not None else None


def _laid_out_as(tensor: torch.Tensor, bound: torch.Tensor) -> bool:
    if not isinstance(bound, DTensor) or not isinstance(tensor, DTensor):
        return not isinstance(bound, DTensor) and not isinstance(tensor, DTensor)
    return tensor.placements == bound.placements and tensor.device_mesh == bound.device_mesh and tensor.shape == bound.shape


def replica_of(tensors: list[DTensor]) -> int | None:
    """This rank's place along the mesh dims that cut none of the tensors: what is on other places there is a replica. None without tensors."""
    cut: dict[tuple[int, ...], bool] = {}
    at: dict[tuple[int, ...], int] = {}
    for tensor in tensors:
        place = tensor.device_mesh.get_coordinate()
        for dim, placement in enumerate(tensor.placements if place is not None else ()):
            ranks = _along(tensor.device_mesh, dim)
            cut[ranks] = cut.get(ranks, False) or not replicates(placement)
            at[ranks] = place[dim] if place is not None else 0
    replica = 0
    for ranks, some in cut.items():
        if not some:
            replica = replica * len(ranks) + at[ranks]
    return replica if tensors else None


def _along(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    """The ranks of one mesh dim that this rank is among: meshes that are parts of one mesh share them."""
    place = mesh.get_coordinate()
    assert place is not None, "asked of meshes that this rank is in"
    line = tuple(slice(None) if each == dim else at for each, at in enumerate(place))
    return tuple(mesh.mesh[line].tolist())

"""The three clients over the real world: NIXL, the group's catalog, manifests on the pod's address. Adapters are chosen here and nowhere else.

The transport's agent is made when a client is made, so a client is made before the process group of its process (O1).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from refit_api.errors import UnsupportedLayout

from refit_runtime import control, generator, last_words, trainer
from refit_runtime.adapters.catalog import GrpcCatalog
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.digest import Digests
from refit_runtime.ports import Copies, Memory, Seams, WeightSource
from refit_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    import torch


def catalog_of(settings: RuntimeSettings) -> GrpcCatalog:
    return GrpcCatalog(settings.catalog, settings.ca_file, settings.token_file)


def seams_of(settings: RuntimeSettings, local_rank: int) -> Seams:
    """`local_rank`: of this process among those of the pod; each serves its manifests on a port of its own."""
    from refit_runtime.adapters.manifests import GrpcManifests
    from refit_runtime.adapters.nixl import NixlTransport

    return Seams(
        catalog=catalog_of(settings),
        transport=NixlTransport(settings.transport, settings.ucx),
        manifests=GrpcManifests(settings.pod.ip, settings.worker_port + local_rank),
        memory=DeviceMemory(),
        clock=SystemClock(),
        random=Random(),
    )


class DeviceMemory:
    """Each call goes to the memory that its tensors are in; a device's code is loaded with the first tensor that is there."""

    def __init__(self) -> None:
        self._made: dict[str, Memory] = {}

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        return self._of(device).allocate(size, device)

    def copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copies:
        return self._of(pairs[0][0].device if pairs else None).copies(pairs)

    def digests(self, data: torch.Tensor, digests: Digests) -> bytes:
        return self._of(data.device).digests(data, digests)

    def _of(self, device: torch.device | None) -> Memory:
        kind = device.type if device is not None else "cpu"
        if kind not in self._made:
            self._made[kind] = _memory_of(kind)
        return self._made[kind]


def _memory_of(kind: str) -> Memory:
    if kind == "cpu":
        from refit_runtime.adapters.host_memory import HostMemory

        return HostMemory()
    if kind == "cuda":
        from refit_runtime.adapters.cuda_memory import CudaMemory

        return CudaMemory()
    raise UnsupportedLayout(f"weights on a device of kind {kind}: expected host memory or CUDA", seen=kind, expected="cpu, cuda")


def source_of(model: WeightSource | torch.nn.Module, rank: int) -> WeightSource:
    """What a module's tensors are says who knows them."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return model
    if {"DTensor", "FSDPModule"} & {kind.__name__ for each in (*model.parameters(), *model.modules()) for kind in type(each).__mro__}:
        from refit_runtime.adapters.fsdp.source import FsdpSource

        return FsdpSource(model, rank)
    from refit_runtime.adapters.torch_module import TorchSource

    return TorchSource(model, rank, replica=rank)


class TrainerClient(trainer.TrainerClient):
    """One trainer rank. `run_id` is read from `REFIT_RUN_ID` or torchrun if it is not given."""

    @last_words.fatal()
    def __init__(self, settings: RuntimeSettings, rank: int, world: int, *, run_id: str | None = None) -> None:
        super().__init__(settings, rank, world, seams_of(settings, settings.run.local_rank), run_id)

    def bind(self, source: WeightSource | torch.nn.Module) -> None:
        """A weight source, or a module: one that `fully_shard` or DTensors cut over ranks, or one that every rank holds whole."""
        super().bind(source_of(source, self._rank))


class GeneratorClient(generator.GeneratorClient):
    """One engine rank that a framework drives."""

    def __init__(self, settings: RuntimeSettings, coordinate: str, *, rank: int = 0, world: int = 1, instance: str = "0") -> None:
        super().__init__(settings, coordinate, seams_of(settings, rank), rank, world, instance)


class ControlClient(control.ControlClient):
    """An orchestrator's view of one group."""

    def __init__(self, settings: RuntimeSettings) -> None:
        super().__init__(settings, catalog_of(settings), SystemClock())

"""One rank of a data-parallel trainer with Megatron's own wrappers and distributed optimizer, and what its source offers after a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from refit_api.errors import UnsupportedLayout
from refit_runtime.adapters.megatron.mesh import Mesh
from refit_runtime.adapters.megatron.source import MegatronSource
from torch.overrides import TorchFunctionMode

from e2e.workloads.megatron_cpu import cpu, parallel_state
from tests.adapters.megatron.reference import World, build

RANKS = 2


class OnCpu(TorchFunctionMode):
    """Megatron's optimizers name CUDA where they mean the current device, and know tensors by the name of their CUDA type."""

    def __torch_function__(self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        changed = {name: "cpu" if name == "device" and str(value).startswith("cuda") else value for name, value in (kwargs or {}).items()}
        found = func(*args, **changed)
        return found.replace("torch.", "torch.cuda.", 1) if func is torch.Tensor.type and isinstance(found, str) else found


def rank_of_two(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        with cpu(), OnCpu():
            parallel_state.initialize_model_parallel()
            torch.save({overlap: trained(rank, overlap) for overlap in (False, True)}, Path(folder) / f"{rank}.pt")
            parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


def trained(rank: int, overlap: bool) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = World(RANKS).config(num_query_groups=2)
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=overlap, overlap_grad_reduce=overlap)
    chunk = DistributedDataParallel(config, buffers, Float16Module(config, build(World(RANKS), config, tied=False)[0]))
    options = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True, overlap_param_gather=overlap)
    optimizer = get_megatron_optimizer(options, [chunk])
    source = MegatronSource([chunk], Mesh.of(parallel_state, rank), "llama", 100)
    before = offered(source)
    optimizer.zero_grad()
    torch.manual_seed(rank)
    for parameter in chunk.parameters():
        parameter.main_grad.normal_()
    for bucket in chunk.bucket_groups:
        if overlap:
            bucket.start_grad_sync()
        bucket.finish_grad_sync()
    assert optimizer.step()[0]
    refusal = ""
    if overlap:
        try:
            source.view(0)
        except UnsupportedLayout as error:
            refusal = error.message
        chunk.start_param_sync(force_sync=True)
    weights = {name: parameter.data.clone() for name, parameter in chunk.named_parameters()}
    return {"before": before, "after": offered(source), "refusal": refusal, "weights": weights, "masters": masters(optimizer.chained_optimizers[0], chunk)}


def offered(source: MegatronSource) -> dict[str, torch.Tensor]:
    return {shard.tensor.name: source.view(index).clone() for index, shard in enumerate(source.shards().shards)}


def masters(optimizer: Any, chunk: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """This rank's parts of the float32 masters, with their places in them, by the parameter's name."""
    names = {parameter: name for name, parameter in chunk.named_parameters()}
    found = {}
    for models, parts in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
        for model, part in zip(models, parts, strict=True):
            found[names[model]] = (optimizer._get_model_param_range_map(model)["param"].start, part.data.clone())
    return found

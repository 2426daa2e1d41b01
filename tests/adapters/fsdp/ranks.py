"""Eight ranks over gloo that shard small models in every way of the table, and write down what their weight sources say and hold.

    python ranks.py FOLDER        leaves FOLDER/<case>.<rank>.pt: the facts, the bytes of every view, or the refusal; and what is true of the whole model

Ranks are forked after everything is imported: starting eight interpreters costs minutes of CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by the first fully_shard
import torch.distributed as dist
from refit_api.errors import RefitError
from refit_runtime.adapters.fsdp.source import FsdpSource
from refit_runtime.wiring import source_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.adapters.fsdp.fused import saved, tiny_moe
from tests.adapters.fsdp.models import Tiny, gathered, truth

WORLD = 8


@cache
def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def wrapped(model: Tiny, over: DeviceMesh, **options: Any) -> Tiny:
    """As trainers do it: each block by itself, the rest at the root."""
    for block in model.blocks:
        fully_shard(block, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def cut_for_tp(model: Tiny, over: DeviceMesh) -> Tiny:
    for block in model.blocks:
        parallelize_module(block, over, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fsdp() -> Tiny:
    return wrapped(Tiny(), mesh(8))


def fsdp_bf16() -> Tiny:
    return wrapped(Tiny().bfloat16(), mesh(8))


def columns() -> Tiny:
    return wrapped(Tiny(), mesh(8), shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 8 == 0 else None)


def hsdp() -> Tiny:
    return wrapped(Tiny(), mesh(2, 4, names=("replicate", "shard")))


def tensor_parallel_uneven() -> Tiny:
    return cut_for_tp(Tiny(), mesh(8))


def fsdp_over_tp() -> Tiny:
    both = mesh(4, 2, names=("dp", "tp"))
    return wrapped(cut_for_tp(Tiny(), both["tp"]), both["dp"])


def hsdp_over_tp() -> Tiny:
    every = mesh(2, 2, 2, names=("replicate", "shard", "tp"))
    return wrapped(cut_for_tp(Tiny(), every["tp"]), every["replicate", "shard"])


def one_dim_cut_twice() -> Tiny:
    model, both = Tiny(), mesh(2, 4)
    for name, parameter in list(model.named_parameters()):
        path, _, attribute = name.rpartition(".")
        cut = torch.nn.Parameter(distribute_tensor(parameter.detach(), both, [Shard(0), Shard(0)]))
        model.get_submodule(path).register_parameter(attribute, cut)
    model.embed.weight = model.head.weight
    return model


def ignored() -> Tiny:
    model = Tiny()
    return fully_shard(model, mesh=mesh(8), ignored_params={model.norm.weight})


def without_backward() -> Tiny:
    """FSDP leaves the root gathered."""
    model = fsdp()
    with torch.no_grad():
        model(torch.arange(4))
    assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def fused_experts() -> torch.nn.Module:
    """A Hugging Face model: the experts of a layer are two parameters, of which each rank has some experts."""
    model = tiny_moe()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh(8))
    return fully_shard(model, mesh=mesh(8))


def partial() -> Tiny:
    model = Tiny()
    model.norm.weight = torch.nn.Parameter(DTensor.from_local(model.norm.weight.detach(), mesh(8), [Partial()]))
    return model


def fsdp_over_uneven_tp() -> Tiny:
    both = mesh(2, 4, names=("dp", "tp"))
    return wrapped(cut_for_tp(Tiny(), both["tp"]), both["dp"])


def replicated() -> Tiny:
    model = Tiny()
    model.norm.weight = torch.nn.Parameter(distribute_tensor(model.norm.weight.detach(), mesh(8), [Replicate()]))
    return model


CASES: dict[str, Callable[[], torch.nn.Module]] = {
    made.__name__: made
    for made in (
        fsdp, fsdp_bf16, columns, hsdp, tensor_parallel_uneven, fsdp_over_tp, hsdp_over_tp, one_dim_cut_twice, ignored, without_backward,
        partial, fused_experts, fsdp_over_uneven_tp, replicated,
    )
}  # fmt: skip


def said(source: FsdpSource) -> dict[str, Any]:
    facts = source.shards()
    return {"facts": facts, "views": [source.view(index).clone() for index in range(len(facts.shards))]}


def taken(model: torch.nn.Module, rank: int) -> dict[str, Any]:
    try:
        source = source_of(model, rank)
        assert isinstance(source, FsdpSource)
        return said(source)
    except RefitError as error:
        return {"refused": f"{type(error).__name__}: {error.message}"}


def trained(rank: int) -> dict[str, Any]:
    """Bound once; taken after steps of training, and after a forward pass that leaves the root gathered: of the step before, when it looks again."""
    model = fsdp()
    source = FsdpSource(model, rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        model(torch.arange(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.arange(4))
    found = said(source)
    model.reshard()  # a rank that holds no part of the root had no reason to
    return found | {"whole": gathered(model)}


def laid_out_again(rank: int) -> dict[str, Any]:
    """A layout other than the one that was bound is refused."""
    model = replicated()
    source = FsdpSource(model, rank)
    model.norm.weight = torch.nn.Parameter(distribute_tensor(torch.ones(5), mesh(8), [Shard(0)]))
    try:
        return said(source)
    except RefitError as error:
        return {"refused": f"{type(error).__name__}: {error.message}"}


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=300))
    found = {name: taken(make(), rank) for name, make in CASES.items()}
    found |= {"trained": trained(rank), "laid_out_again": laid_out_again(rank)}
    whole = {"fsdp_bf16": truth(Tiny().bfloat16()), "fused_experts": saved(tiny_moe())}
    for name, each in found.items():
        torch.save({"whole": whole.get(name, truth(Tiny()))} | each, folder / f"{name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    tiny_moe()  # its classes are loaded with the first
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            run(rank, folder)
            return 0
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

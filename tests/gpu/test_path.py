"""The whole path with weights on a CUDA device: what is installed is what was published, in graphs that were captured before, without an allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refit_api.errors import DigestMismatch
from refit_api.mounted import Engine, Trainer
from refit_api.tensors import Dtype
from refit_api.wire import RankPhase, Role
from refit_runtime.adapters.memory import Fault

from tests.runtime.steps import half, perturb, publish_all, refit

pytestmark = pytest.mark.gpu


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a.to(b.dtype), b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast at the snapshot"])
def test_versions_go_through_a_captured_graph(world: Any, net: Any, orders: Any, dtype: torch.dtype) -> None:
    """An engine's CUDA graphs read the live parameters at their old addresses; relays serve from device memory too."""
    source, target, second = net(1), net(2).to(dtype), net(3).to(dtype)
    wire = Dtype(str(dtype).removeprefix("torch."))
    trainer, rank, other = world.trainer(source, dtype=wire), world.rank(target), world.rank(second, "generator-1")
    tokens = torch.randint(0, 700, (16,), device="cuda")
    with torch.no_grad():
        target.layer(target.embed[tokens])  # libraries initialise outside of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = target.layer(target.embed[tokens] * target.norm)
    for step in range(3):
        perturb(source)
        number = trainer.publish(step).number
        refit(rank, orders, number)
        assert same(source, target)
        graph.replay()
        published = [parameter.to(dtype) for parameter in (source.embed, source.norm, source.layer.weight, source.layer.bias)]
        torch.testing.assert_close(answer, torch.nn.functional.linear(published[0][tokens] * published[1], published[2], published[3]))
        world.report(rank)
        assert refit(other, orders, number, (world.source(rank),)).read_from(Role.TRAINER) == 0
        assert same(source, second)
    assert trainer.arena.whole.is_cuda
    assert rank._stager.arena.whole.is_cuda


def test_window_by_window_through_a_ring_on_the_device(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target, engine=Engine(kind="Custom", staging="Windowed"))
    for step in range(3):
        perturb(source)
        report = refit(rank, orders, trainer.publish(step).number)
        assert report.phase is RankPhase.SERVING
        assert same(source, target)
    assert rank._stager.arena.whole.is_cuda
    assert rank.counters()["allocations"] == 1


def test_a_warm_round_allocates_nothing(world: Any, net: Any, orders: Any) -> None:
    """Copies allocate nothing at all; a whole round takes no memory from the device."""
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target)
    for step in range(2):
        refit(rank, orders, trainer.publish(step).number)
    snapshot, copies = next(iter(trainer._snapshots.values())), rank.live._copy_list(rank.live.served)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0]
    snapshot.take()
    copies.install()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    segments = torch.cuda.memory_stats()["segment.all.allocated"]
    for step in range(2, 5):
        perturb(source)
        refit(rank, orders, trainer.publish(step).number)
    assert same(source, target)
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
    assert torch.cuda.mem_get_info()[0] == free


def test_wrong_bytes_are_never_installed(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target)
    world.faults["trainer-0"] = Fault(corrupt=1000)
    old = [parameter.clone() for parameter in target.parameters()]
    rank.start(orders.stage(trainer.publish(0).number))
    rank.wait()
    report = rank.report()
    assert report.error is not None
    assert report.error.type == DigestMismatch.__name__
    assert all(torch.equal(a, b) for a, b in zip(old, target.parameters(), strict=True))


def test_damage_in_live_parameters_is_found_and_can_be_installed_over(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target)
    number = trainer.publish(0).number
    refit(rank, orders, number)
    target.layer.weight.data[1799, 511] += 1
    with pytest.raises(DigestMismatch) as caught:
        rank.live.check(rank.live.served, lambda: False)
    assert caught.value.facts["tensor"] == "layer.weight"
    rank._rest()
    assert rank.report().phase is RankPhase.FENCED
    rank.install(orders.commit(number))
    assert same(source, target)


def test_the_served_version_is_gathered_back(world: Any, net: Any, orders: Any) -> None:
    """After an abort the rank is a holder again, from its live parameters alone."""
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target)
    first = trainer.publish(0).number
    refit(rank, orders, first)
    perturb(source)
    rank.start(orders.stage(trainer.publish(1).number))
    rank.wait()
    reads = rank._seams.transport.counters()["reads"]
    rank.discard()
    rank.wait()
    assert rank.held() == (first,)
    second = net(3)
    world.report(rank)
    refit(world.rank(second, "generator-1"), orders, first, (world.source(rank),))
    assert same(target, second)
    assert rank._seams.transport.counters()["reads"] == reads


def test_a_snapshot_on_the_host(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source, options=Trainer(snapshot="Host", redundancy=1)), world.rank(target)
    assert not trainer.arena.whole.is_cuda
    refit(rank, orders, trainer.publish(0).number)
    assert same(source, target)


def test_live_weights_are_read_where_they_are(world: Any, net: Any, orders: Any) -> None:
    """Rows of columns: no arena on the trainers, strided reads of what the training's own allocator gave."""
    target, parts = net(2), [half(net(1), place) for place in range(2)]
    options = Trainer(snapshot="InPlace", redundancy=1)
    trainers = [world.trainer(module, place, 2, parts=where, options=options) for place, (module, where) in enumerate(parts)]
    rank = world.rank(target)
    for step in range(2):
        number = publish_all(trainers, step)
        refit(rank, orders, number)
        assert torch.equal(target.layer.weight, torch.cat([module.layer.weight for module, _ in parts], 1))
        assert torch.equal(target.embed, torch.cat([module.embed for module, _ in parts]))
        for trainer, (module, _) in zip(trainers, parts, strict=True):
            trainer.release(number, 10)
            perturb(module)
    assert all(trainer.counters()["allocations"] == 0 for trainer in trainers)


def test_an_arena_that_is_gone_gives_its_memory_back(world: Any) -> None:
    from refit_runtime.adapters.cuda_memory import CudaMemory

    memory, size = CudaMemory(), 1 << 30
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    arena = memory.allocate(size, torch.device("cuda", 0))
    part = arena[size // 2 :]
    assert before - torch.cuda.mem_get_info()[0] >= size
    assert torch.cuda.memory_allocated() < size, "it is not the caching allocator's"
    del arena
    part.fill_(1)
    del part
    assert torch.cuda.mem_get_info()[0] == before

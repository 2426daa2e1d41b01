"""The whole path in one process: publish, plan, pull, verify, install, relay; what is installed is what was published, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refit_api.mounted import Engine, Trainer
from refit_api.tensors import Dtype
from refit_api.wire import ListShards, RankPhase, Role, VersionPhase
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.memory import Fault
from refit_runtime.adapters.torch_module import TorchTarget
from refit_runtime.control import ControlClient

from tests.runtime.steps import half, perturb, publish_all, refit, same


def test_first_refit(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer = world.trainer(source)
    rank = world.rank(target)
    version = trainer.publish(0)
    assert world.version(version.number).phase is VersionPhase.READY
    rank.start(orders.stage(version.number))
    rank.wait()
    assert rank.report().phase is RankPhase.STAGED, rank.report()
    assert not same(source, target)
    rank.prepare(orders.commit(version.number))
    report = rank.install(orders.commit(version.number))
    assert (report.phase, report.serving, report.error) == (RankPhase.SERVING, version.number, None)
    assert same(source, target)
    assert report.serving_root == world.version(version.number).root
    assert report.read_from(Role.TRAINER) == sum(p.numel() * 4 for p in source.parameters())


def counts(*owners: Any) -> list[dict[str, int]]:
    """What a warm round must not change."""
    return [{name: owner.counters()[name] for name in ("plans", "allocations", "registrations", "connections")} for owner in owners]


def test_a_warm_round_plans_allocates_registers_and_connects_nothing(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target)
    refit(rank, orders, trainer.publish(0).number)
    before = counts(trainer, rank)
    for step in range(1, 6):
        perturb(source)
        number = trainer.publish(step).number
        refit(rank, orders, number)
        assert same(source, target)
    assert counts(trainer, rank) == before
    assert number == 6


@pytest.mark.parametrize("dtype", [None, Dtype.BFLOAT16], ids=["as it is", "cast at the snapshot"])
def test_tensor_parallel_replicas_to_two_coordinates(world: Any, net: Any, orders: Any, dtype: Dtype | None) -> None:
    """Two replicas of TP2 publish, TP2 ranks of one engine and one whole engine install: every owner gives its part."""
    whole = net(3)
    wire = torch.float32 if dtype is None else torch.bfloat16
    trainers = []
    for rank in range(4):
        module, parts = half(whole, rank % 2)
        trainers.append(world.trainer(module, rank, 4, replica=rank // 2, parts=parts, dtype=dtype, options=Trainer(redundancy=2)))
    one = net(4).to(wire)
    halves = [half(net(5).to(wire), place) for place in (0, 1)]
    ranks = [world.rank(one, "whole")]
    for place, (module, parts) in enumerate(halves):
        target = TorchTarget(module, f"tp{place}", parts=parts)
        ranks.append(world.rank(module, "pair", coordinate=f"tp{place}", rank=place, world=2, target=target))
    number = publish_all(trainers, 0)
    for rank in ranks:
        refit(rank, orders, number)
    assert same(whole.to(wire), one)
    for place, (module, _) in enumerate(halves):
        assert same(half(whole.to(wire), place)[0], module)
    assert ranks[0].report().serving_root == ranks[1].report().serving_root == world.version(number).root


def test_the_next_generator_reads_from_a_relay_only(world: Any, net: Any, orders: Any) -> None:
    """A join costs the trainers nothing."""
    source, first, second = net(1), net(2), net(3)
    trainer, one, two = world.trainer(source), world.rank(first, "g-1"), world.rank(second, "g-2")
    number = trainer.publish(0).number
    refit(one, orders, number)
    world.report(one)
    report = refit(two, orders, number, (world.source(one),))
    assert same(source, second)
    assert report.read_from(Role.TRAINER) == 0
    assert report.read_from(Role.GENERATOR) == sum(p.numel() * 4 for p in source.parameters())


def test_a_relay_is_read_while_it_stages(world: Any, net: Any, orders: Any) -> None:
    """The child follows chunk by chunk: it starts before its parent is done, and gets verified bytes only."""
    source, first, second = net(1), net(2), net(3)
    trainer, one, two = world.trainer(source), world.rank(first, "g-1"), world.rank(second, "g-2")
    world.faults["trainer-0"] = Fault(delay=1.5)
    number = trainer.publish(0).number
    one.start(orders.stage(number))
    while one.report().staging != number or not one.report().plan_key:
        pass
    world.report(one)
    two.start(orders.stage(number, (world.source(one),)))
    assert one.report().phase is RankPhase.STAGING
    one.wait()
    two.wait()
    assert two.report().phase is RankPhase.STAGED, two.report()
    assert two.report().read_from(Role.TRAINER) == 0
    two.prepare(orders.commit(number))
    two.install(orders.commit(number))
    assert same(source, second)


def test_with_two_arenas_the_version_before_is_put_back_without_a_pull(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target, engine=Engine(kind="Custom", keep_previous=True))
    first = trainer.publish(0).number
    refit(rank, orders, first)
    old = [parameter.clone() for parameter in source.parameters()]
    perturb(source)
    second = trainer.publish(1).number
    refit(rank, orders, second)
    assert same(source, target)
    assert rank.held() == (first, second)
    said = rank.report()
    assert (said.serving, said.arena, said.kept) == (second, second, first)
    reads = rank._seams.transport.counters()["reads"]
    report = rank.install(orders.commit(first))
    assert report.serving == first
    assert all(torch.equal(a, b) for a, b in zip(old, target.parameters(), strict=True))
    assert rank._seams.transport.counters()["reads"] == reads


def test_stacked_parameters(world: Any, net: Any, orders: Any) -> None:
    """An engine that fuses what the checkpoint keeps apart."""
    source = torch.nn.Module()
    for name, rows in {"q": 64, "k": 16, "v": 16}.items():
        source.register_parameter(name, torch.nn.Parameter(torch.randn(rows, 32)))
    target = torch.nn.Module()
    target.register_parameter("qkv", torch.nn.Parameter(torch.zeros(96, 32)))
    trainer = world.trainer(source)
    rank = world.rank(target, target=TorchTarget(target, stacked={"qkv": (("q", 64), ("k", 16), ("v", 16))}))
    refit(rank, orders, trainer.publish(0).number)
    assert torch.equal(target.qkv, torch.cat([source.q, source.k, source.v]))


def test_a_moved_parameter_is_published_from_where_it_is_now(world: Any, net: Any, orders: Any) -> None:
    source, target = net(1), net(2)
    trainer, rank = world.trainer(source), world.rank(target)
    refit(rank, orders, trainer.publish(0).number)
    source.norm.data = torch.full((512,), 7.0)  # a framework that swaps storage
    trainer._source._parameters = list(source.parameters())
    refit(rank, orders, trainer.publish(1).number)
    assert same(source, target)


@pytest.mark.parametrize("terms", [{"arenas": 2}], ids=["arenas: 2"])
def test_a_trainer_with_two_arenas_offers_two_versions(world: Any, net: Any, orders: Any, terms: Any) -> None:
    source, one, two = net(1), net(2), net(3)
    trainer = world.trainer(source, options=Trainer(arenas=2, redundancy=1))
    ranks = [world.rank(one, "g-1"), world.rank(two, "g-2")]
    first = trainer.publish(0).number
    old = [parameter.clone() for parameter in source.parameters()]
    world.version(first)
    perturb(source)
    second = trainer.publish(1).number
    world.version(second)
    refit(ranks[0], orders, first)
    refit(ranks[1], orders, second)
    assert all(torch.equal(a, b) for a, b in zip(old, one.parameters(), strict=True))
    assert same(source, two)


def test_an_orchestrator_sees_a_version_from_its_creation_to_its_end(world: Any, net: Any, orders: Any) -> None:
    trainer, rank = world.trainer(net(1)), world.rank(net(2))
    control = ControlClient(trainer._settings, trainer._seams.catalog, SystemClock())
    number = trainer.publish(4).number
    assert control.create("run-1", 4, 10).number == number
    assert control.wait_ready(number, 10).phase is VersionPhase.READY
    refit(rank, orders, number)
    world.report(rank)
    facts = control.wait_converged(number, 10)
    assert (facts.generators, facts.serving) == (1, 1)
    assert next(control.watch()).number == number
    assert [version.number for version in control.list()] == [number]


def test_a_rank_without_relay_offers_nothing(world: Any, net: Any, orders: Any) -> None:
    """`relay: false` saves the serving of others, not the arena."""
    trainer = world.trainer(net(1))
    rank = world.rank(net(2), engine=Engine(kind="Custom", relay=False))
    number = trainer.publish(0).number
    refit(rank, orders, number)
    world.report(rank)
    ask = ListShards(world.catalog.group, number, (), "", "tp0")
    assert [source.worker.role for source in trainer._seams.catalog.list_shards(ask).sources] == [Role.TRAINER]
    assert rank.worker._request.endpoint is None

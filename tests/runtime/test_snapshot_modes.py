"""Where a published version lives: in an arena, after which training goes on, or in the live weights themselves, until it is released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import DigestMismatch, DtypeMismatch, RefitError, UnsupportedLayout
from refit_api.mounted import Trainer, TransportSettings
from refit_api.tensors import Dtype
from refit_api.wire import VersionPhase
from refit_runtime.adapters.nixl import NixlTransport
from refit_runtime.adapters.torch_module import TorchSource, TorchTarget
from refit_runtime.ports import Seams

from tests.runtime.steps import half, perturb, publish_all, refit, same

MIB = 1 << 20


def over_nixl(seams: Seams) -> Seams:
    return replace(seams, transport=NixlTransport(TransportSettings(chunk_bytes=MIB), {}))


def as_it_is(seams: Seams) -> Seams:
    return seams


WIRES = {"memory": as_it_is, "nixl": over_nixl}


@pytest.fixture(params=WIRES.values(), ids=WIRES.keys())
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("snapshot", ["Device", "Host"])
def test_training_goes_on_after_a_copy(world: Any, net: Any, orders: Any, wire: Any, snapshot: Any) -> None:
    source, target = net(1), net(2)
    trainer = world.trainer(source, options=Trainer(snapshot=snapshot, redundancy=1), wrap=wire)
    rank = world.rank(target, wrap=wire)
    published = net(1)
    number = trainer.publish(0).number
    perturb(source)
    refit(rank, orders, number)
    assert same(published, target)


def test_live_weights_are_read_where_they_are_until_the_version_is_released(world: Any, net: Any, orders: Any, wire: Any) -> None:
    """Two tensor-parallel ranks with rows and columns of a model, to a whole engine and to one of two ranks: rows of columns, and of their halves."""
    whole, one = net(3), net(4)
    parts = [half(whole, rank) for rank in range(2)]
    options = Trainer(snapshot="InPlace", redundancy=1)
    trainers = [world.trainer(module, rank, 2, parts=where, options=options, wrap=wire) for rank, (module, where) in enumerate(parts)]
    ranks = [world.rank(one, "whole", wrap=wire)]
    halves = [half(net(5), place) for place in (0, 1)]
    for place, (module, where) in enumerate(halves):
        target = TorchTarget(module, f"tp{place}", parts=where)
        ranks.append(world.rank(module, "pair", coordinate=f"tp{place}", rank=place, world=2, target=target, wrap=wire))
    before = []
    for step in range(3):
        number = publish_all(trainers, step)
        for rank in ranks:
            refit(rank, orders, number)
        live = [module for module, _ in parts]
        assert torch.equal(one.layer.weight, torch.cat([module.layer.weight for module in live], 1))
        assert torch.equal(one.embed, torch.cat([module.embed for module in live]))
        for place in (0, 1):
            assert same(live[place], halves[place][0])
        for trainer in trainers:
            trainer.release(number, 10)
        for module in live:
            perturb(module)
        before.append([{name: each.counters()[name] for name in ("plans", "allocations", "registrations", "connections")} for each in (*trainers, *ranks)])
    assert before[1] == before[2], "a warm round plans, allocates, registers and connects nothing"
    assert all(trainer.counters()["allocations"] == 0 for trainer in trainers), "no arena"


def test_a_trainer_that_goes_on_before_the_release_is_found_out(world: Any, net: Any, orders: Any, wire: Any) -> None:
    """Readers get bytes that are not those that were published, and install nothing."""
    source, target = net(1), net(2)
    trainer = world.trainer(source, options=Trainer(snapshot="InPlace", redundancy=1), wrap=wire)
    rank = world.rank(target, wrap=wire)
    number = trainer.publish(0).number
    assert world.version(number).phase is VersionPhase.READY
    perturb(source)
    rank.start(orders.stage(number))
    rank.wait()
    assert rank.report().error.type == DigestMismatch.__name__
    assert same(net(2), target)


def test_live_weights_that_moved_are_registered_again(world: Any, net: Any, orders: Any, wire: Any) -> None:
    source, target = net(1), net(2)
    trainer = world.trainer(source, options=Trainer(snapshot="InPlace", redundancy=1), wrap=wire)
    rank = world.rank(target, wrap=wire)
    refit(rank, orders, trainer.publish(0).number)
    source.norm.data = torch.full((512,), 7.0)
    refit(rank, orders, trainer.publish(1).number)
    assert same(source, target)


def transposed(net: Any) -> torch.nn.Module:
    net.layer.weight = torch.nn.Parameter(net.layer.weight.detach().T.contiguous().T)
    return net


class AroundZero(TorchSource):
    """Its norm lies around zero."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._shards = replace(self._shards, shards=tuple(replace(s, plus=float(s.tensor.name == "norm")) for s in self._shards.shards))


REFUSED: dict[str, tuple[Callable[[Any], TorchSource], type[RefitError], str]] = {
    "a cast for the wire": (lambda net: TorchSource(net, dtype=Dtype.BFLOAT16), DtypeMismatch, "embed"),
    "something added": (AroundZero, UnsupportedLayout, "norm"),
}


@pytest.mark.parametrize(("source", "error", "tensor"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_in_memory_as_it_is_published_is_refused(world: Any, net: Any, source: Any, error: type[RefitError], tensor: str) -> None:
    with pytest.raises(error, match="snapshot InPlace") as refusal:
        world.publisher(source(net(1)), options=Trainer(snapshot="InPlace", redundancy=1))
    assert refusal.value.facts["tensor"] == tensor


@pytest.mark.parametrize(
    ("source", "target", "error", "tensor"),
    [
        pytest.param(lambda net: net, lambda net: net.bfloat16(), DtypeMismatch, "embed", id="engines that need another dtype"),
        pytest.param(transposed, lambda net: net, UnsupportedLayout, "layer.weight", id="rows that are columns in memory"),
    ],
)
def test_what_engines_cannot_read_in_place_is_refused_and_fails_the_version(
    world: Any, net: Any, source: Any, target: Any, error: type[RefitError], tensor: str
) -> None:
    trainer = world.trainer(source(net(1)), options=Trainer(snapshot="InPlace", redundancy=1))
    world.rank(target(net(2)))
    with pytest.raises(error, match="snapshot InPlace") as refusal:
        trainer.publish(0)
    assert refusal.value.facts["tensor"] == tensor
    assert world.version(1).phase is VersionPhase.FAILED

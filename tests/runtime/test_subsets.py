"""Subset refit: what a version selects crosses the wire and is installed, nothing else; every generator ends with the version, wherever it began."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import SpecError, VersionRetired
from refit_api.mounted import Engine, Trainer, TransportSettings
from refit_api.wire import Role, Select, VersionPhase
from refit_runtime.adapters.memory import Fault
from refit_runtime.adapters.nixl import NixlTransport
from refit_runtime.adapters.torch_module import TorchTarget
from refit_runtime.ports import Seams
from refit_runtime.subset import subset_of

from tests.runtime.steps import perturb, publish_all, refit, same

MIB = 1 << 20
ONE = Select(layers=(1,))
SELECTS = {
    "a layer": ONE,
    "two layers": Select(layers=(0, 2)),
    "by name": Select(params=("model.layers.2.bias", "model.norm")),
    "by a part of the name": Select(layer_groups=("bias",)),
    "any of them": Select(params=("model.norm",), layers=(0,), layer_groups=("2.bias",)),
    "everything": Select(layer_groups=("model.",)),
}


class Stack(torch.nn.Module):
    """Four layers of 0.7 MB in float32: chunks of 1 MiB hold parts of several, and no layer begins with one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Linear(256, 701) for _ in range(4))
        self.model.norm = torch.nn.Parameter(torch.randn(257))


def chosen(module: torch.nn.Module, select: Select) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.named_parameters() if subset_of(select).keeps(name)}


def size(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def step(module: torch.nn.Module, shadow: torch.nn.Module, select: Select) -> None:
    """A training step; `shadow` gets what a publish of the selection publishes."""
    perturb(module)
    with torch.no_grad():
        for name, tensor in chosen(module, select).items():
            shadow.get_parameter(name).copy_(tensor)


def moved(report: Any) -> int:
    return sum(read.bytes for read in report.reads)


def over_nixl(seams: Seams) -> Seams:
    return replace(seams, transport=NixlTransport(TransportSettings(chunk_bytes=MIB), {}))


WIRES: dict[str, Callable[[Seams], Seams]] = {"memory": lambda seams: seams, "nixl": over_nixl}


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_only_selected_bytes_cross_the_wire_and_all_of_the_version_is_live(world: Any, orders: Any, wire: Any) -> None:
    source, shadow, target = Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source, wrap=wire), world.rank(target, wrap=wire)
    refit(rank, orders, trainer.publish(0).number)
    counts = []
    for number, select in enumerate([*SELECTS.values(), ONE, ONE, ONE], 2):
        step(source, shadow, select)
        version = trainer.publish(number, select)
        assert (version.number, version.base, version.select) == (number, number - 1, select)
        report = refit(rank, orders, number)
        assert same(shadow, target)
        assert moved(report) == size(chosen(source, select).values())
        ready = world.version(number)
        assert (ready.phase, ready.root) == (VersionPhase.READY, report.serving_root)
        counts.append({name: value for name, value in (*trainer.counters().items(), *rank.counters().items()) if name not in ("reads", "bytes")})
    assert counts[-1] == counts[-2] == counts[-3]  # the same selection again makes nothing new
    step(source, shadow, Select(layer_groups=("",)))
    assert moved(refit(rank, orders, trainer.publish(99).number)) == size(source.parameters())
    assert same(source, target)


def test_only_selected_parameters_are_written_over_the_base(world: Any, orders: Any) -> None:
    source, shadow, target = Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target, installed="Off")
    refit(rank, orders, trainer.publish(0).number)
    for module in (shadow, target):
        module.model.layers[0].bias.data.fill_(7.0)  # so that a write would show
    step(source, shadow, ONE)
    refit(rank, orders, trainer.publish(1, ONE).number)
    assert same(shadow, target)


def test_damage_to_what_was_not_selected_is_found_after_the_install(world: Any, orders: Any) -> None:
    source, target = Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target)
    refit(rank, orders, trainer.publish(0).number)
    target.model.layers[3].bias.data.fill_(7.0)
    number = trainer.publish(1, ONE).number
    rank.start(orders.stage(number))
    rank.wait()
    rank.prepare(orders.commit(number))
    report = rank.install(orders.commit(number))
    assert report.error.type == "DigestMismatch"
    assert report.serving == 0
    assert rank.install(orders.commit(number)).serving == number  # whole, since nothing is served
    assert same(source, target)


def test_a_rank_that_holds_the_base_but_does_not_serve_it_installs_everything(world: Any, orders: Any) -> None:
    source, shadow, target = Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target)
    rank.start(orders.stage(trainer.publish(0).number))
    rank.wait()
    step(source, shadow, ONE)
    report = refit(rank, orders, trainer.publish(1, ONE).number)
    assert moved(report) == size(chosen(source, ONE).values())
    assert same(shadow, target)


def test_who_lacks_the_base_pulls_everything(world: Any, orders: Any) -> None:
    """A generator that joins, one that missed a version, and one that reads from the other."""
    source, shadow, behind, joins = Stack(1), Stack(1), Stack(2), Stack(3)
    trainer, first = world.trainer(source), world.rank(behind, "g-1")
    refit(first, orders, trainer.publish(0).number)
    for number, select in ((1, ONE), (2, Select(layers=(2,)))):
        step(source, shadow, select)
        version = trainer.publish(number, select)
        world.version(version.number)
    assert moved(refit(first, orders, version.number)) == size(source.parameters())
    world.report(first)
    second = world.rank(joins, "g-2")
    report = refit(second, orders, version.number, (world.source(first),))
    assert report.read_from(Role.GENERATOR) == size(source.parameters())
    assert same(shadow, behind)
    assert same(shadow, joins)


def test_a_relay_gives_the_selected_bytes_on(world: Any, orders: Any) -> None:
    source, shadow, one, two = Stack(1), Stack(1), Stack(2), Stack(3)
    trainer, first, second = world.trainer(source), world.rank(one, "g-1"), world.rank(two, "g-2")
    number = trainer.publish(0).number
    for rank in (first, second):
        refit(rank, orders, number)
        world.report(rank)
    step(source, shadow, ONE)
    number = trainer.publish(1, ONE).number
    refit(first, orders, number)
    world.report(first)
    report = refit(second, orders, number, (world.source(first),))
    assert (report.read_from(Role.GENERATOR), report.read_from(Role.TRAINER)) == (size(chosen(source, ONE).values()), 0)
    assert same(shadow, one)
    assert same(shadow, two)


def halved(module: torch.nn.Module, place: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Rows of every weight, under the names of the whole: the cut falls inside of layers."""
    part, parts = deepcopy(module), {}
    for name, tensor in module.named_parameters():
        middle = tensor.shape[0] // 2
        rows = (0, middle) if place == 0 else (middle, tensor.shape[0])
        owner, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(owner), leaf, torch.nn.Parameter(tensor.detach()[slice(*rows)].clone()))
        parts[name] = (tuple(tensor.shape), (rows, *((0, extent) for extent in tensor.shape[1:])))
    return part, parts


@pytest.mark.parametrize("select", ["two layers", "any of them"])
@pytest.mark.parametrize("terms", [{"redundancy": 2}], ids=["redundancy: 2"])
def test_replicas_of_tensor_parallel_ranks_to_whole_and_halved_engines(world: Any, orders: Any, select: str, terms: Any) -> None:
    """Some owners have nothing of what is selected; their runs are of the version all the same."""
    whole, target = Stack(1), Stack(2)
    modules = [halved(whole, rank % 2) for rank in range(4)]
    trainers = [world.trainer(module, rank, 4, replica=rank // 2, parts=parts, options=Trainer(redundancy=2)) for rank, (module, parts) in enumerate(modules)]
    ranks = [world.rank(target, "whole")]
    halves = [halved(Stack(3), place) for place in (0, 1)]
    for place, (module, parts) in enumerate(halves):
        bound = TorchTarget(module, f"tp{place}", parts=parts)
        ranks.append(world.rank(module, "pair", coordinate=f"tp{place}", rank=place, world=2, target=bound))
    number = publish_all(trainers, 0)
    for rank in ranks:
        refit(rank, orders, number)
    shadow = Stack(1)
    step(whole, shadow, SELECTS[select])
    for module, _ in modules:
        perturb(module)
    number = publish_all(trainers, 1, SELECTS[select])
    reports = [refit(rank, orders, number) for rank in ranks]
    assert same(shadow, target)
    for place, (module, _) in enumerate(halves):
        assert same(halved(shadow, place)[0], module)
    assert moved(reports[0]) == moved(reports[1]) + moved(reports[2]) == size(chosen(whole, SELECTS[select]).values())


def test_bytes_that_arrive_wrong_and_bytes_of_the_base_that_were_damaged_come_anew(world: Any, orders: Any) -> None:
    source, shadow, target = Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target)
    world.faults["trainer-0"] = Fault()
    refit(rank, orders, trainer.publish(0).number)
    selected = size(chosen(source, ONE).values())
    for number, damage in ((1, "wire"), (2, "memory")):
        if damage == "wire":
            world.faults["trainer-0"].corrupt = 1
        else:
            rank._stager.arena.whole[5] ^= 1  # of layer 0
        step(source, shadow, ONE)
        report = refit(rank, orders, trainer.publish(number, ONE).number)
        assert same(shadow, target)
        assert selected < moved(report) <= selected + MIB


def test_a_stage_that_fails_leaves_the_base_which_the_next_one_needs(world: Any, orders: Any) -> None:
    source, shadow, target = Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target)
    world.faults["trainer-0"] = Fault()
    first = trainer.publish(0).number
    refit(rank, orders, first)
    world.faults["trainer-0"].corrupt = 1000
    step(source, shadow, ONE)
    number = trainer.publish(1, ONE).number
    rank.start(orders.stage(number))
    rank.wait()
    assert rank.report().error.type == "DigestMismatch"
    assert (rank.report().serving, rank.held()) == (first, (first,))
    world.faults["trainer-0"].corrupt = 0
    report = refit(rank, orders, number)
    assert moved(report) == size(chosen(source, ONE).values())
    assert same(shadow, target)


def test_a_stage_that_is_taken_up_again_reads_the_rest(world: Any, orders: Any) -> None:
    source, shadow, target = Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target)
    fault = world.faults["trainer-0"] = Fault()
    refit(rank, orders, trainer.publish(0).number)
    select = Select(layers=(0, 3))
    step(source, shadow, select)
    number = trainer.publish(1, select).number
    fault.moved, fault.die_at = 0, size(source.model.layers[0].parameters()) + 100
    rank.start(orders.stage(number))
    rank.wait()
    assert rank.report().error.retry_after is not None
    before = moved(rank.report())
    assert before > 0
    fault.die_at = None
    assert before + moved(refit(rank, orders, number)) == size(chosen(source, select).values())
    assert same(shadow, target)


def test_with_two_arenas_the_base_stays_held_and_is_put_back(world: Any, orders: Any) -> None:
    source, base, shadow, target = Stack(1), Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target, engine=Engine(kind="Custom", keep_previous=True))
    first = trainer.publish(0).number
    refit(rank, orders, first)
    for number in (1, 2):
        before = [tensor.clone() for tensor in shadow.parameters()]
        step(source, shadow, ONE)
        version = trainer.publish(number, ONE).number
        report = refit(rank, orders, version)
        assert moved(report) == size(chosen(source, ONE).values())
        assert same(shadow, target)
        assert rank.held() == (version - 1, version)
        assert rank.install(orders.commit(version - 1)).serving == version - 1
        assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))
        assert rank.install(orders.commit(version)).serving == version
        assert same(shadow, target)
    assert not same(base, target)


@pytest.mark.parametrize("terms", [{"arenas": 2}], ids=["arenas: 2"])
def test_a_trainer_with_two_arenas_offers_the_base_beside_the_subset(world: Any, orders: Any, terms: Any) -> None:
    source, base, shadow = Stack(1), Stack(1), Stack(1)
    one, two = Stack(2), Stack(3)
    trainer = world.trainer(source, options=Trainer(arenas=2, redundancy=1))
    ranks = [world.rank(one, "g-1"), world.rank(two, "g-2")]
    first = trainer.publish(0).number
    world.version(first)
    step(source, shadow, ONE)
    second = trainer.publish(1, ONE).number
    world.version(second)
    refit(ranks[0], orders, first)
    refit(ranks[1], orders, second)
    assert same(base, one)
    assert same(shadow, two)


def test_a_subset_outlives_the_memory_of_the_catalog(world: Any, orders: Any) -> None:
    source, shadow, target = Stack(1), Stack(1), Stack(2)
    trainer, rank = world.trainer(source), world.rank(target)
    refit(rank, orders, trainer.publish(0).number)
    step(source, shadow, ONE)
    number = trainer.publish(1, ONE).number
    world.version(number)
    world.catalog.lose_memory()
    trainer.worker.poke()
    rank.worker.poke()
    report = refit(rank, orders, number)
    assert moved(report) == size(chosen(source, ONE).values())
    step(source, shadow, ONE)
    refit(rank, orders, trainer.publish(2, ONE).number)
    assert same(shadow, target)


def test_a_trainer_that_started_again_publishes_everything_first(world: Any, orders: Any) -> None:
    source, target = Stack(1), Stack(2)
    old, rank = world.trainer(source), world.rank(target)
    refit(rank, orders, old.publish(0).number)
    trainer = world.trainer(source, run_id="run-2")
    with pytest.raises(VersionRetired, match="holds no sealed version"):
        trainer.publish(1, ONE)
    perturb(source)
    refit(rank, orders, trainer.publish(1).number)
    assert same(source, target)


IDLE: dict[str, tuple[Select, str]] = {
    "no selector": (Select(), "selected by nothing"),
    "a name that nobody has": (Select(params=("model.norm", "model.nrm")), r"selected by model.nrm \(1 in all\)"),
    "a layer too far": (Select(layers=(0, 4)), "selected by layer 4"),
    "a group without tensors": (Select(layers=(0,), layer_groups=(".mlp.",)), "selected by '.mlp.'"),
}


@pytest.mark.parametrize(("select", "message"), IDLE.values(), ids=IDLE)
def test_a_selector_that_keeps_nothing_is_refused_by_name(world: Any, orders: Any, select: Select, message: str) -> None:
    trainer, _ = world.trainer(Stack(1)), world.rank(Stack(2))
    trainer.publish(0)
    with pytest.raises(SpecError, match=message):
        trainer.publish(1, select)
    assert trainer.publish(1, ONE).number == 2  # nothing was created


def test_ranks_that_select_otherwise_are_refused(world: Any, orders: Any) -> None:
    source = Stack(1)
    trainers = [world.trainer(source, rank, 2, replica=rank) for rank in (0, 1)]
    world.rank(Stack(2))
    publish_all(trainers, 0)
    trainers[0].publish(1, ONE)
    with pytest.raises(SpecError, match="every rank has to give the same select"):
        trainers[1].publish(1, Select(layers=(2,)))


def test_live_weights_that_are_published_in_place_have_no_subsets(world: Any) -> None:
    trainer = world.trainer(Stack(1), options=Trainer(snapshot="InPlace", redundancy=1))
    with pytest.raises(SpecError, match="InPlace"):
        trainer.publish(0, ONE)

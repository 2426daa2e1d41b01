"""Without an agent the ranks of an engine compare what they did: all have the version afterwards, or none runs a mix."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import EngineHung, InstallError, MixedRanks, PeerUnavailable, RefitError, SpecError, VersionRetired
from refit_api.mounted import Engine, Rollout, Verification
from refit_api.wire import Role, Select
from refit_operator.decide.facts import CatalogFacts, Observed, Pod
from refit_operator.decide.members import Member, members
from refit_runtime.adapters.memory import MemoryBallot
from refit_runtime.adapters.torch_module import TorchTarget
from refit_runtime.driven import DrivenClient

from tests.runtime.failing import Tripping
from tests.runtime.steps import perturb, same

MANUAL = Rollout(policy="Manual")
FULL, KEEPING, WINDOWED = Engine(), Engine(keep_previous=True), Engine(staging="Windowed")


class Driven:
    """Ranks that each hold the whole net."""

    def __init__(self, world: Any, targets: list[torch.nn.Module], engine: Engine = FULL, seconds: float = 20.0, cores: int = 1) -> None:
        """`cores`: that act alone, each of one rank; else all ranks are of one."""
        together = MemoryBallot(len(targets), seconds)
        self.memories = [Tripping() for _ in targets]
        self.targets, self.ranks = targets, list[DrivenClient]()
        for rank, target in enumerate(targets):
            coordinate = f"tp{rank}" if cores == 1 else "tp0"
            ballot = together.of(rank) if cores == 1 else MemoryBallot(1, seconds).of(0)
            settings = world.settings("generator-0", Role.GENERATOR, engine=engine, rollout=MANUAL, verification=Verification(installed="Blocking"))
            seams = replace(world.seams(settings), memory=self.memories[rank])
            client = DrivenClient(settings, coordinate, seams, ballot, rank, len(targets))
            client.bind(TorchTarget(target, coordinate))
            world.stack.callback(client.close)
            self.ranks.append(client)

    def update(self, asked: int) -> list[Any]:
        """What each rank returned, or the error that it raised."""

        def one(rank: DrivenClient) -> int | RefitError:
            try:
                return rank.update(asked)
            except RefitError as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(one, self.ranks))

    def run(self) -> None:
        for rank in self.ranks:
            rank.require()


def test_all_ranks_take_the_version_that_is_named_or_the_newest(world: Any, net: Any) -> None:
    source = net(1)
    engine = Driven(world, [net(2), net(3)])
    trainer = world.trainer(source)
    engine.run()  # whatever was loaded at the start is the framework's
    first = trainer.publish(0).number
    world.version(first)
    assert engine.update(first) == engine.update(first) == [first, first]
    perturb(source)
    second = trainer.publish(1).number
    world.version(second)
    assert engine.update(0) == [second, second]
    assert all(same(source, target) for target in engine.targets)
    with torch.no_grad():
        source.norm.add_(1)
    third = trainer.publish(2, Select(params=("norm",))).number
    assert engine.update(third) == [third, third]
    assert all(same(source, target) for target in engine.targets)
    engine.run()


def test_what_was_staged_beside_the_requests_is_not_staged_in_the_pause(world: Any, net: Any) -> None:
    source = net(1)
    engine = Driven(world, [net(2), net(3)])
    trainer = world.trainer(source)
    first = trainer.publish(0).number
    for rank in engine.ranks:
        rank.begin(first)
        rank._rank.wait()
    staged = [rank._rank._stager.progress for rank in engine.ranks]
    assert engine.update(first) == [first, first]
    assert [rank._rank._stager.progress for rank in engine.ranks] == staged
    assert all(same(source, target) for target in engine.targets)
    second = trainer.publish(1).number
    engine.ranks[0].begin(second)  # the other one has not begun, this one has not ended
    assert engine.update(second) == [second, second]
    assert all(same(source, target) for target in engine.targets)


@pytest.mark.parametrize(("asked", "kind"), [(7, VersionRetired), (0, PeerUnavailable)], ids=["a version that is not there", "nothing is Ready"])
def test_all_ranks_say_alike_what_kept_any_from_it(world: Any, net: Any, asked: int, kind: type[RefitError]) -> None:
    engine = Driven(world, [net(2), net(3)])
    errors = engine.update(asked)
    assert [type(error) for error in errors] == [kind, kind]
    engine.run()


def test_cores_that_act_alone_are_told_which_version(world: Any, net: Any) -> None:
    engine = Driven(world, [net(2), net(3)], cores=2)
    world.version(world.trainer(net(1)).publish(0).number)
    assert [type(error) for error in engine.update(0)] == [SpecError, SpecError]
    assert engine.update(1) == [1, 1]


def broken() -> None:
    raise RuntimeError("the last copy")


CASES = {
    "the second try succeeds": (1, FULL, "second"),
    "the version before is put back on all": (2, KEEPING, "first"),
    "without it all are fenced": (2, FULL, "fenced"),
    "window by window, the second try succeeds": (1, WINDOWED, "second"),
    "window by window, all are fenced": (2, WINDOWED, "fenced"),
}


@pytest.mark.parametrize(("times", "kind", "outcome"), CASES.values(), ids=CASES.keys())
def test_one_rank_that_cannot_install(world: Any, net: Any, times: int, kind: Engine, outcome: str) -> None:
    source = net(1)
    engine = Driven(world, [net(2), net(3)], kind)
    trainer = world.trainer(source)
    first = trainer.publish(0).number
    assert engine.update(first) == [first, first]
    before = source.norm.detach().clone()
    perturb(source)
    second = trainer.publish(1).number
    for rank in engine.ranks:
        rank.stage(second)
    engine.memories[1].trips = [(-1, broken)] * times
    outcomes = engine.update(second)
    if outcome == "second":
        assert outcomes == [second, second]
    else:
        assert [type(error) for error in outcomes] == [InstallError, InstallError]
    if outcome == "fenced":
        for rank in engine.ranks:
            with pytest.raises(MixedRanks, match="fenced until a version is installed whole"):
                rank.require()
        assert engine.update(second) == [second, second]
    else:
        expected = source.norm if outcome == "second" else before
        assert all(torch.equal(target.norm, expected) for target in engine.targets)
    engine.run()


def test_a_rank_that_is_not_heard_leaves_the_others_fenced(world: Any, net: Any) -> None:
    engine = Driven(world, [net(2), net(3)], seconds=0.5)
    number = world.trainer(net(1)).publish(0).number
    world.version(number)
    with pytest.raises(EngineHung, match="not heard in time"):
        engine.ranks[0].update(number)
    with pytest.raises(MixedRanks, match="restart the engine"):
        engine.ranks[0].require()


def test_each_rank_tells_the_catalog_what_it_serves_and_that_it_is_fenced(world: Any, net: Any) -> None:
    """The operator sees one engine, though no agent speaks for it."""
    source = net(1)
    engine = Driven(world, [net(2), net(3)], KEEPING)
    trainer = world.trainer(source)
    first = trainer.publish(0).number
    engine.update(first)

    def seen() -> Member:
        (generator,) = world.catalog.run(world.catalog.store.facts(world.catalog.group)).generators
        pod = Pod("g", generator.pod_uid, Role.GENERATOR, 0.0)
        (member,) = members(Observed(pods=(pod,), catalog=CatalogFacts(generators=(generator,))), 0, driven=True)
        return member

    def until(holds: Callable[[Member], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds(seen()):
            assert time.monotonic() < deadline, seen()
            time.sleep(0.05)

    until(lambda member: member.serving == first)
    perturb(source)
    second = trainer.publish(1).number
    engine.update(second)
    until(lambda member: (member.serving, member.kept) == (second, first))
    engine.ranks[1]._rank.fence("its framework says so")
    until(lambda member: member.fenced and member.serving == 0 and member.failed)

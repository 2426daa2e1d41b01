"""Whatever fails on the way: the stage goes on where it was, or ends with an error that names what and who; live parameters are untouched."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import CatalogUnavailable, EngineMismatch, LeaseLost, NoClass, PeerUnavailable, ReplicaMismatch, SpecError, UnknownTensor
from refit_api.mounted import Engine, Trainer
from refit_api.wire import Leased, RankPhase, Role, VersionPhase
from refit_runtime import offers
from refit_runtime.adapters.memory import Fault

MIB = 1 << 20
BYTES = 4 * (700 * 512 + 512 * 1800 + 1800 + 512)
TWO = [{"redundancy": 2}]
TWO_IDS = ["redundancy: 2"]


def stage(rank: Any, orders: Any, number: int, sources: Any = (), seconds: float = 20.0) -> Any:
    rank.start(orders.stage(number, sources, seconds))
    rank.wait()
    return rank.report()


def pair(world: Any, net: Any) -> tuple[Any, Any]:
    """Two replicas of the same weights: every run has two owners."""
    source = net(1)
    trainers = [world.trainer(source, rank, 2, replica=rank, options=Trainer(redundancy=2)) for rank in (0, 1)]
    return source, trainers


def publish(trainers: list[Any], step: int) -> int:
    """All ranks, and sealed."""
    numbers = set()
    threads = [threading.Thread(target=lambda each=each: numbers.add(each.publish(step).number)) for each in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for trainer in trainers:
        trainer._sealing.exception(20)
    assert len(numbers) == 1
    return numbers.pop()


@pytest.mark.parametrize("terms", TWO, ids=TWO_IDS)
@pytest.mark.parametrize("died_at", [0, 2 * MIB], ids=["before its first byte", "in the middle"])
def test_a_holder_that_dies_is_replaced_by_the_next_owner(world: Any, net: Any, orders: Any, died_at: int) -> None:
    """Nothing that was verified is read again."""
    source, trainers = pair(world, net)
    target = net(2)
    rank = world.rank(target)
    number = publish(trainers, 0)
    world.faults["trainer-0"] = fault = Fault(die_at=died_at)
    report = stage(rank, orders, number)
    assert report.phase is RankPhase.STAGED, report
    assert report.read_from(Role.TRAINER) == BYTES
    assert fault.moved <= died_at
    rank.prepare(orders.commit(number))
    rank.install(orders.commit(number))
    assert torch.equal(source.layer.weight, target.layer.weight)


@pytest.mark.parametrize("terms", TWO, ids=TWO_IDS)
@pytest.mark.parametrize(("times", "again"), [(1, 1), (2, 2), (3, 2)], ids=["once", "twice", "always"])
def test_wrong_bytes_are_pulled_again_then_from_the_next_owner(world: Any, net: Any, orders: Any, times: int, again: int) -> None:
    _, trainers = pair(world, net)
    rank = world.rank(net(2))
    number = publish(trainers, 0)
    world.faults["trainer-0"] = Fault(corrupt=times)
    world.faults["trainer-1"] = Fault()
    report = stage(rank, orders, number)
    assert report.phase is RankPhase.STAGED, report
    assert report.read_from(Role.TRAINER) > BYTES


def test_bytes_that_stay_wrong_fail_the_stage_and_name_tensor_block_and_source(world: Any, net: Any, orders: Any) -> None:
    trainer, target = world.trainer(net(1)), net(2)
    before = target.embed.clone()
    rank = world.rank(target)
    number = publish([trainer], 0)
    world.faults["trainer-0"] = Fault(corrupt=100)
    report = stage(rank, orders, number)
    assert (report.phase, report.error.type) == (RankPhase.IDLE, "DigestMismatch")
    assert report.error.facts["source"] == "trainer-0"
    assert report.error.facts["tensor"] in {"embed", "layer.weight", "layer.bias", "norm"}
    assert int(report.error.facts["block"]) >= 0
    assert rank.prepare(orders.commit(number)).phase is RankPhase.IDLE
    assert rank.install(orders.commit(number)).error.type == "MixedRanks"
    assert torch.equal(before, target.embed)


def test_a_slow_link_that_shares_itself_among_all_reads_is_waited_for(world: Any, net: Any, orders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends for a long time, then all of it."""
    monkeypatch.setattr(offers, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(offers, "SLOWEST", BYTES / 10)
    trainer = world.trainer(net(1))
    rank = world.rank(net(2))
    number = publish([trainer], 0)
    world.faults["trainer-0"] = Fault(delay=1.5)
    report = stage(rank, orders, number)
    assert report.phase is RankPhase.STAGED, report
    assert report.read_from(Role.TRAINER) == BYTES


def test_a_read_that_never_ends_costs_the_agent_and_nothing_else(world: Any, net: Any, orders: Any) -> None:
    """The peer is dropped, the transport agent replaced under a new incarnation, and the stage goes on from what was verified."""
    trainer = world.trainer(net(1))
    rank = world.rank(net(2))
    number = publish([trainer], 0)
    before = rank.worker.ref.incarnation
    world.faults["trainer-0"] = Fault(drop=1)
    report = stage(rank, orders, number, seconds=30.0)
    assert report.phase is RankPhase.STAGED, report
    assert rank.worker.ref.incarnation != before
    assert rank._seams.transport.counters()["registrations"] == 2
    assert report.read_from(Role.TRAINER) == BYTES


def test_a_relay_that_dies_is_replaced_by_the_trainers(world: Any, net: Any, orders: Any) -> None:
    trainer = world.trainer(net(1))
    one, two = world.rank(net(2), "g-1"), world.rank(net(3), "g-2")
    number = publish([trainer], 0)
    assert stage(one, orders, number).phase is RankPhase.STAGED
    world.report(one)
    world.faults["g-1"] = Fault(die_at=2 * MIB)
    report = stage(two, orders, number, (world.source(one),))
    assert report.phase is RankPhase.STAGED, report
    assert report.read_from(Role.GENERATOR) + report.read_from(Role.TRAINER) == BYTES
    assert 0 < report.read_from(Role.GENERATOR) <= 2 * MIB


class Said:
    """A catalog that answers some calls differently; all others are the real one's."""

    def __init__(self, inner: Any, **answers: Any) -> None:
        self._inner, self._answers = inner, answers

    def __getattr__(self, name: str) -> Any:
        return self._answers.get(name) or getattr(self._inner, name)


def test_a_lease_that_is_not_renewed_in_time_ends_the_stage(world: Any, net: Any, orders: Any) -> None:
    """A reader trusts its own clock, whatever the catalog thinks."""
    trainer = world.trainer(net(1))

    def away(request: Any) -> Leased:
        raise CatalogUnavailable("away", retry_after=1.0)

    def short(seams: Any) -> Any:
        inner = seams.catalog

        def acquire(request: Any) -> Leased:
            inner.acquire_lease(request)
            return Leased(6.5)

        return replace(seams, catalog=Said(inner, acquire_lease=acquire, renew_lease=away))

    rank = world.rank(net(2), wrap=short)
    number = publish([trainer], 0)
    world.faults["trainer-0"] = Fault(delay=4)
    start = time.monotonic()
    report = stage(rank, orders, number)
    assert report.error.type == LeaseLost.__name__
    assert time.monotonic() - start < 12


def test_a_holder_in_use_is_released_when_its_reader_is_done(world: Any, net: Any, orders: Any) -> None:
    """O9: closing says who still reads; the memory is free only after that."""
    trainer = world.trainer(net(1))
    rank = world.rank(net(2))
    number = publish([trainer], 0)
    world.faults["trainer-0"] = Fault(delay=1.5)
    rank.start(orders.stage(number))
    while rank.report().staging != number or not rank._stager.progress.watch.timings[-1:]:
        time.sleep(0.01)
    while not any(timing.stage == "lease" for timing in rank._stager.progress.watch.timings):
        time.sleep(0.01)
    with pytest.raises(PeerUnavailable, match="still read by generator-0"):
        trainer.release(number, 0.2)
    trainer.release(number, 10)
    rank.wait()
    assert rank.report().phase is RankPhase.STAGED
    assert trainer._holdings.all() == []


def test_a_trainer_that_started_again_is_another_holder(world: Any, net: Any, orders: Any) -> None:
    """Its old version has no holder left; its next one is pulled from the new process."""
    source, target = net(1), net(2)
    first = world.trainer(source)
    rank = world.rank(target)
    old = publish([first], 0)
    again = world.trainer(source, run_id="run-2")
    report = stage(rank, orders, old, seconds=3.0)
    assert report.phase is RankPhase.IDLE
    assert report.error is not None
    new = publish([again], 0)
    assert stage(rank, orders, new).phase is RankPhase.STAGED
    assert new > old


def test_an_older_order_is_refused(world: Any, net: Any, orders: Any) -> None:
    trainer = world.trainer(net(1))
    rank = world.rank(net(2))
    number = publish([trainer], 0)
    late, order = orders.stage(number), orders.stage(number)
    rank.start(order)
    rank.wait()
    rank.start(late)
    assert rank.report().error.type == "StaleOrder"
    assert rank.report().phase is RankPhase.STAGED


@pytest.mark.parametrize("terms", [{"arenas": 2}], ids=["arenas: 2"])
def test_a_newer_stage_supersedes(world: Any, net: Any, orders: Any) -> None:
    source = net(1)
    trainer = world.trainer(source, options=Trainer(arenas=2, redundancy=1))
    rank = world.rank(net(2))
    first = publish([trainer], 0)
    world.faults["trainer-0"] = fault = Fault(delay=30)
    rank.start(orders.stage(first, seconds=60))
    while rank._seams.transport.counters()["reads"] == 0:
        time.sleep(0.01)
    fault.delay = 0.0
    second = publish([trainer], 1)
    report = stage(rank, orders, second, seconds=40)
    assert (report.phase, report.arena) == (RankPhase.STAGED, second)


@pytest.mark.parametrize("terms", TWO, ids=TWO_IDS)
def test_replicas_that_differ_never_become_a_version(world: Any, net: Any, orders: Any) -> None:
    one, two = net(1), net(1)
    two.norm.data[7] += 1
    trainers = [world.trainer(module, rank, 2, replica=rank, options=Trainer(redundancy=2)) for rank, module in enumerate((one, two))]
    world.rank(net(2))
    number = publish(trainers, 0)
    version = world.version(number)
    assert version.phase is VersionPhase.FAILED
    assert ReplicaMismatch.__name__ in version.reason


@pytest.mark.parametrize("terms", [{"publish_deadline_seconds": 1.0}], ids=["after a second"])
def test_nothing_is_published_before_an_engine_says_what_it_needs(world: Any, net: Any) -> None:
    trainer = world.trainer(net(1))
    with pytest.raises(NoClass):
        trainer.publish(0)


def test_what_no_trainer_holds_is_refused_before_any_byte_moves(world: Any, net: Any) -> None:
    """O7."""
    target = net(2)
    target.extra = torch.nn.Parameter(torch.zeros(3))
    rank = world.rank(target)
    trainer = world.trainer(net(1))
    with pytest.raises(UnknownTensor, match="extra"):
        trainer.publish(0)
    assert rank._seams.transport.counters()["reads"] == 0


def test_a_catalog_that_is_away_never_hangs_the_training(world: Any, net: Any) -> None:
    trainer = world.trainer(net(1))
    world.rank(net(2))
    publish([trainer], 0)
    world.catalog.stop()
    while not world.catalog._loop.is_closed():
        time.sleep(0.05)
    start = time.monotonic()
    with pytest.raises(CatalogUnavailable) as caught:
        trainer.publish(1)
    assert caught.value.retry_after is not None
    assert time.monotonic() - start < 5


UNBUILT = {
    "Remap": (Engine(kind="Custom", commit="Remap"), "commit: Remap"),
}


@pytest.mark.parametrize(("engine", "named"), UNBUILT.values(), ids=UNBUILT.keys())
def test_what_this_release_does_not_do_is_refused(world: Any, net: Any, engine: Engine, named: str) -> None:
    with pytest.raises(EngineMismatch, match=named):
        world.rank(net(1), engine=engine, close=False)


def test_a_trainer_without_a_run_is_refused(world: Any, net: Any) -> None:
    with pytest.raises(SpecError, match="run id"):
        world.trainer(net(1), run_id="")

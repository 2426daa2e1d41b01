"""After lost memory or a gap in service: what is recorded is known, what is absent is unknown, and numbers are never given again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from refit_api import wire
from refit_api.errors import CatalogUnavailable, ReplicaMismatch, VersionRetired
from refit_api.wire import Role, VersionPhase, WorkerRef
from refit_operator.catalog import model
from refit_operator.catalog.facts import Moment, Pending
from refit_operator.ports import Recorded, RecordedVersion

if TYPE_CHECKING:
    from tests.catalog.conftest import World
else:
    World = Any

GROUP = wire.GroupRef("ns", "demo")
TRAINERS = WorkerRef("trainer-0", Role.TRAINER, 0, "a"), WorkerRef("trainer-1", Role.TRAINER, 1, "a")
READER = WorkerRef("gen-0", Role.GENERATOR, 0, "a")


def record(world: World) -> Recorded:
    """What Kubernetes holds of it."""
    versions = tuple(
        RecordedVersion(v.number, v.key, v.run_id, v.step, v.plan_key, v.phase, v.root, v.bytes, len(v.slots))
        for v in (entry.version for entry in world.group.versions.values())
    )
    return Recorded(world.group.epoch, world.group.ceiling, versions)


@pytest.fixture
def before(world: World) -> World:
    """Version 1 is Ready and read, version 2 half published in the second arena."""
    world.terms = replace(world.terms, arenas=2)
    world.group = model.retune(world.group, world.terms)
    world.generator()
    world.publish()
    world.lease(READER, 1, *TRAINERS)
    world.create(TRAINERS[0], step=1)
    world.seal(TRAINERS[0], 2)
    return world


@pytest.fixture
def after(before: World, make_world: Callable[..., World]) -> World:
    """The next catalog, before any worker came back."""
    return make_world(recorded=record(before), arenas=2)


def come_back(world: World, *refs: WorkerRef) -> None:
    for ref in refs:
        if ref.role is Role.TRAINER:
            world.trainer(ref.rank)
        else:
            world.generator()


def test_nobody_is_answered_before_the_epoch_is_written(before: World) -> None:
    group = model.start(GROUP, before.terms, record(before), before.now)
    assert group.epoch == 2
    request = wire.Heartbeat(GROUP, READER)
    _, waiting = model.handle(group, "Heartbeat", request, Moment(before.now, before.now))
    assert isinstance(waiting, Pending)
    assert isinstance(waiting.otherwise, CatalogUnavailable)
    _, answer = model.handle(model.confirm(group, 2, 0, frozenset()), "Heartbeat", request, Moment(before.now, before.now))
    assert answer == wire.Beat(catalog_epoch=2, known=False)


def test_a_group_without_a_past_has_nothing_to_wait_for(world: World) -> None:
    assert world.group.epoch == 1
    assert world.group.settled(world.now)
    assert world.group.next_number == 1


def test_numbers_go_on_above_the_ceiling(after: World) -> None:
    come_back(after, READER, *TRAINERS)
    created = after.create(TRAINERS[0], step=7).version
    assert created is not None
    assert created.number == 101


def test_a_publish_goes_on_where_it_was(before: World, after: World) -> None:
    come_back(after, READER, *TRAINERS)
    replay = after.create(TRAINERS[1], step=1).version
    assert replay is not None
    assert replay.number == 2
    for ref in TRAINERS:
        after.seal(ref, 1)
        after.seal(ref, 2)
    assert (after.phase(1), after.phase(2)) == ("Ready", "Ready")
    assert after.group.versions[1].version.root == before.group.versions[1].version.root


def test_run_roots_come_back_with_the_trainers_and_are_checked_against_the_record(after: World) -> None:
    come_back(after, *TRAINERS)
    after.seal(TRAINERS[0], 1)
    with pytest.raises(CatalogUnavailable, match="run roots"):
        after.call("GetVersion", wire.GetVersion(GROUP, 1))
    with pytest.raises(ReplicaMismatch, match="recorded"):
        after.seal(TRAINERS[1], 1, content="other bytes")
    again = after.trainer(1, incarnation="b")
    after.seal(again, 1)
    assert set(after.call("GetVersion", wire.GetVersion(GROUP, 1)).run_roots) == {0, 1}


def test_absent_is_unknown_for_one_lease_time(after: World) -> None:
    come_back(after, *TRAINERS)
    with pytest.raises(CatalogUnavailable, match="rebuilding"):  # who reads is not known yet
        after.close(TRAINERS[0], 1)
    with pytest.raises(CatalogUnavailable, match="rebuilding"):
        after.call("RetireVersion", wire.EndVersion(GROUP, 1))
    after.wait(29.0, *TRAINERS)
    assert after.phase(1) == "Ready"
    after.wait(2.0, *TRAINERS)
    assert after.close(TRAINERS[0], 1) == ()


def test_without_holders_the_version_fails_only_after_that(after: World) -> None:
    after.wait(29.0)
    assert after.phase(1) == "Ready"
    after.wait(2.0)
    assert after.phase(1) == "Failed"


def test_readers_take_their_leases_up_again_before_their_sources_are_back(after: World) -> None:
    come_back(after, READER)
    after.lease(READER, 1, *TRAINERS)
    come_back(after, *TRAINERS)
    after.wait(25.0, READER, *TRAINERS)
    after.call("RenewLease", wire.RenewLease(GROUP, READER, 1))
    after.wait(6.0, READER, *TRAINERS)
    assert after.close(TRAINERS[0], 1) == ("gen-0",)


@pytest.mark.parametrize(("wait", "allowed"), [(0.0, True), (31.0, False)], ids=["at once", "after one lease time"])
def test_a_draining_version_takes_its_readers_back(make_world: Callable[..., World], wait: float, allowed: bool) -> None:
    known = RecordedVersion(1, "run-1:0", "run-1", 0, "p", VersionPhase.RELEASING, b"r", 1, 2)
    world = make_world(recorded=Recorded(1, 100, (known,)))
    come_back(world, READER)
    world.wait(wait, READER)
    if allowed:
        world.lease(READER, 1, *TRAINERS)
        world.wait(20.0, READER)
        world.call("RenewLease", wire.RenewLease(GROUP, READER, 1))
        world.wait(11.0, READER)
        assert world.phase(1) == "Releasing"
    else:
        assert world.phase(1) == "Released"
        with pytest.raises(VersionRetired):
            world.lease(READER, 1, *TRAINERS)


def test_a_gap_in_service_counts_towards_nothing_and_raises_the_epoch(before: World) -> None:
    world = before
    expiries = [worker.expires for worker in world.group.workers.values()]
    deadline = world.group.versions[2].publish_by
    world.now += 500.0
    world.group = model.resume(world.group, 500.0)
    assert world.group.epoch == 2
    assert not world.group.epoch_written
    world.write()
    world.tick()
    assert [worker.expires - 500.0 for worker in world.group.workers.values()] == expiries
    assert world.group.versions[2].publish_by == deadline + 500.0
    assert world.close(TRAINERS[0], 1) == ("gen-0",)

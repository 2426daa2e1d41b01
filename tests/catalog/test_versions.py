"""Publishing: one number for all ranks, Ready exactly once, and every way in which a version ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from refit_api import wire
from refit_api.errors import CatalogUnavailable, NoClass, PeerUnavailable, RefitError, ReplicaMismatch, StaleOrder, VersionRetired, WireMismatch
from refit_api.wire import VersionPhase, WorkerRef
from refit_operator.catalog.facts import ENDED, MOVES, Pending
from refit_operator.catalog.model import remove, wanted_ceiling
from refit_operator.catalog.phases import end, version_root

if TYPE_CHECKING:
    from tests.catalog.conftest import World
else:
    World = Any

GROUP = wire.GroupRef("ns", "demo")
Act = Callable[[World, tuple[WorkerRef, ...]], object]


@pytest.fixture
def ranks(world: World) -> tuple[WorkerRef, WorkerRef]:
    """Two trainer ranks, and an engine class to plan for."""
    world.generator()
    return world.trainer(0), world.trainer(1)


def test_all_ranks_of_a_publish_get_one_number(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    first, second = (world.create(ref, step=5).version for ref in ranks)
    assert first == second
    assert first is not None
    assert (first.number, first.step, first.key, first.phase) == (1, 5, "run-1:5", VersionPhase.PUBLISHING)
    assert world.create(ranks[0], step=5).version == first


def test_who_plans_something_else_is_told_the_plan_key_first(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    asked = world.create(ranks[0], plan_key="")
    assert asked.plan_key
    assert asked.version is None
    assert world.create(ranks[0], plan_key="f" * 64) == asked
    assert world.group.versions == {}


def test_the_first_publish_waits_for_an_engine_class(world: World) -> None:
    ref = world.trainer(0, world=1)
    request = wire.CreateVersion(GROUP, ref, "run-1:0", "run-1", 0, "", ("0",))
    waiting = world.look("CreateVersion", request)
    assert isinstance(waiting, Pending)
    assert waiting.until == world.now + 150.0
    assert isinstance(waiting.otherwise, NoClass)
    world.generator()
    assert isinstance(world.look("CreateVersion", request), wire.Created)


def test_a_version_is_told_once_its_record_exists(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    plan_key = world.create(ranks[0], plan_key="").plan_key
    request = wire.CreateVersion(GROUP, ranks[0], "run-1:0", "run-1", 0, plan_key, ("0", "1"))
    waiting = world.look("CreateVersion", request)
    assert isinstance(waiting, Pending)
    assert isinstance(waiting.otherwise, CatalogUnavailable)
    assert world.call("ListVersions", wire.ListVersions(GROUP)).versions == ()
    world.write()
    assert world.look("CreateVersion", request).version.number == 1
    assert [version.number for version in world.call("ListVersions", wire.ListVersions(GROUP)).versions] == [1]


def test_only_every_nth_version_waits_for_a_record(make_world: Callable[..., World]) -> None:
    world = make_world(record_every=3)
    world.generator()
    for step in range(6):
        world.publish(step)
    assert [number for number, entry in world.group.versions.items() if entry.recorded] == [1, 4]


def test_numbers_stay_below_what_is_written_and_half_a_block_is_kept(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    assert world.group.ceiling == 100
    world.group = replace(world.group, next_number=51)
    assert wanted_ceiling(world.group) == 200
    world.group = replace(world.group, next_number=101)
    plan_key = world.create(ranks[0], plan_key="").plan_key
    waiting = world.look("CreateVersion", wire.CreateVersion(GROUP, ranks[0], "run-1:0", "run-1", 0, plan_key, ("0", "1")))
    assert isinstance(waiting, Pending)
    assert "versionCeiling" in waiting.otherwise.message
    assert world.group.versions == {}


CREATE_REFUSED: dict[str, tuple[Act, type[RefitError]]] = {
    "slots that are no ranks": (lambda w, r: w.create(r[0], slots=("0", "one")), WireMismatch),
    "a rank beyond the world": (lambda w, r: w.create(r[0], slots=("0", "2")), WireMismatch),
    "a slot twice": (lambda w, r: w.create(r[0], slots=("0", "0")), WireMismatch),
    "no slot": (lambda w, r: w.create(r[0], slots=()), WireMismatch),
    "a replay with other slots": (lambda w, r: (w.create(r[0]), w.create(r[1], slots=("0-1",))), WireMismatch),
    "another run than registered": (lambda w, r: w.create(r[0], run="run-9"), StaleOrder),
}


@pytest.mark.parametrize(("act", "error"), CREATE_REFUSED.values(), ids=CREATE_REFUSED)
def test_create_refuses(world: World, ranks: tuple[WorkerRef, WorkerRef], act: Act, error: type[RefitError]) -> None:
    with pytest.raises(error):
        act(world, ranks)


def test_ready_when_every_slot_is_sealed_with_the_root_of_its_runs_in_order(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    world.create(ranks[0])
    world.seal(ranks[1], 1, runs=(1, 2))
    assert world.phase(1) == "Publishing"
    world.seal(ranks[0], 1, runs=(0, 3))
    facts = world.call("GetVersion", wire.GetVersion(GROUP, 1))
    assert facts.version.phase is VersionPhase.READY
    assert list(facts.run_roots) == [0, 1, 2, 3]
    assert facts.version.root == version_root(facts.run_roots)
    assert facts.version.bytes == 200
    assert set(world.call("GetVersion", wire.GetVersion(GROUP, 1, runs=(2,))).run_roots) == {2}
    world.seal(ranks[0], 1, runs=(0, 3))  # a replay changes nothing
    assert world.call("GetVersion", wire.GetVersion(GROUP, 1)) == facts


def test_every_live_member_of_a_slot_must_have_sealed(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    world.create(ranks[0], slots=("0-1",))
    world.seal(ranks[0], 1, "0-1")
    assert world.phase(1) == "Publishing"
    world.call("Deregister", wire.Deregister(GROUP, ranks[1]))
    world.tick()
    assert world.phase(1) == "Ready"


def test_replicas_that_differ_fail_the_version(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    world.create(ranks[0], slots=("0-1",))
    world.seal(ranks[0], 1, "0-1")
    with pytest.raises(ReplicaMismatch, match="rank 1: run 0"):
        world.seal(ranks[1], 1, "0-1", content="other bytes")
    assert world.phase(1) == "Failed"
    assert world.group.versions[1].version.reason.startswith("ReplicaMismatch: ")


def test_the_root_of_a_ready_version_is_fixed(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    world.create(ranks[0], slots=("0-1",))
    world.seal(ranks[0], 1, "0-1")
    world.call("Deregister", wire.Deregister(GROUP, ranks[1]))
    world.tick()
    again = world.trainer(1, incarnation="b")
    with pytest.raises(ReplicaMismatch):
        world.seal(again, 1, "0-1", content="other bytes")
    assert world.phase(1) == "Ready"
    holder = world.group.holder(1, again)
    assert holder is None or holder.closed_at is not None


SEAL_REFUSED: dict[str, tuple[Act, type[RefitError]]] = {
    "an unknown version": (lambda w, r: w.seal(r[0], 9), VersionRetired),
    "a slot that the version lacks": (lambda w, r: w.seal(r[0], 1, "0-1"), WireMismatch),
    "the slot of another rank": (lambda w, r: w.seal(r[0], 1, "1"), WireMismatch),
    "another plan": (lambda w, r: w.call("SealShard", wire.SealShard(GROUP, r[0], 1, "0", 1, "f" * 64, {0: b"x"})), WireMismatch),
    "a version that ended": (lambda w, r: (w.call("AbortVersion", wire.EndVersion(GROUP, 1)), w.seal(r[0], 1)), VersionRetired),
    "what the rank has closed": (lambda w, r: (w.seal(r[0], 1), w.close(r[0], 1), w.seal(r[0], 1)), VersionRetired),
    "a run of another slot": (lambda w, r: (w.seal(r[0], 1, runs=(7,)), w.seal(r[1], 1, runs=(7,))), ReplicaMismatch),
    "a rank without an endpoint": (lambda w, r: (t := w.trainer(0, incarnation="b", endpoint=None), w.seal(t, 1)), WireMismatch),
    "a rank of a later run": (lambda w, r: (t := w.trainer(0, run="run-2", incarnation="b"), w.seal(t, 1)), VersionRetired),
}


@pytest.mark.parametrize(("act", "error"), SEAL_REFUSED.values(), ids=SEAL_REFUSED)
def test_seal_refuses(world: World, ranks: tuple[WorkerRef, WorkerRef], act: Act, error: type[RefitError]) -> None:
    world.create(ranks[0])
    with pytest.raises(error):
        act(world, ranks)


def test_a_new_run_ends_what_the_old_one_was_publishing_and_keeps_what_is_ready(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    ready = world.publish(0, ranks)
    world.create(ranks[0], step=1)
    world.trainer(0, run="run-2", incarnation="b")
    assert world.phase(ready) == "Ready"
    assert world.phase(2) == "Failed"
    assert world.group.versions[2].version.reason.startswith("RunReplaced: ")
    world.trainer(1, run="run-2", incarnation="b")
    ref = WorkerRef("trainer-0", wire.Role.TRAINER, 0, "b")
    created = world.create(ref, step=1, run="run-2").version
    assert created is not None
    assert created.number == 3  # a step trained again is a new version


def test_the_publish_deadline(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    world.create(ranks[0])
    world.seal(ranks[0], 1)
    world.wait(149.0, *ranks)
    assert world.phase(1) == "Publishing"
    world.wait(2.0, *ranks)
    assert world.phase(1) == "Failed"
    assert world.group.versions[1].version.reason == "PublishDeadlineExceeded: 1 of 2 slots were not sealed in 150 s (1)"


def test_a_publish_closes_the_version_whose_arena_it_reuses(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    reader = WorkerRef("gen-0", wire.Role.GENERATOR, 0, "a")
    world.publish(0, ranks)
    world.lease(reader, 1, *ranks)
    assert world.create(ranks[1], step=1).version is not None
    assert {holder.closed_at for holder in world.group.held(1)} == {world.now}
    assert world.close(ranks[0], 1) == ("gen-0",)
    with pytest.raises(PeerUnavailable, match="closed"):
        world.lease(world.generator("gen-1"), 1, ranks[0])


def test_two_arenas_keep_one_version_beside_the_new_one(make_world: Callable[..., World]) -> None:
    world = make_world(arenas=2)
    world.generator()
    for step in range(3):
        world.publish(step)
    assert [number for number in world.group.versions if any(holder.closed_at is None for holder in world.group.held(number))] == [2, 3]


def test_a_publish_waits_while_other_ranks_still_publish_the_arena_it_reuses(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    world.create(ranks[0])
    world.seal(ranks[0], 1)
    plan_key = world.group.versions[1].version.plan_key
    request = wire.CreateVersion(GROUP, ranks[0], "run-1:1", "run-1", 1, plan_key, ("0", "1"))
    assert isinstance(world.look("CreateVersion", request), Pending)
    world.seal(ranks[1], 1)
    assert world.phase(1) == "Ready"
    assert world.call("CreateVersion", request).version.number == 2


def test_skip_gives_all_ranks_none_while_the_arena_is_read(make_world: Callable[..., World]) -> None:
    world = make_world(on_busy="Skip")
    reader = world.generator()
    number = world.publish()
    trainers = WorkerRef("trainer-0", wire.Role.TRAINER, 0, "a"), WorkerRef("trainer-1", wire.Role.TRAINER, 1, "a")
    world.lease(reader, number, trainers[1])
    assert world.create(trainers[0], step=1).skipped
    world.call("ReleaseLease", wire.ReleaseLease(GROUP, reader, number))
    assert world.create(trainers[1], step=1).skipped  # decided by the first call of the key
    assert all(holder.closed_at is None for holder in world.group.held(number))
    created = world.create(trainers[0], step=2)
    assert created.version is not None
    assert created.version.number == 2


ENDS: dict[str, tuple[str, str, str]] = {
    "abort while it is published": ("AbortVersion", "Publishing", "Failed"),
    "retire while it is published": ("RetireVersion", "Publishing", "Failed"),
    "retire": ("RetireVersion", "Ready", "Releasing"),
    "abort of a Ready one drains it": ("AbortVersion", "Ready", "Releasing"),
    "again": ("RetireVersion", "Releasing", "Releasing"),
}


@pytest.mark.parametrize(("method", "before", "after"), ENDS.values(), ids=ENDS)
def test_ends(world: World, ranks: tuple[WorkerRef, WorkerRef], method: str, before: str, after: str) -> None:
    if before == "Publishing":
        world.create(ranks[0])
    else:
        world.lease(WorkerRef("gen-0", wire.Role.GENERATOR, 0, "a"), world.publish(0, ranks), *ranks)
    if before == "Releasing":
        world.call("RetireVersion", wire.EndVersion(GROUP, 1))
    assert world.phase(1) == before
    world.call(method, wire.EndVersion(GROUP, 1, "enough"))
    assert world.phase(1) == after
    assert all(holder.closed_at is not None for holder in world.group.held(1))


def test_a_version_in_use_is_ended_by_the_operator_only(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    number = world.publish(0, ranks)
    world.group = replace(world.group, protected=frozenset({number}))
    with pytest.raises(VersionRetired, match="in use"):
        world.call("RetireVersion", wire.EndVersion(GROUP, number))
    world.group = end(world.group, number, "Retired: deleted", world.now)
    assert world.phase(number) == "Releasing"


def test_released_when_the_last_reader_is_gone(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    reader = WorkerRef("gen-0", wire.Role.GENERATOR, 0, "a")
    number = world.publish(0, ranks)
    world.lease(reader, number, ranks[0])
    world.call("RetireVersion", wire.EndVersion(GROUP, number))
    world.tick()
    assert world.phase(number) == "Releasing"
    world.call("ReleaseLease", wire.ReleaseLease(GROUP, reader, number))
    world.tick()
    assert world.phase(number) == "Released"
    assert world.group.holders == {}
    world.group = remove(world.group, number)
    with pytest.raises(VersionRetired, match="unknown"):
        world.call("GetVersion", wire.GetVersion(GROUP, number))


LOST: dict[str, tuple[Callable[[World, WorkerRef], object], str]] = {
    "nobody": (lambda w, g: None, "Failed"),
    "a reader": (lambda w, g: w.lease(g, 1, WorkerRef("trainer-0", wire.Role.TRAINER, 0, "a")), "Ready"),
    "one that serves it": (lambda w, g: w.report(g, serving=1), "Ready"),
    "one that stages it": (lambda w, g: w.report(g, staging=1), "Ready"),
    "one that holds it": (lambda w, g: w.hold(g, 1), "Ready"),
}


@pytest.mark.parametrize(("left", "phase"), LOST.values(), ids=LOST)
def test_a_version_whose_trainers_closed_lives_on_with(world: World, left: Callable[[World, WorkerRef], object], phase: str) -> None:
    reader = world.generator()
    trainers = world.trainer(0), world.trainer(1)
    world.publish(0, trainers)
    left(world, reader)
    for ref in trainers:
        world.close(ref, 1)
    world.tick()
    assert world.phase(1) == phase
    if phase == "Failed":
        assert world.group.versions[1].version.reason.startswith("HoldersLost: ")


def test_a_superseded_version_that_everybody_left_is_released_not_failed(world: World, ranks: tuple[WorkerRef, WorkerRef]) -> None:
    world.publish(0, ranks)
    world.publish(1, ranks)
    world.tick()
    world.tick()
    assert (world.phase(1), world.phase(2)) == ("Released", "Ready")


def test_every_phase_ends_and_nothing_returns_from_an_end() -> None:
    assert set(MOVES) == set(VersionPhase)
    assert {phase: MOVES[phase] for phase in ENDED} == {VersionPhase.RELEASED: frozenset(), VersionPhase.FAILED: frozenset()}

    def reaches_end(phase: VersionPhase) -> bool:
        return phase in ENDED or all(reaches_end(following) for following in MOVES[phase])

    assert all(reaches_end(phase) for phase in VersionPhase)

"""No read without a lease, no memory reused under one, and the last copy of what is served is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from refit_api import wire
from refit_api.errors import LeaseLost, PeerUnavailable, RefitError, StaleOrder, VersionRetired
from refit_api.wire import Role, WorkerRef
from refit_operator.catalog.facts import GeneratorKey, Pending
from refit_operator.catalog.workers import class_of

if TYPE_CHECKING:
    from tests.catalog.conftest import World
else:
    World = Any

GROUP = wire.GroupRef("ns", "demo")
TRAINERS = WorkerRef("trainer-0", Role.TRAINER, 0, "a"), WorkerRef("trainer-1", Role.TRAINER, 1, "a")
READER = WorkerRef("gen-0", Role.GENERATOR, 0, "a")


@pytest.fixture
def ready(world: World) -> World:
    """Version 1 is Ready, and nobody reads it."""
    world.generator()
    world.publish()
    return world


LEASE_REFUSED: dict[str, tuple[Callable[[World], object], type[RefitError], str]] = {
    "a version that is unknown": (lambda w: w.lease(READER, 9, *TRAINERS), VersionRetired, "unknown"),
    "a version that drains": (lambda w: (w.call("RetireVersion", wire.EndVersion(GROUP, 1)), w.lease(READER, 1, *TRAINERS)), VersionRetired, "Releasing"),
    "a holder that closed": (lambda w: (w.close(TRAINERS[0], 1), w.lease(READER, 1, *TRAINERS)), PeerUnavailable, "closed"),
    "who does not hold it": (lambda w: w.lease(READER, 1, w.generator("gen-1")), PeerUnavailable, "does not offer"),
    "a holder that started again": (
        lambda w: (w.trainer(0, incarnation="b"), w.lease(READER, 1, TRAINERS[0])),
        PeerUnavailable,
        "does not offer",
    ),
    "by who is not registered any more": (lambda w: (w.generator(incarnation="b"), w.lease(READER, 1, *TRAINERS)), StaleOrder, "replaced"),
}


@pytest.mark.parametrize(("act", "error", "text"), LEASE_REFUSED.values(), ids=LEASE_REFUSED)
def test_no_lease_on(ready: World, act: Callable[[World], object], error: type[RefitError], text: str) -> None:
    with pytest.raises(error, match=text):
        act(ready)


def test_sources_are_told_by_slot_and_by_coordinate_of_the_class(ready: World) -> None:
    relay, other = ready.generator("gen-1"), ready.generator("gen-2", layout="other needs")
    for ref in (relay, other):
        ready.hold(ref, 1)

    def sources(**fields: Any) -> list[str]:
        return sorted(source.worker.pod_uid for source in ready.call("ListShards", wire.ListShards(GROUP, 1, **fields)).sources)

    name = class_of(ready.group, GeneratorKey("gen-1", "0"))
    assert sources() == ["trainer-0", "trainer-1"]
    assert sources(slots=("1",), coordinate="tp0", class_hash=name) == ["gen-1", "trainer-1"]
    assert sources(slots=("1",), coordinate="tp0") == ["gen-1", "gen-2", "trainer-1"]
    assert sources(slots=("1",), coordinate="tp9") == ["trainer-1"]


def test_open_shards_may_be_leased_while_the_version_is_published(world: World) -> None:
    world.generator()
    ranks = world.trainer(0), world.trainer(1)
    world.create(ranks[0])
    world.call("OpenShard", wire.OpenShard(GROUP, ranks[0], 1, "0", 100))
    world.lease(READER, 1, ranks[0])
    assert not world.call("ListShards", wire.ListShards(GROUP, 1)).sources[0].complete


def test_memory_is_free_when_the_last_lease_on_this_holder_is_gone(ready: World) -> None:
    ready.lease(READER, 1, TRAINERS[0])
    assert ready.close(TRAINERS[1], 1) == ()
    waiting = ready.look("CloseHolder", wire.CloseHolder(GROUP, TRAINERS[0], 1, 20.0))
    assert waiting == Pending(ready.now + 20.0, wire.Closed(("gen-0",)))
    ready.call("ReleaseLease", wire.ReleaseLease(GROUP, READER, 1))
    assert ready.close(TRAINERS[0], 1) == ()


def test_a_lease_ends_with_its_last_rank(world: World) -> None:
    ranks = world.generator(rank=0, world=2), world.generator(rank=1, world=2)
    world.publish()
    world.lease(ranks[0], 1, TRAINERS[0])
    world.lease(ranks[1], 1, TRAINERS[1])
    world.call("ReleaseLease", wire.ReleaseLease(GROUP, ranks[0], 1))
    assert (world.close(TRAINERS[0], 1), world.close(TRAINERS[1], 1)) == ((), ("gen-0",))
    world.call("ReleaseLease", wire.ReleaseLease(GROUP, ranks[1], 1))
    assert world.group.leases == {}


def test_a_replaced_process_does_not_give_up_its_successor_s_lease(ready: World) -> None:
    new = ready.generator(incarnation="b")
    ready.lease(new, 1, TRAINERS[0])
    ready.call("ReleaseLease", wire.ReleaseLease(GROUP, READER, 1))
    assert ready.close(TRAINERS[0], 1) == ("gen-0",)


def test_a_lease_that_is_not_renewed_runs_out(ready: World) -> None:
    ready.lease(READER, 1, *TRAINERS)
    ready.wait(29.0, READER, *TRAINERS)
    ready.call("RenewLease", wire.RenewLease(GROUP, READER, 1))
    ready.wait(29.0, READER, *TRAINERS)
    assert ready.close(TRAINERS[0], 1) == ("gen-0",)
    ready.wait(2.0, READER, *TRAINERS)
    assert ready.close(TRAINERS[0], 1) == ()
    with pytest.raises(LeaseLost):
        ready.call("RenewLease", wire.RenewLease(GROUP, READER, 1))


def test_a_reader_may_name_more_holders_while_one_of_its_own_is_closing(ready: World) -> None:
    ready.lease(READER, 1, TRAINERS[0])
    ready.close(TRAINERS[0], 1)
    ready.lease(READER, 1, *TRAINERS)
    assert (ready.close(TRAINERS[0], 1), ready.close(TRAINERS[1], 1)) == (("gen-0",), ("gen-0",))
    ready.wait(25.0, READER, *TRAINERS)
    ready.call("RenewLease", wire.RenewLease(GROUP, READER, 1))
    ready.wait(25.0, READER, *TRAINERS)
    ready.call("RenewLease", wire.RenewLease(GROUP, READER, 1))
    ready.wait(12.0, READER, *TRAINERS)
    with pytest.raises(LeaseLost, match="are over"):  # asking anew does not prolong it
        ready.lease(READER, 1, *TRAINERS)
    ready.lease(READER, 1)


CLOSED_BY: dict[str, Callable[[World], object]] = {
    "its holder": lambda w: w.close(TRAINERS[0], 1),
    "retirement": lambda w: w.call("RetireVersion", wire.EndVersion(GROUP, 1)),
}


@pytest.mark.parametrize("close", CLOSED_BY.values(), ids=CLOSED_BY)
def test_after_a_close_renewals_end_with_the_drain_so_memory_is_free_within_drain_and_lease(ready: World, close: Callable[[World], object]) -> None:
    ready.lease(READER, 1, *TRAINERS)
    start = ready.now
    close(ready)
    refused = None
    while ready.close(TRAINERS[0], 1):
        try:
            ready.call("RenewLease", wire.RenewLease(GROUP, READER, 1))
        except LeaseLost:
            refused = refused if refused is not None else ready.now - start
        ready.wait(5.0, READER, *TRAINERS)
    assert refused is not None
    assert 60.0 < refused <= 65.0
    assert 60.0 + 25.0 <= ready.now - start <= 60.0 + 30.0 + 5.0


def test_an_engine_rank_is_a_holder_by_what_it_reports(ready: World) -> None:
    def holder() -> tuple[bool, bool] | None:
        found = ready.group.holder(1, READER)
        return None if found is None else (found.complete, found.closed_at is not None)

    ready.report(READER, staging=1)
    assert holder() == (False, False)
    ready.report(READER, arena=1, arena_complete=True)
    assert holder() == (True, False)
    ready.close(READER, 1, leaving=True)
    ready.report(READER, arena=1, arena_complete=True)
    assert holder() == (True, True)  # a late report reopens nothing
    ready.report(READER, staging=0)
    assert holder() is None
    ready.report(READER, staging=1)
    assert holder() == (False, False)


NO_HOLDER: dict[str, dict[str, Any]] = {
    "a plan that is not the version's": {"arena": 1, "arena_complete": True, "plan_key": "f" * 64},
    "a version nobody knows": {"arena": 7, "arena_complete": True},
    "nothing": {},
}


@pytest.mark.parametrize("fields", NO_HOLDER.values(), ids=NO_HOLDER)
def test_no_holder_with(ready: World, fields: dict[str, Any]) -> None:
    ready.report(READER, **fields)
    assert [holder.ref.role for number in ready.group.holders for holder in ready.group.held(number)] == [Role.TRAINER, Role.TRAINER]


def test_a_rank_that_serves_no_manifest_is_no_holder(ready: World) -> None:
    silent = ready.generator("gen-1", endpoint=None)
    ready.hold(silent, 1)
    assert ready.group.holder(1, silent) is None


def test_a_pod_reports_its_own_ranks_only(ready: World) -> None:
    with pytest.raises(StaleOrder, match="belongs to pod"):
        ready.report(READER, ready.generator("gen-1"))


def test_a_restarted_agent_is_heard(ready: World) -> None:
    """It does not know yet what its ranks were told."""
    ready.report(READER, seq=5, serving=1)
    ready.report(READER, seq=0, serving=1)
    assert next(iter(ready.group.reports.values())).seq == 0


def last(world: World, **changed: Callable[[World], object]) -> None:
    """gen-0 is the only holder of version 1, the current one, and is sent to version 2, which nobody offers."""
    world.generator()
    world.generator("gen-1")
    ranks = world.trainer(0), world.trainer(1)
    world.publish(0, ranks)
    world.hold(READER, 1)
    world.publish(1, ranks)
    world.close(ranks[0], 2)
    world.group = replace(world.group, current=1)
    world.assign(READER, 2)


KEPT: dict[str, tuple[Callable[[World], object], bool]] = {
    "the last holder of the current version": (lambda w: None, True),
    "another rank holds it too": (lambda w: w.hold(WorkerRef("gen-1", Role.GENERATOR, 0, "a"), 1), False),
    "another rank holds the new one": (lambda w: w.hold(WorkerRef("gen-1", Role.GENERATOR, 0, "a"), 2), False),
    "another rank is still staging the new one": (lambda w: w.report(WorkerRef("gen-1", Role.GENERATOR, 0, "a"), staging=2), True),
    "it is not the current version": (lambda w: setattr(w, "group", replace(w.group, current=0)), False),
    "it goes nowhere else": (lambda w: w.assign(READER, 1), False),
    "the class has one generator": (lambda w: w.call("Deregister", wire.Deregister(GROUP, WorkerRef("gen-1", Role.GENERATOR, 0, "a"))), False),
}


@pytest.mark.parametrize(("act", "kept"), KEPT.values(), ids=KEPT)
def test_the_last_holder_keeps_the_current_version(world: World, act: Callable[[World], object], kept: bool) -> None:
    last(world)
    act(world)
    if kept:
        with pytest.raises(PeerUnavailable, match="last that holds version 1") as refused:
            world.close(READER, 1)
        assert refused.value.retry_after
        assert world.close(READER, 1, leaving=True) == ()
    else:
        assert world.close(READER, 1) == ()


def test_trainers_that_offer_the_new_version_free_the_last_holder_of_the_old(ready: World) -> None:
    ready.generator("gen-1")
    ready.hold(READER, 1)
    ready.publish(1, TRAINERS)
    ready.group = replace(ready.group, current=1)
    ready.assign(READER, 2)
    assert ready.close(READER, 1) == ()


def test_orders_of_a_generator_only_grow_also_when_it_was_away(world: World) -> None:
    ref = world.generator()
    world.assign(ref, 1)
    first = world.call("WatchAssignment", wire.WatchAssignment(GROUP, ref))
    world.wait(40.0)
    world.generator()
    world.assign(ref, 2)
    second = world.call("WatchAssignment", wire.WatchAssignment(GROUP, ref))
    assert (first.catalog_epoch, first.seq, first.target) == (1, 1, 1)
    assert (second.catalog_epoch, second.seq, second.target) == (1, 2, 2)

"""Who is heard, what follows from layouts, and when somebody is gone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from refit_api import wire
from refit_api.errors import CatalogUnavailable, Denied, EngineMismatch, NoClass, PeerUnavailable, RefitError, SpecError, StaleOrder, WireMismatch
from refit_api.wire import Role, WorkerRef
from refit_operator.catalog.workers import depart, missing, plan_document

if TYPE_CHECKING:
    from tests.catalog.conftest import World
else:
    World = Any

GROUP = wire.GroupRef("ns", "demo")

REFUSED: dict[str, tuple[Callable[[World], object], type[RefitError], str]] = {
    "another protocol": (lambda w: w.trainer(0, protocol=99), WireMismatch, "protocol 99"),
    "another model": (lambda w: w.trainer(0, model="qwen"), SpecError, "'qwen'"),
    "a rank beyond the world": (lambda w: w.trainer(2, world=2), SpecError, "from 0 to 1"),
    "another pod has the rank": (lambda w: (w.trainer(0), w.trainer(0, pod="twin")), Denied, "two pods may not have one rank"),
    "ranks disagree about the world": (lambda w: (w.trainer(0, world=2), w.trainer(1, world=4)), SpecError, "world of 4"),
    "a run that was replaced": (lambda w: (w.trainer(0), w.trainer(0, run="run-2", incarnation="b"), w.trainer(1)), StaleOrder, "run-2"),
    "a process that was replaced": (lambda w: (w.trainer(0), w.trainer(0, incarnation="b"), w.trainer(0)), StaleOrder, "was replaced"),
    "one coordinate with two layouts": (
        lambda w: (w.generator(rank=0, world=2, coordinate="tp0"), w.generator(rank=1, world=2, coordinate="tp0")),
        EngineMismatch,
        "need different tensors",
    ),
    "a layout with another hash": (lambda w: w.call("PutLayout", wire.Blob(GROUP, "0" * 64, b"x")), WireMismatch, "another hash"),
}


@pytest.mark.parametrize(("act", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(make_world: Callable[..., World], act: Callable[[World], object], error: type[RefitError], text: str) -> None:
    world = make_world()
    if error is SpecError and "qwen" in text:
        world = make_world(model="llama")
    with pytest.raises(error, match=text):
        act(world)


def test_a_layout_of_nobody_is_not_stored(world: World) -> None:
    with pytest.raises(Denied, match="register first"):
        world.call("PutLayout", wire.Blob(GROUP, hashlib.sha256(b"x").hexdigest(), b"x"))


def test_a_layout_is_sent_once_and_read_by_all(world: World) -> None:
    first = world.register(WorkerRef("g1", Role.GENERATOR, 0, "a"), 1, layout="needs", coordinate="tp0")
    second = world.register(WorkerRef("g2", Role.GENERATOR, 0, "a"), 1, layout="needs", coordinate="tp0")
    assert (first.want_layout, second.want_layout) == (True, False)
    name = world.group.workers[next(iter(world.group.workers))].layout
    assert world.call("GetLayout", wire.GetLayout(GROUP, name)).data == b"needs"


def test_the_plan_waits_for_all_trainer_ranks_and_one_whole_engine(world: World) -> None:
    assert isinstance(missing(world.group), PeerUnavailable)
    world.trainer(0)
    lacking = missing(world.group)
    assert isinstance(lacking, PeerUnavailable)
    assert "ranks 1 of 2" in lacking.message
    world.trainer(1)
    world.generator(rank=0, world=2)
    lacking = missing(world.group)
    assert isinstance(lacking, NoClass)
    assert "1 of 2 ranks" in lacking.message
    world.generator(rank=1, world=2)
    assert missing(world.group) is None


def test_the_plan_key_is_the_hash_of_layouts_classes_and_redundancy(world: World, make_world: Callable[..., World]) -> None:
    def planned(into: World) -> tuple[str, dict[str, Any]]:
        into.generator()
        into.trainer(0)
        into.trainer(1)
        key, document = plan_document(into.group)
        return key, json.loads(document)

    key, document = planned(world)
    assert document["redundancy"] == 1
    assert set(document["trainer"]) == {"0", "1"}
    assert [set(known) for known in document["classes"].values()] == [{"tp0"}]
    world.generator("gen-1")  # equal needs: the same class
    assert plan_document(world.group)[0] == key
    assert planned(make_world(redundancy=2))[0] != key
    other = make_world()
    other.generator(layout="other needs")
    assert planned(other)[0] != key
    assert json.loads(world.call("GetLayout", wire.GetLayout(GROUP, key)).data) == document


def test_a_new_process_voids_what_the_old_one_held(world: World) -> None:
    reader = world.generator()
    number = world.publish()
    trainer = WorkerRef("trainer-0", Role.TRAINER, 0, "a")
    world.lease(reader, number, trainer)
    again = world.trainer(0, incarnation="b")
    assert world.group.holder(number, again) is None
    assert world.close(again, number) == ()  # the reader reads from a process that is gone
    with pytest.raises(StaleOrder):
        world.call("CloseHolder", wire.CloseHolder(GROUP, trainer, number))
    world.generator(incarnation="b")  # the reader too: its lease is void at once
    assert world.group.leases == {}


def test_missed_heartbeats(world: World) -> None:
    trainer, generator = world.trainer(0), world.generator()
    world.wait(29.0, generator)
    assert len(world.group.workers) == 2
    world.wait(2.0, generator)
    assert [key.role for key in world.group.workers] == [Role.GENERATOR]
    assert not world.call("Heartbeat", wire.Heartbeat(GROUP, trainer)).known
    with pytest.raises(CatalogUnavailable, match="register again"):
        world.close(trainer, 1)
    world.trainer(0)  # the same process comes back: it was only cut off
    assert world.call("Heartbeat", wire.Heartbeat(GROUP, trainer)).known


def test_a_process_that_was_replaced_is_told_to_end(world: World) -> None:
    old = world.trainer(0)
    world.trainer(0, incarnation="b")
    with pytest.raises(StaleOrder):
        world.call("Heartbeat", wire.Heartbeat(GROUP, old))


def test_a_gone_pod_frees_its_rank_but_not_what_it_may_still_read(world: World) -> None:
    reader = world.generator()
    number = world.publish()
    holder = WorkerRef("trainer-0", Role.TRAINER, 0, "a")
    world.lease(reader, number, holder)
    world.group = depart(depart(world.group, "gen-0"), "trainer-1")
    assert world.close(holder, number) == ("gen-0",)
    world.trainer(1, pod="successor")
    world.wait(31.0, holder)
    assert world.close(holder, number) == ()


def test_a_class_stays_at_zero_replicas_and_goes_when_another_took_its_place(world: World) -> None:
    world.generator()
    old = set(world.group.classes)
    world.wait(200.0)
    assert set(world.group.classes) == old
    new = world.generator("gen-1", layout="the new template's needs")
    assert set(world.group.classes) > old
    world.wait(200.0, new)
    assert set(world.group.classes).isdisjoint(old)
    assert len(world.group.classes) == 1


def test_layouts_that_nobody_can_ask_for_are_forgotten(world: World) -> None:
    ref = world.trainer(0, layout="only mine")
    world.tick()
    assert b"only mine" in world.group.blobs.values()
    world.call("Deregister", wire.Deregister(GROUP, ref))
    world.tick()
    assert b"only mine" not in world.group.blobs.values()


def test_a_version_keeps_the_layouts_of_its_plan(world: World) -> None:
    reader = world.generator()
    number = world.publish()
    world.hold(reader, number)
    plan_key = world.group.versions[number].version.plan_key
    for rank in (0, 1):
        world.call("Deregister", wire.Deregister(GROUP, WorkerRef(f"trainer-{rank}", Role.TRAINER, rank, "a")))
    world.tick()
    document = json.loads(world.call("GetLayout", wire.GetLayout(GROUP, plan_key)).data)
    for layout in document["trainer"].values():
        assert world.call("GetLayout", wire.GetLayout(GROUP, layout)).data


def test_an_old_process_deregisters_nothing(world: World) -> None:
    old = world.trainer(0)
    new = world.trainer(0, incarnation="b")
    world.call("Deregister", wire.Deregister(GROUP, old))
    assert [worker.ref for worker in world.group.workers.values()] == [new]

"""Subsets: a version that is another one with some tensors replaced exists only while the trainers' memory holds that other one, whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from refit_api import wire
from refit_api.errors import CatalogUnavailable, PeerUnavailable, SpecError, VersionRetired
from refit_api.wire import Select, VersionPhase, WorkerRef
from refit_operator.catalog import model
from refit_operator.catalog.facts import Moment, Pending
from refit_operator.ports import Recorded, RecordedVersion

if TYPE_CHECKING:
    from tests.catalog.conftest import World
else:
    World = Any

GROUP = wire.GroupRef("ns", "demo")
LAYER = Select(layers=(1,))
Ranks = tuple[WorkerRef, WorkerRef]


@pytest.fixture
def ranks(world: World) -> Ranks:
    """Version 1 is Ready and held by two trainer ranks."""
    world.generator()
    both = world.trainer(0), world.trainer(1)
    world.publish(0, both)
    return both


def test_all_ranks_get_one_subset_and_the_base_is_closed_where_its_memory_is_reused(world: World, ranks: Ranks) -> None:
    first, second = (world.create(ref, 1, base=1, select=LAYER).version for ref in ranks)
    assert first is not None
    assert first == second == world.create(ranks[0], 1, base=1, select=LAYER).version
    assert (first.number, first.base, first.select, first.phase) == (2, 1, LAYER, VersionPhase.PUBLISHING)
    assert all(holder.closed_at is not None for holder in world.group.held(1))
    for ref in ranks:
        world.seal(ref, 2)
    facts = world.call("GetVersion", wire.GetVersion(GROUP, 2))
    assert (facts.version.phase, facts.version.base, facts.version.select) == (VersionPhase.READY, 1, LAYER)
    assert set(facts.run_roots) == {0, 1}  # of all tensors


def test_subsets_follow_each_other(world: World, ranks: Ranks) -> None:
    for step, base in ((1, 1), (2, 2), (3, 3)):
        for ref in ranks:
            created = world.create(ref, step, base=base, select=LAYER)
            assert created.version is not None
        for ref in ranks:
            world.seal(ref, created.version.number)
    assert world.phase(4) == "Ready"


@pytest.mark.parametrize(
    ("base", "select"),
    [(1, Select(layers=(2,))), (1, Select(params=("layers.1.w",))), (0, None)],
    ids=["another layer", "by name", "all tensors"],
)
def test_ranks_that_select_otherwise_are_refused(world: World, ranks: Ranks, base: int, select: Select | None) -> None:
    world.create(ranks[0], 1, base=1, select=LAYER)
    before = world.group
    with pytest.raises(SpecError, match="every rank has to give the same select"):
        world.create(ranks[1], 1, base=base, select=select)
    assert world.group is before


def abort(world: World, ranks: Ranks) -> None:
    """Version 2 overwrote what the trainers held, and failed."""
    world.create(ranks[0], 1)
    world.call("AbortVersion", wire.EndVersion(GROUP, 2))


def next_run(world: World, ranks: Ranks) -> None:
    for ref in ranks:
        world.trainer(ref.rank, run="run-2", incarnation="b")


GONE: dict[str, tuple[Callable[[World, Ranks], object], int, str]] = {
    "unknown": (lambda w, r: None, 9, "it is unknown"),
    "retired": (lambda w, r: w.call("RetireVersion", wire.EndVersion(GROUP, 1)), 1, "it is Releasing"),
    "not the newest": (lambda w, r: w.publish(5, r), 1, "version 2 is newer"),
    "given up by a rank": (lambda w, r: w.close(r[0], 1), 1, "the trainers do not hold it any more"),
    "overwritten by a version that failed": (abort, 1, "the trainers do not hold it any more"),
    "failed itself": (abort, 2, "it is Failed"),
    "planned for other engines": (lambda w, r: w.generator("gen-1", layout="other"), 1, "the layouts of the group changed since"),
}


@pytest.mark.parametrize(("act", "base", "why"), GONE.values(), ids=GONE)
def test_a_base_that_is_gone_is_refused_with_the_reason(world: World, ranks: Ranks, act: Callable[[World, Ranks], object], base: int, why: str) -> None:
    act(world, ranks)
    before = world.group.versions
    with pytest.raises(VersionRetired, match=why):
        world.create(ranks[0], 6, base=base, select=LAYER)
    assert world.group.versions == before


def test_a_base_of_the_run_before_is_refused(world: World, ranks: Ranks) -> None:
    next_run(world, ranks)
    ref = WorkerRef("trainer-0", wire.Role.TRAINER, 0, "b")
    with pytest.raises(VersionRetired, match="it belongs to run 'run-1'"):
        world.create(ref, 1, run="run-2", base=1, select=LAYER)


def test_a_base_that_other_ranks_still_publish_is_waited_for(make_world: Callable[..., World]) -> None:
    world = make_world(arenas=2)
    world.generator()
    ranks = world.trainer(0), world.trainer(1)
    plan_key = world.create(ranks[0], 0).plan_key
    world.seal(ranks[0], 1)
    request = wire.CreateVersion(GROUP, ranks[0], "run-1:1", "run-1", 1, plan_key, ("0", "1"), 1, LAYER)
    waiting = world.look("CreateVersion", request)
    assert isinstance(waiting, Pending)
    assert isinstance(waiting.otherwise, PeerUnavailable)
    world.seal(ranks[1], 1)
    assert world.call("CreateVersion", request).version.base == 1


SELECTS: dict[str, tuple[int, Select | None, str]] = {
    "nothing": (1, Select(), "select names no tensor"),
    "a base without a selection": (1, None, "select names no tensor"),
    "a layer below 0": (1, Select(layers=(-1,)), "select.layers"),
    "an empty name": (1, Select(params=("",)), "select.params"),
    "a text beyond what a WeightVersion takes": (1, Select(layer_groups=("x" * 257,)), "select.layerGroups"),
}


@pytest.mark.parametrize(("base", "select", "message"), SELECTS.values(), ids=SELECTS)
def test_a_selection_that_no_record_could_hold_is_refused(world: World, ranks: Ranks, base: int, select: Select | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        world.create(ranks[0], 1, base=base, select=select)


def test_a_catalog_without_memory_knows_subsets_from_their_records_and_waits_for_the_base(world: World, ranks: Ranks, make_world: Callable[..., World]) -> None:
    created = world.create(ranks[0], 1, base=1, select=LAYER).version
    assert created is not None
    for ref in ranks:
        world.seal(ref, 2)
    known = tuple(
        RecordedVersion(v.number, v.key, v.run_id, v.step, v.plan_key, v.phase, v.root, v.bytes, len(v.slots), v.base, v.select)
        for v in (entry.version for entry in world.group.versions.values())
    )
    after = make_world(recorded=Recorded(world.group.epoch, world.group.ceiling, known))
    after.generator()
    for ref in ranks:
        after.trainer(ref.rank)
    version = after.group.versions[2].version
    assert (version.base, version.select) == (1, LAYER)
    request = wire.CreateVersion(GROUP, ranks[0], "run-1:2", "run-1", 2, created.plan_key, ("0", "1"), 2, LAYER)
    waiting = after.look("CreateVersion", request)
    assert isinstance(waiting, Pending)
    assert isinstance(waiting.otherwise, CatalogUnavailable)
    for ref in ranks:  # who comes back says what it holds
        after.call("OpenShard", wire.OpenShard(GROUP, ref, 2, str(ref.rank), 100))
    with pytest.raises(SpecError, match="every rank has to give the same select"):
        after.create(ranks[0], 1, base=1, select=Select(layers=(3,)))
    assert after.create(ranks[1], 1, base=1, select=LAYER).version is not None


def test_nothing_is_decided_about_the_base_while_memory_is_rebuilt(world: World, ranks: Ranks) -> None:
    world.group = replace(model.resume(world.group, 100.0), epoch_written=True, settled_at=world.now + 30.0)
    world.group = world.group.drop_holders(set(world.group.workers))
    plan_key = world.group.versions[1].version.plan_key
    request = wire.CreateVersion(GROUP, ranks[0], "run-1:1", "run-1", 1, plan_key, ("0", "1"), 1, LAYER)
    _, answer = model.handle(world.group, "CreateVersion", request, Moment(world.now, world.now))
    assert isinstance(answer, Pending)
    assert answer.until == world.group.settled_at
    assert isinstance(answer.otherwise, CatalogUnavailable)

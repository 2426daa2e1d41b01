"""The life of WeightVersion objects: made, kept, described, let go in bounded time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from refit_api.wire import Order, VersionPhase
from refit_operator.decide.actions import Abort, Action, Announce, Delete, ReleaseRecord, RemoveVersion, Retire
from refit_operator.decide.facts import CatalogFacts, Record
from refit_operator.decide.target import Versions
from refit_operator.decide.versions import end, retain, status

from tests.decide.world import NOW, catalog, failure, fleet, generator, order, record, spec, state

READY, PUBLISHING, RELEASING, RELEASED, FAILED = (VersionPhase[name] for name in ("READY", "PUBLISHING", "RELEASING", "RELEASED", "FAILED"))
BOUND = 90.0


def records(*numbers: int, **fields: Any) -> tuple[Record, ...]:
    return tuple(record(n, status={"phase": "Ready"}, **fields) for n in numbers)


@pytest.mark.parametrize(
    ("kept", "versions", "goes"),
    [
        pytest.param(records(1, 2), Versions(2, 2, 1), [], id="fewer than retain"),
        pytest.param(records(1, 2, 3, 4), Versions(4, 4, 3), [1, 2], id="the oldest go"),
        pytest.param(records(1, 2, 3, 4), Versions(4, 1, 0), [2], id="not the current one"),
        pytest.param(records(1, 2, 3, 4), Versions(4, 2, 1), [], id="nor the one before it"),
        pytest.param((*records(1, hold=True), *records(2, 3, 4)), Versions(4, 4, 3), [2], id="nor a held one"),
        pytest.param((*records(1, deleted=NOW), *records(2, 3, 4)), Versions(4, 4, 3), [2], id="what goes already is not counted"),
        pytest.param((record(1), *records(2, 3, 4)), Versions(4, 4, 3), [2], id="one that is being published is left alone"),
    ],
)
def test_retention(kept: tuple[Record, ...], versions: Versions, goes: list[int]) -> None:
    gone = retain(spec(versions__retain=2), kept, catalog(), versions)
    assert [action.uid for action in gone if isinstance(action, Delete)] == [f"uid-{n}" for n in reversed(goes)]


def test_a_pinned_version_is_kept() -> None:
    assert retain(spec(versions__retain=1, rollout={"policy": "Pinned", "pinnedVersion": 1}), records(1, 2), catalog(), Versions(1, 2, 0)) == []


def test_versions_without_a_record_are_retired_as_well() -> None:
    """With recordEvery above 1 most versions have none; they must not pile up."""
    facts = catalog(versions=tuple(state(n) for n in range(1, 7)))
    gone = retain(spec(versions__retain=2), records(4), facts, Versions(6, 6, 1))
    assert [action.number for action in gone if isinstance(action, Retire)] == [3, 2]


DELETED = record(3, deleted=NOW - 1)
LET_GO = [ReleaseRecord("demo-v000000003", "uid-3"), RemoveVersion(3)]
ABORTED = [Abort(3, "Aborted: its WeightVersion was deleted")]
RETIRED = [Retire(3, "Retired: its WeightVersion was deleted")]


@pytest.mark.parametrize(
    ("one", "facts", "now", "actions"),
    [
        pytest.param(DELETED, catalog(versions=(state(3, PUBLISHING),)), NOW, ABORTED, id="deleted while publishing: aborted"),
        pytest.param(DELETED, catalog(versions=(state(3),)), NOW, RETIRED, id="deleted when ready: retired, also when it is in use"),
        pytest.param(DELETED, catalog(versions=(state(3, RELEASING, leases=1),)), NOW, [], id="readers finish"),
        pytest.param(DELETED, catalog(versions=(state(3, RELEASED),)), NOW, LET_GO, id="no reader is left: let go"),
        pytest.param(DELETED, catalog(versions=(state(3, FAILED),)), NOW, LET_GO, id="failed: let go"),
        pytest.param(DELETED, catalog(), NOW, LET_GO[:1], id="nobody knows it: let go"),
        pytest.param(DELETED, catalog(settled=False), NOW, [], id="unknown is not gone while the catalog rebuilds"),
        pytest.param(DELETED, catalog(settled=False), NOW + BOUND, LET_GO[:1], id="but not for ever"),
        pytest.param(replace(DELETED, finalized=False), catalog(versions=(state(3),)), NOW, [], id="what has no finalizer of ours is not ours to hold"),
        pytest.param(
            record(3, abort=True), catalog(versions=(state(3, PUBLISHING),)), NOW, [Abort(3, "Aborted: spec.abort is set")], id="abort while publishing"
        ),
        pytest.param(record(3, abort=True), catalog(versions=(state(3),)), NOW, [Retire(3, "Retired: spec.abort is set")], id="abort later retires"),
        pytest.param(record(9, abort=True), catalog(versions=(state(9),)), NOW, [], id="but not the version in use"),
    ],
)
def test_endings(one: Record, facts: CatalogFacts, now: float, actions: list[Action]) -> None:
    assert end((one,), facts, Versions(9, 9, 8), BOUND, now) == actions


def test_leases_that_outlive_the_bound_are_announced_and_overruled() -> None:
    actions = end((DELETED,), catalog(versions=(state(3, RELEASING, leases=2),)), None, BOUND, NOW + BOUND)
    assert isinstance(actions[0], Announce)
    assert actions[0].reason == "DrainDeadlineExceeded"
    assert actions[1:] == LET_GO


SERVES = {"serving": 2, "arena": 2, "assignment": order(2, Order.COMMIT)}


@pytest.mark.parametrize(
    ("facts", "says", "adoption"),
    [
        pytest.param(
            catalog(generator("a"), versions=(state(2, PUBLISHING, offered=False),)),
            {"Ready": ("False", "SlotsMissing"), "Converged": ("False", "Installing")},
            (1, 0, 0, 0),
            id="being published",
        ),
        pytest.param(
            catalog(generator("a", arena=2, assignment=order(2)), generator("b", **SERVES), versions=(state(2),)),
            {
                "Ready": ("True", "AllSlotsSealed"),
                "Available": ("True", "HoldersPresent"),
                "Converged": ("False", "Installing"),
                "Rejected": ("False", "NotRejected"),
            },
            (2, 1, 1, 0),
            id="on its way",
        ),
        pytest.param(
            catalog(generator("a", **SERVES), generator("b", **SERVES), versions=(state(2),)),
            {"Converged": ("True", "AllInstalled")},
            (2, 0, 2, 0),
            id="everywhere",
        ),
        pytest.param(
            catalog(generator("a", serving=1, assignment=order(2), error=failure()), versions=(state(2),)),
            {"Converged": ("False", "Installing")},
            (1, 0, 0, 1),
            id="failed at one",
        ),
        pytest.param(
            catalog(generator("a", serving=2, offers={}), versions=(state(2, offered=False, trainers=0),)),
            {"Ready": ("True", "AllSlotsSealed"), "Available": ("False", "NoHolder")},
            (1, 0, 1, 0),
            id="served, but held by nobody",
        ),
        pytest.param(
            catalog(versions=(state(2, FAILED, reason="PublishDeadlineExceeded: slot 0 is missing"),)),
            {"Ready": ("False", "PublishDeadlineExceeded"), "Available": ("False", "PublishDeadlineExceeded")},
            (0, 0, 0, 0),
            id="failed, with the catalog's word",
        ),
    ],
)
def test_status(facts: CatalogFacts, says: dict[str, tuple[str, str]], adoption: tuple[int, int, int, int]) -> None:
    made, _ = status(spec(2), record(2), facts.versions[0], fleet(facts), Versions(2, 1, 0), ("target",), None, NOW)
    said = {c.type: (c.status, c.reason) for c in made.conditions}
    assert {kind: said[kind] for kind in says} == says
    assert made.adoption is not None
    assert (made.adoption.desired, made.adoption.staged, made.adoption.installed, made.adoption.failed) == adoption


def test_once_converged_always_converged() -> None:
    """A version that everybody served and left did converge."""
    facts = catalog(generator("a", **SERVES), versions=(state(2),))
    made, _ = status(spec(), record(2), facts.versions[0], fleet(facts), Versions(2, 2, 1), (), None, NOW)
    moved = catalog(generator("a", serving=3, arena=3, assignment=order(3, Order.COMMIT)), versions=(state(2),))
    later = record(2, status=made.model_dump(by_alias=True, exclude_none=True))
    again, _ = status(spec(), later, moved.versions[0], fleet(moved), Versions(3, 3, 2), (), None, NOW + 60)
    assert again.converged_at == made.converged_at
    assert next(c for c in again.conditions if c.type == "Converged").status == "True"

"""What this process wrote, until the watch shows it."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from refit_operator.decide.facts import Child
from refit_operator.ports import Stamp
from refit_operator.writes import Children, Statuses

NOW = 1000.0


def manifest(value: int = 1) -> dict[str, Any]:
    return {"kind": "Deployment", "metadata": {"namespace": "ns", "name": "demo"}, "spec": value}


def child(revision: int, generation: int) -> Child:
    return Child("Deployment", "demo", "uid", "uid-demo", revision=revision, generation=generation)


@pytest.mark.parametrize(
    ("wanted", "shown", "now", "due"),
    [
        pytest.param(manifest(), None, NOW + 1, 4.0, id="the watch has not shown it yet"),
        pytest.param(manifest(), None, NOW + 60, 0.0, id="it never will: somebody deleted it"),
        pytest.param(manifest(), child(10, 2), NOW + 5, inf, id="as written"),
        pytest.param(manifest(), child(9, 1), NOW + 5, inf, id="the watch is behind"),
        pytest.param(manifest(), child(30, 2), NOW + 5, inf, id="only its status moved"),
        pytest.param(manifest(), child(30, 3), NOW + 5, 0.0, id="somebody changed it"),
        pytest.param(manifest(2), child(10, 2), NOW + 5, 0.0, id="it is wanted otherwise"),
    ],
)
def test_when_a_child_is_applied_again(wanted: dict[str, Any], shown: Child | None, now: float, due: float) -> None:
    children = Children()
    assert children.due(manifest(), None, NOW) == 0.0
    children.written(manifest(), Stamp(10, 2), NOW)
    assert children.due(wanted, shown, now) == due


def test_what_was_seen_and_is_gone_was_deleted() -> None:
    children = Children()
    children.written(manifest(), Stamp(10, 2), NOW)
    assert children.due(manifest(), child(10, 2), NOW + 1) == inf
    assert children.due(manifest(), None, NOW + 2) == 0.0


def test_a_status_is_computed_from_the_newest_one() -> None:
    """The watch may lag behind our own writes; a newer object counts again."""
    statuses = Statuses({"RefitGroup": 1.0})
    statuses.written("uid", {"phase": "Ready"}, Stamp(10, 1), NOW)
    assert statuses.newest("uid", {"phase": "Pending"}, 9) == {"phase": "Ready"}
    assert statuses.newest("uid", {"phase": "Stalled"}, 11) == {"phase": "Stalled"}


def test_only_urgent_writes_come_at_once() -> None:
    statuses = Statuses({"RefitGroup": 1.0})
    assert statuses.wait("RefitGroup", "uid", False, NOW) == 0.0
    statuses.written("uid", {}, Stamp(1, 1), NOW)
    assert statuses.wait("RefitGroup", "uid", False, NOW + 0.25) == 0.75
    assert statuses.wait("RefitGroup", "uid", True, NOW + 0.25) == 0.0
    assert statuses.wait("RefitGroup", "uid", False, NOW + 1.0) == 0.0

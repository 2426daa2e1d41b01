"""Which version is the target, which is current, which was before."""

from __future__ import annotations

from typing import Any

import pytest
from refit_api.wire import VersionPhase
from refit_operator.decide.facts import CatalogFacts, Record
from refit_operator.decide.target import choose, rejected

from tests.decide.world import NOW, catalog, fleet, generator, group, record, spec, state

AT = {n: generator(f"g{n}", serving=n, arena=n) for n in (1, 2, 3)}
V123 = (state(1), state(2), state(3))
TAKEN_BACK = record(3, status={"conditions": [{"type": "Rejected", "status": "True"}]})
PIN = {"rollout": {"policy": "Pinned", "pinnedVersion": 1}}


@pytest.mark.parametrize(
    ("facts", "records", "status", "parts", "target", "current", "previous"),
    [
        pytest.param(catalog(), (), {}, {}, 0, 0, 0, id="nothing is there"),
        pytest.param(catalog(versions=V123), (), {}, {}, 3, 0, 0, id="Latest: the newest Ready one"),
        pytest.param(catalog(versions=(*V123, state(4, VersionPhase.PUBLISHING))), (), {}, {}, 3, 0, 0, id="not one that is being published"),
        pytest.param(catalog(versions=(*V123, state(4, VersionPhase.FAILED))), (), {}, {}, 3, 0, 0, id="nor a failed one"),
        pytest.param(catalog(versions=V123), (TAKEN_BACK,), {}, {}, 2, 0, 0, id="nor one that was taken back"),
        pytest.param(catalog(versions=V123), (record(3, deleted=NOW),), {}, {}, 2, 0, 0, id="nor one that is being deleted"),
        pytest.param(
            catalog(AT[2], AT[1], versions=V123), (), {"currentVersion": 1}, {}, 3, 2, 1, id="current moves when enough serve; the one before is kept"
        ),
        pytest.param(
            catalog(AT[2], AT[1], versions=V123),
            (),
            {"currentVersion": 1},
            {"generators__minAvailable": 2},
            3,
            1,
            0,
            id="two are wanted, and two serve 1 or newer",
        ),
        pytest.param(catalog(AT[2], versions=V123), (), {"currentVersion": 2, "previousVersion": 1}, {}, 3, 2, 1, id="nothing moved, nothing changes"),
        pytest.param(
            catalog(settled=False, versions=V123), (), {"currentVersion": 2}, {}, 3, 2, 0, id="a catalog without memory does not undo what is current"
        ),
        pytest.param(catalog(AT[3], versions=V123), (), {}, PIN, 1, 3, 0, id="Pinned"),
        pytest.param(catalog(AT[2], versions=V123), (), {}, {"rollout__policy": "Manual"}, 3, 2, 0, id="Manual: what a framework may install"),
        pytest.param(catalog(AT[2], versions=V123), (), {"targetVersion": 2}, {"rollout__paused": True}, 2, 2, 0, id="paused: where they are"),
        pytest.param(catalog(versions=V123), (), {"targetVersion": 2}, {"rollout__paused": True}, 2, 0, 0, id="also when all of them died"),
        pytest.param(catalog(versions=V123), (), {}, {"rollout__paused": True}, 3, 0, 0, id="a group that never served takes its first"),
    ],
)
def test_versions(
    facts: CatalogFacts, records: tuple[Record, ...], status: dict[str, Any], parts: dict[str, Any], target: int, current: int, previous: int
) -> None:
    made = spec(2, **parts)
    least = made.generators.min_available
    assert isinstance(least, int)
    chosen = choose(made, group(status=status), facts, records, rejected(records), fleet(facts), least)
    assert (chosen.target, chosen.current, chosen.previous) == (target, current, previous)


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        pytest.param(catalog(versions=(state(1),)), False, id="the trainers hold it"),
        pytest.param(catalog(versions=(state(1, offered=False, trainers=0, generators=1),)), False, id="a peer holds it"),
        pytest.param(catalog(AT[1], versions=(state(1, offered=False, trainers=0),)), False, id="somebody serves it"),
        pytest.param(catalog(versions=(state(1, offered=False, trainers=0),)), True, id="nobody holds it"),
        pytest.param(catalog(settled=False), False, id="nobody knows yet"),
        pytest.param(catalog(), True, id="there is no such version"),
    ],
)
def test_a_pin_needs_a_holder(facts: CatalogFacts, missing: bool) -> None:
    problem = choose(spec(**PIN), group(), facts, (record(1),), frozenset(), fleet(facts), 1).problem
    assert (problem is not None) is missing
    assert problem is None or problem.reason == "VersionNotFound"

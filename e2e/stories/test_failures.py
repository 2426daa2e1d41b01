"""Things die at the wrong moment: what serves goes on serving, and what comes back is whole."""

from __future__ import annotations

import pytest

from e2e.fleet import Fleet
from e2e.installation import NAMESPACE
from e2e.kubectl import eventually

pytestmark = pytest.mark.story


def test_a_generator_is_killed_while_it_stages_and_comes_back_synced(fleet: Fleet) -> None:
    """Its source hangs in mid-pull and the generator dies: the replacement takes the version whole."""
    (old,) = fleet.generators()
    fleet.patch({"rollout": {"paused": True}})
    try:
        number = fleet.publish()
        for rank in (0, 1):
            fleet.signal_trainer_rank(rank, "STOP")
        fleet.patch({"rollout": {"paused": False}})
        eventually("the generator stages", lambda: fleet.ask(old, "/refit/status")["ranks"][0]["staging"] == number, 60, 0.2)
        fleet.kill(old)
    finally:
        for rank in (0, 1):
            fleet.signal_trainer_rank(rank, "CONT")
        fleet.patch({"rollout": {"paused": False}})
    assert old not in fleet.until_all_serve(number, 1)


def test_a_trainer_pod_is_restarted_and_its_versions_go_on(fleet: Fleet) -> None:
    """The generator serves on meanwhile; versions of the new run get higher numbers and are installed."""
    before = set(fleet.serving().values())
    fleet.restart_trainer()
    assert set(fleet.serving().values()) == before
    number = fleet.publish()
    assert number > max(before)
    fleet.until_all_serve(number, 1)


def test_the_operator_is_restarted_in_the_middle_of_a_rollout(fleet: Fleet) -> None:
    """Nothing stops serving, no number is used twice, and the rollout ends by itself."""
    fleet.scale(2)
    fleet.until_all_serve(max(fleet.serving().values()), 2)
    first = fleet.allow_one_more()
    fleet.kubectl("delete", "pod", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "--wait=false")
    assert all(fleet.serving().values())
    second = eventually("the version is Ready", lambda: fleet.newest(("Ready",), above=first), 180)
    fleet.until_all_serve(second, 2)
    third = fleet.publish()
    fleet.until_all_serve(third, 2)
    numbers = [item["spec"]["version"] for item in fleet.versions()]
    assert len(numbers) == len(set(numbers))

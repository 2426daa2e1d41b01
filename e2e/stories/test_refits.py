"""Versions reach generators: one, many in a row, from a peer, and never a version that is not whole."""

from __future__ import annotations

import pytest

from e2e.fleet import GROUP, Fleet
from e2e.kubectl import eventually

pytestmark = pytest.mark.story


def test_a_published_version_is_served_and_kubectl_shows_it(fleet: Fleet) -> None:
    number = fleet.publish()
    fleet.until_all_serve(number, 1)
    for condition in ("Ready", "WeightsCurrent"):
        fleet.kubectl("wait", "refitgroup", GROUP, "-n", fleet.namespace, f"--for=condition={condition}", "--timeout=60s", timeout=70)
    status = fleet.until_status("the counters follow", lambda status: status["currentVersion"] == number and status["generators"]["atTarget"] == 1)
    assert status["lastRefit"]["bytes"] > 0
    version = next(item for item in fleet.versions() if item["spec"]["version"] == number)
    assert version["status"]["phase"] == "Ready"
    assert version["status"]["shards"]["sealed"] == version["status"]["shards"]["expected"] > 0
    gates = [entry for pod in fleet.pods("generator") for entry in pod["status"]["conditions"] if entry["type"] == "refit.dev/synced"]
    assert [gate["status"] for gate in gates] == ["True"]
    shown = fleet.kubectl("get", "refitgroup,weightversion", "-n", fleet.namespace)
    assert GROUP in shown
    assert str(number) in shown


def test_ten_versions_in_a_row_change_the_weights_ten_times(fleet: Fleet) -> None:
    served, sums = [], set()
    for _ in range(10):
        served.append(fleet.publish())
        fleet.until_all_serve(served[-1], 1)
        sums |= set(fleet.checksums().values())
    assert served == sorted(set(served))
    assert len(sums) == 10


def test_new_generators_read_from_a_peer_and_not_from_the_trainer(fleet: Fleet) -> None:
    """Scale 1 -> 3 through the scale subresource: the joiners hold the same bytes, and the trainer sent them none."""
    (old,) = fleet.generators()
    version = fleet.serving()[old]
    fleet.scale(3)
    joined = set(fleet.until_all_serve(version, 3)) - {old}
    assert len(set(fleet.checksums().values())) == 1
    for pod in joined:
        (rank,) = fleet.ask(pod, "/refit/status")["ranks"]
        assert {read["role"] for read in rank["reads"]} == {"generator"}
        assert sum(read["bytes"] for read in rank["reads"]) == rank["bytes"] > 0
    number = fleet.publish()
    fleet.until_all_serve(number, 3)
    assert len(set(fleet.checksums().values())) == 1


def test_versions_that_come_faster_than_they_roll_out_end_at_the_newest(fleet: Fleet) -> None:
    """Whoever is still reading one whose trainer went on, and which nobody holds any more, is sent to the newest."""
    fleet.scale(2)
    fleet.until_all_serve(max(fleet.serving().values()), 2)
    for _ in range(3):
        last = fleet.allow_one_more() + 6
        fleet.allow(fleet.allowed() + 5)
        eventually(f"version {last} is Ready", lambda last=last: fleet.phase(last) == "Ready", 120)
        fleet.until_all_serve(last, 2, 120)


def test_a_version_with_a_missing_shard_is_never_installed(fleet: Fleet) -> None:
    """One of two trainer ranks hangs before it seals: the version fails at its deadline, and the old one serves on."""
    before = set(fleet.serving().values())
    fleet.signal_trainer_rank(1, "STOP")
    try:
        broken = fleet.publish(until=("Publishing", "Failed"))
        eventually("it fails", lambda: fleet.phase(broken) == "Failed", 120)
        assert set(fleet.serving().values()) == before
    finally:
        fleet.signal_trainer_rank(1, "CONT")
        fleet.restart_trainer()

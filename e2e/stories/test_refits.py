"""Versions reach generators: the first, many in a row, from a peer, and never a version that is not whole."""

from __future__ import annotations

import pytest

from e2e.fleet import GROUP, Fleet
from e2e.kubectl import eventually

pytestmark = pytest.mark.story


def test_a_group_is_applied_and_its_generators_serve_the_first_version(fleet: Fleet) -> None:
    """From `kubectl apply` to serving, and what `kubectl get` and `kubectl wait` show of it."""
    fleet.apply(replicas=2)
    fleet.allow(1)
    first = fleet.until_status("a current version", lambda status: status.get("currentVersion"), 120)["currentVersion"]
    fleet.until_all_serve(first, 2)
    assert len(set(fleet.checksums().values())) == 1
    fleet.kubectl("wait", "refitgroup", GROUP, "-n", fleet.namespace, "--for=condition=Ready", "--timeout=60s", timeout=70)
    fleet.kubectl("wait", "refitgroup", GROUP, "-n", fleet.namespace, "--for=condition=WeightsCurrent", "--timeout=60s", timeout=70)
    status = fleet.status()
    assert (status["generators"]["ready"], status["generators"]["atTarget"]) == (2, 2)
    assert status["lastRefit"]["bytes"] > 0
    (version,) = fleet.versions()
    assert version["status"]["phase"] == "Ready"
    assert version["status"]["shards"]["sealed"] == version["status"]["shards"]["expected"]
    gates = [entry for pod in fleet.pods("generator") for entry in pod["status"]["conditions"] if entry["type"] == "refit.dev/synced"]
    assert [gate["status"] for gate in gates] == ["True", "True"]


def test_ten_versions_in_a_row(fleet: Fleet) -> None:
    """Each version changes the weights of both generators alike, and numbers only grow."""
    fleet.apply(replicas=2)
    served, sums = [], []
    for count in range(1, 11):
        fleet.allow(count)
        before = served[-1] if served else 0
        version = eventually("the next version is served by both", lambda before=before: _common(fleet, above=before), 120, 0.5)
        served.append(version)
        checksums = set(fleet.checksums().values())
        assert len(checksums) == 1
        sums.append(checksums.pop())
    assert served == sorted(set(served))
    assert len(set(sums)) == 10


def _common(fleet: Fleet, above: int) -> int | None:
    serving = set(fleet.serving().values())
    (version,) = serving if len(serving) == 1 else (0,)
    return version if version > above else None


def test_new_generators_read_from_a_peer_and_not_from_the_trainer(fleet: Fleet) -> None:
    """Scale 1 -> 3 through the scale subresource: the joiners hold the same bytes, and the trainer sent them none."""
    fleet.apply(replicas=1)
    fleet.allow(1)
    (old,) = eventually("the first generator serves", lambda: [pod for pod, version in fleet.serving().items() if version], 120)
    fleet.kubectl("scale", f"refitgroup/{GROUP}", "-n", fleet.namespace, "--replicas=3")
    version = fleet.serving()[old]
    joined = set(fleet.until_all_serve(version, 3)) - {old}
    assert len(set(fleet.checksums().values())) == 1
    for pod in joined:
        read = fleet.ask(pod, "/refit/status")["ranks"][0]
        assert read["readFromTrainers"] == 0
        assert read["readFromRelays"] > 0


def test_a_version_with_a_missing_shard_is_never_installed(fleet: Fleet) -> None:
    """One of two trainer ranks hangs before it seals: the version fails at its deadline, the old one serves on, and the next one is taken."""
    fleet.apply(replicas=1, versions={"leaseSeconds": 15, "drainSeconds": 5, "publishDeadlineSeconds": 50})
    fleet.allow(1)
    first = fleet.until_status("a current version", lambda status: status.get("currentVersion"), 120)["currentVersion"]
    fleet.until_all_serve(first, 1)
    fleet.signal_trainer_rank(1, "STOP")
    fleet.allow(2)
    broken = eventually("a second version appears", lambda: [item for item in fleet.versions() if item["spec"]["version"] > first], 60)[0]["spec"]["version"]
    eventually("it fails", lambda: _phase(fleet, broken) == "Failed", 120)
    assert set(fleet.serving().values()) == {first}


def _phase(fleet: Fleet, number: int) -> str | None:
    return next((item["status"]["phase"] for item in fleet.versions() if item["spec"]["version"] == number), None)

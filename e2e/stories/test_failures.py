"""Things die at the wrong moment: what serves goes on serving, what comes back is whole, and nothing is left behind."""

from __future__ import annotations

import pytest

from e2e.fleet import GROUP, Fleet
from e2e.installation import NAMESPACE
from e2e.kubectl import eventually

pytestmark = pytest.mark.story


def first_version(fleet: Fleet, replicas: int) -> int:
    fleet.allow(1)
    version: int = fleet.until_status("a current version", lambda status: status.get("currentVersion"), 120)["currentVersion"]
    fleet.until_all_serve(version, replicas)
    return version


def test_a_generator_is_killed_while_it_stages_and_comes_back_synced(fleet: Fleet) -> None:
    """Its source hangs in mid-pull and the generator dies: the replacement takes the version whole, the other one is not disturbed."""
    fleet.apply(replicas=1, rollout={"paused": True})
    first = first_version(fleet, 1)
    fleet.allow(2)
    second = eventually("the second version is Ready", lambda: _ready_above(fleet, first), 60)
    for rank in (0, 1):
        fleet.signal_trainer_rank(rank, "STOP")
    fleet.patch({"rollout": {"paused": False}})
    (old,) = fleet.generators()
    eventually("the generator stages", lambda: fleet.ask(old, "/refit/status")["ranks"][0]["staging"] == second, 60, 0.2)
    fleet.kill(old)
    for rank in (0, 1):
        fleet.signal_trainer_rank(rank, "CONT")
    served = fleet.until_all_serve(second, 1, 180)
    assert old not in served


def test_a_trainer_pod_is_restarted_and_its_versions_go_on(fleet: Fleet) -> None:
    """The generators serve on meanwhile; the new run's versions get higher numbers and are installed."""
    fleet.apply(replicas=1)
    first = first_version(fleet, 1)
    fleet.kill(f"{GROUP}-trainer-0", grace=5)
    eventually("the pod is a new one", lambda: not _has(fleet, "/control/allowed"), 120)
    assert set(fleet.serving().values()) == {first}
    fleet.allow(1)
    second = eventually("a version of the new run is Ready", lambda: _ready_above(fleet, first), 120)
    fleet.until_all_serve(second, 1)


def test_the_operator_is_restarted_in_the_middle_of_a_rollout(fleet: Fleet) -> None:
    """Nothing stops serving, no number is used twice, and the rollout ends by itself."""
    fleet.apply(replicas=2)
    first = first_version(fleet, 2)
    fleet.allow(2)
    fleet.kubectl("delete", "pod", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "--wait=false")
    assert all(version >= first for version in fleet.serving().values())
    second = eventually("the second version is Ready", lambda: _ready_above(fleet, first), 180)
    fleet.until_all_serve(second, 2, 180)
    fleet.allow(3)
    third = eventually("a third version is Ready", lambda: _ready_above(fleet, second), 120)
    fleet.until_all_serve(third, 2)
    numbers = [item["spec"]["version"] for item in fleet.versions()]
    assert len(numbers) == len(set(numbers))


def test_a_deleted_group_leaves_nothing(fleet: Fleet) -> None:
    fleet.apply(replicas=1)
    first_version(fleet, 1)
    fleet.kubectl.delete("refitgroup", GROUP, fleet.namespace)
    kinds = "pods,statefulsets,deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,weightversions"

    def left() -> list[str]:
        listed = fleet.kubectl("get", kinds, "-n", fleet.namespace, "-o", "name").split()
        ours_not = ("configmap/kube-root-ca.crt", "serviceaccount/default", "configmap/refit-workloads")
        return [name for name in listed if name not in ours_not]

    eventually("nothing is left", lambda: not left(), 150)


def _ready_above(fleet: Fleet, number: int) -> int | None:
    ready = [item["spec"]["version"] for item in fleet.versions() if item["status"].get("phase") == "Ready"]
    return max((version for version in ready if version > number), default=None)


def _has(fleet: Fleet, path: str) -> bool:
    found = fleet.kubectl.get("pod", f"{GROUP}-trainer-0", fleet.namespace)
    if not found or "deletionTimestamp" in found["metadata"] or not fleet.is_running(f"{GROUP}-trainer-0"):
        return True
    return "yes" in fleet.kubectl("exec", f"{GROUP}-trainer-0", "-n", fleet.namespace, "--", "sh", "-c", f"test -e {path} && echo yes || echo no")

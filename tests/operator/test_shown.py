"""Objects as the watch shows them become facts; odd ones become defaults."""

from __future__ import annotations

from typing import Any

import pytest
from refit_operator.shown import child, owner, pod

META = {
    "name": "p",
    "namespace": "ns",
    "uid": "u",
    "creationTimestamp": "2026-11-30T15:38:09Z",
    "labels": {"refit.dev/group": "demo", "refit.dev/role": "generator"},
}


def waiting(reason: str, **last: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "engine", "restartCount": 2, "state": {"waiting": {"reason": reason, "message": "said so"}}, "lastState": last}]}


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        pytest.param({}, "", id="a new pod"),
        pytest.param(waiting("ContainerCreating"), "", id="on its way"),
        pytest.param(waiting("ErrImageNeverPull"), "container engine: ErrImageNeverPull: said so", id="no image"),
        pytest.param(
            waiting("CrashLoopBackOff", terminated={"exitCode": 1, "message": "EngineTooOld: vLLM 0.22"}),
            "container engine: CrashLoopBackOff: ended 2 times, last with exit code 1: EngineTooOld: vLLM 0.22",
            id="what the process said last counts more than the kubelet's words",
        ),
        pytest.param({"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}]}, "not scheduled: 0/1 nodes", id="no place"),
    ],
)
def test_trouble(status: dict[str, Any], trouble: str) -> None:
    assert pod({"metadata": META, "status": status}).trouble == trouble


@pytest.mark.parametrize(("gate", "synced"), [(None, None), ("True", True), ("False", False), ("Unknown", False)])
def test_the_gate(gate: str | None, synced: bool | None) -> None:
    conditions = [{"type": "refit.dev/synced", "status": gate}] if gate else []
    assert pod({"metadata": META, "status": {"conditions": conditions}}).synced is synced


def test_a_controller_that_has_not_looked_yet_is_not_settled() -> None:
    body = {
        "metadata": {**META, "generation": 3, "resourceVersion": "7"},
        "spec": {"replicas": 2},
        "status": {"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2},
    }
    made = child(body, "Deployment")
    assert (made.settled, made.generation, made.revision, made.wanted, made.updated) == (False, 3, 7, 2, 2)
    assert child({"metadata": META}, "ConfigMap").settled


def test_only_a_controlling_group_is_an_owner() -> None:
    reference = {"apiVersion": "refit.dev/v1alpha1", "kind": "RefitGroup", "name": "demo", "uid": "u"}
    assert owner({"metadata": {"ownerReferences": [reference]}}) == ("", "")
    assert owner({"metadata": {"ownerReferences": [{**reference, "controller": True}]}}) == ("demo", "u")

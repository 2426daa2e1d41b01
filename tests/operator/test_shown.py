"""Objects as the watch shows them become facts; odd ones become defaults."""

from __future__ import annotations

from typing import Any

import pytest
from refit_api.v1alpha1 import WeightVersion
from refit_api.wire import Select, Version, VersionPhase
from refit_operator.decide.facts import Group, VersionState
from refit_operator.decide.versions import manifest
from refit_operator.ports import Seen
from refit_operator.recorded import recorded
from refit_operator.shown import child, owner, pod, record

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


@pytest.mark.parametrize(
    "select", [None, Select(layers=(0, 3)), Select(("model.norm",), (), ("bias", ".q."))], ids=["all tensors", "layers", "names and texts"]
)
def test_a_version_is_known_again_from_the_record_that_was_written_of_it(select: Select | None) -> None:
    """By a catalog without memory, which has to refuse ranks that select otherwise."""
    version = Version(7, "run:3", "run", 3, "plan", ("0", "1"), VersionPhase.PUBLISHING, base=6 if select is not None else 0, select=select)
    body = manifest(Group("ns", "demo", "u", 1), VersionState(version, 0, 0, 0.0))
    written = WeightVersion.model_validate(body).spec
    assert written.format == ("FullTensor" if select is None else "Subset")
    body = {**body, "metadata": {**body["metadata"], "uid": "v", "creationTimestamp": "2026-11-30T15:38:09Z"}}
    (known,) = recorded(Seen(None, None, records=(record(body),))).versions
    assert (known.number, known.key, known.slots, known.base, known.select) == (7, "run:3", 2, version.base, select)

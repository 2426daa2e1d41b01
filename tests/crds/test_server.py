"""The two kinds as people meet them: kubectl against a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from refit_api.dialect import from_api, to_api
from refit_api.document import JsonObject, table
from refit_api.status import AdoptionStatus, ConditionStatus, FanoutStatus, GeneratorsStatus, HoldersStatus, LastRefitStatus, LeasesStatus, ShardsStatus
from refit_api.v1alpha1 import RefitGroup, RefitGroupSpec, RefitGroupStatus, WeightVersion, WeightVersionStatus

from e2e.kubectl import Kubectl, KubectlError
from tests.crds.documents import group, merged, weight_version

NAMESPACE = "kinds"
IN_NAMESPACE: JsonObject = {"metadata": {"namespace": NAMESPACE, "name": "g"}}
VERSION: JsonObject = {"metadata": {"namespace": NAMESPACE, "name": "g-v000000012"}, "spec": {"groupRef": {"name": "g"}}}


@pytest.fixture(scope="module", autouse=True)
def _namespace(kubectl: Kubectl) -> None:
    kubectl("create", "namespace", NAMESPACE)


@pytest.fixture
def applied(kubectl: Kubectl) -> Iterator[RefitGroup]:
    kubectl.apply(group(IN_NAMESPACE))
    yield from_api(RefitGroup, kubectl.get("refitgroup", "g", NAMESPACE))
    kubectl.delete("refitgroup", "g", NAMESPACE)


def _report(kubectl: Kubectl, kind: str, name: str, status: RefitGroupStatus | WeightVersionStatus) -> None:
    """As the operator does: server-side apply of the status."""
    document = {"apiVersion": "refit.dev/v1alpha1", "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE}, "status": to_api(status)}
    kubectl("apply", "--server-side", "--subresource=status", "--field-manager=refit-operator", "-f", "-", stdin=json.dumps(document))


def _table(kubectl: Kubectl, kind: str, *more: str) -> dict[str, str]:
    """The one row of `kubectl get`, by column."""
    head, row = kubectl("get", kind, "-n", NAMESPACE, *more).splitlines()
    starts = [head.index(word) for word in head.split()]
    return {head[a:b].strip(): row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)}


READY = ConditionStatus(type="Ready", status="True", last_transition_time="2026-01-01T00:00:00Z", reason="EnoughGenerators")


def test_defaults_are_those_of_the_models(kubectl: Kubectl, applied: RefitGroup) -> None:
    """An operator that reads a stored spec and one that builds it from a manifest see the same."""
    stored = kubectl.get("refitgroup", "g", NAMESPACE)
    assert stored is not None
    ours = to_api(from_api(RefitGroupSpec, group()["spec"]))
    assert _without_empty(stored["spec"]) == _without_empty(ours)
    assert applied.spec == from_api(RefitGroupSpec, group()["spec"])


def _without_empty(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_empty(inner) for key, inner in value.items() if inner not in ({}, [])}
    return value


def test_a_part_that_is_given_empty_has_its_defaults(kubectl: Kubectl) -> None:
    """Rules read defaults, so they must be there however the part was written."""
    empty: JsonObject = {part: {} for part in ("fanout", "rollout", "versions", "verification", "transport", "scheduling", "restart")}
    document = group(IN_NAMESPACE)
    table(document, "spec").update(empty)
    made = json.loads(kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(document)))
    assert from_api(RefitGroup, made).spec == from_api(RefitGroup, group()).spec
    assert made["spec"]["rollout"]["policy"] == "Latest"


@pytest.mark.parametrize("server_side", [pytest.param(False, id="client-side"), pytest.param(True, id="server-side")])
def test_applying_twice_changes_nothing(kubectl: Kubectl, server_side: bool) -> None:
    document = group(IN_NAMESPACE)
    flags = ["--server-side"] if server_side else []
    try:
        kubectl.apply(document, server_side=server_side)
        first = kubectl.get("refitgroup", "g", NAMESPACE)
        kubectl.apply(document, server_side=server_side)
        assert kubectl.get("refitgroup", "g", NAMESPACE) == first
        assert kubectl("diff", *flags, "-f", "-", stdin=yaml.safe_dump(document)) == ""
    finally:
        kubectl.delete("refitgroup", "g", NAMESPACE)


def test_an_apply_without_replicas_keeps_what_an_autoscaler_set(kubectl: Kubectl, applied: RefitGroup) -> None:
    kubectl("scale", "rfg/g", "-n", NAMESPACE, "--replicas=7")
    kubectl.apply(group(IN_NAMESPACE))
    assert kubectl("get", "rfg", "g", "-n", NAMESPACE, "-o", "jsonpath={.spec.generators.replicas}") == "7"


def test_the_scale_subresource_speaks_generators(kubectl: Kubectl, applied: RefitGroup) -> None:
    path = f"/apis/refit.dev/v1alpha1/namespaces/{NAMESPACE}/refitgroups/g/scale"
    assert json.loads(kubectl("get", "--raw", path))["spec"] == {"replicas": 1}
    _report(kubectl, "RefitGroup", "g", RefitGroupStatus(generators=GeneratorsStatus(replicas=3, selector="refit.dev/group=g,refit.dev/role=generator")))
    kubectl("scale", "rfg/g", "-n", NAMESPACE, "--replicas=0")
    scale = json.loads(kubectl("get", "--raw", path))
    assert scale["status"] == {"replicas": 3, "selector": "refit.dev/group=g,refit.dev/role=generator"}
    assert scale["spec"].get("replicas", 0) == 0
    with pytest.raises(KubectlError, match="5000"):
        kubectl("scale", "rfg/g", "-n", NAMESPACE, "--replicas=5001")


def test_the_columns_of_a_group(kubectl: Kubectl, applied: RefitGroup) -> None:
    status = RefitGroupStatus(
        conditions=(READY,),
        target_version=13,
        current_version=12,
        generators=GeneratorsStatus(replicas=4, ready=3, at_target=2, lagging=1),
        fanout=FanoutStatus(topology="Chain", depth=2),
        last_refit=LastRefitStatus(version=12, stall_seconds_max=0.0125),
    )
    _report(kubectl, "RefitGroup", "g", status)
    narrow = _table(kubectl, "rfg")
    assert narrow.pop("AGE") != ""
    assert narrow == {"NAME": "g", "MODEL": "m", "POLICY": "Latest", "TARGET": "13", "CURRENT": "12", "GENERATORS": "4", "READY": "True"}
    wide = _table(kubectl, "refitgroups", "-o", "wide")
    more = {"READY-GENS": "3", "AT-TARGET": "2", "LAGGING": "1", "STALL": "0.0125", "DEPTH": "2", "REASON": "EnoughGenerators"}
    assert wide.items() >= (narrow | more).items()


@pytest.fixture
def version(kubectl: Kubectl) -> Iterator[None]:
    kubectl.apply(weight_version(VERSION))
    yield
    kubectl.delete("weightversion", "g-v000000012", NAMESPACE)


@pytest.mark.usefixtures("version")
def test_the_columns_of_a_version(kubectl: Kubectl) -> None:
    status = WeightVersionStatus(
        phase="Ready",
        shards=ShardsStatus(expected=4, sealed=4, bytes=16_060_000_000),
        digest="ab" * 32,
        leases=LeasesStatus(active=2),
        holders=HoldersStatus(trainers=2, generators=5),
        adoption=AdoptionStatus(desired=8, installed=5),
        conditions=(READY.model_copy(update={"reason": "AllSlotsSealed"}),),
    )
    _report(kubectl, "WeightVersion", "g-v000000012", status)
    narrow = _table(kubectl, "wv")
    assert narrow.pop("AGE") != ""
    assert narrow == {"NAME": "g-v000000012", "GROUP": "g", "VERSION": "12", "STEP": "3", "PHASE": "Ready", "INSTALLED": "5", "LEASES": "2"}
    wide = _table(kubectl, "weightversions", "-o", "wide")
    more = {"SHARDS": "4", "EXPECTED": "4", "HOLDERS": "7", "BYTES": "16060000000", "DIGEST": "ab" * 32, "FORMAT": "FullTensor"}
    assert wide.items() >= (narrow | more).items()


@pytest.mark.usefixtures("version")
def test_versions_are_found_by_group_and_phase(kubectl: Kubectl) -> None:
    _report(kubectl, "WeightVersion", "g-v000000012", WeightVersionStatus(phase="Releasing"))
    found = "weightversion.refit.dev/g-v000000012\n"
    assert kubectl("get", "wv", "-n", NAMESPACE, "-o", "name", "--field-selector=spec.groupRef.name=g,status.phase=Releasing") == found
    assert kubectl("get", "wv", "-n", NAMESPACE, "-o", "name", "--field-selector=spec.groupRef.name=h") == ""


@pytest.mark.usefixtures("version")
def test_people_can_hold_and_abort(kubectl: Kubectl) -> None:
    kubectl("patch", "wv", "g-v000000012", "-n", NAMESPACE, "--type=merge", "-p", json.dumps({"spec": {"hold": True, "abort": True}}))
    found = kubectl.get("weightversion", "g-v000000012", NAMESPACE)
    assert found is not None
    assert (from_api(WeightVersion, found).spec.hold, from_api(WeightVersion, found).spec.abort) == (True, True)


def test_both_kinds_are_in_their_categories(kubectl: Kubectl, applied: RefitGroup) -> None:
    kubectl.apply(weight_version(VERSION))
    assert kubectl("get", "all", "-n", NAMESPACE, "-o", "name").split() == ["refitgroup.refit.dev/g"]
    assert kubectl("get", "refit", "-n", NAMESPACE, "-o", "name").split() == ["refitgroup.refit.dev/g", "weightversion.refit.dev/g-v000000012"]
    kubectl.delete("weightversion", "g-v000000012", NAMESPACE)


@pytest.mark.parametrize(
    ("apply", "told"),
    [
        pytest.param(("apply", "--validate=strict"), 'strict decoding error: unknown field "spec.rollout.polcy"', id="kubectl validates"),
        pytest.param(("create",), 'strict decoding error: unknown field "spec.rollout.polcy"', id="kubectl's default"),
        pytest.param(("apply", "--server-side"), ".spec.rollout.polcy: field not declared in schema", id="server-side apply"),
    ],
)
def test_an_unknown_field_is_refused(kubectl: Kubectl, apply: tuple[str, ...], told: str) -> None:
    document = group(merged(IN_NAMESPACE, {"spec": {"rollout": {"polcy": "Latest"}}}))
    with pytest.raises(KubectlError) as refused:
        kubectl(*apply, "-f", "-", stdin=json.dumps(document))
    assert told in refused.value.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param({"generators": {"replicas": "two"}}, "spec.generators.replicas: Invalid value", id="type"),
        pytest.param({"rollout": {"policy": "Newest"}}, 'spec.rollout.policy: Unsupported value: "Newest": supported values: "Latest"', id="word"),
        pytest.param({"versions": {"leaseSeconds": 5}}, "spec.versions.leaseSeconds: Invalid value: 5", id="bound"),
        pytest.param({"generators": {"maxSurge": "150%"}}, "spec.generators.maxSurge", id="percentage"),
        pytest.param({"model": {"name": None}}, "spec.model.name: Required value", id="required"),
        pytest.param({"fanout": {"maxRate": "10GB/s"}}, "spec.fanout.maxRate", id="quantity"),
    ],
)
def test_types_and_bounds_are_kept(kubectl: Kubectl, change: JsonObject, told: str) -> None:
    with pytest.raises(KubectlError) as refused:
        kubectl("create", "-f", "-", stdin=json.dumps(merged(group(IN_NAMESPACE), {"spec": change})))
    assert told in refused.value.stderr


def test_explain_is_the_manual(kubectl: Kubectl) -> None:
    told = " ".join(kubectl("explain", "refitgroup.spec.rollout.policy").split())
    assert "ENUM: Latest Pinned Manual" in told
    assert told.endswith("Default: Latest.")
    assert "`Latest`: generators follow the newest Ready version." in told


def test_a_full_status_is_small_and_comes_back_as_written(kubectl: Kubectl, applied: RefitGroup) -> None:
    """etcd sees every write of it."""
    pods = [{"pod": f"g-generator-7d4b9c6f5d-{n:05d}", "version": 100_000, "reason": "GeneratorsLagging"} for n in range(16)]
    types = ("Ready", "Reconciling", "Stalled", "Degraded", "WeightsCurrent", "Suspended", "TemplateValid")
    conditions = [to_api(READY.model_copy(update={"type": kind, "message": "m" * 100, "observed_generation": 7})) for kind in types]
    written: JsonObject = {"stragglers": pods, "conditions": conditions, "templateHash": "f" * 64, "currentVersion": 1, "targetVersion": 2}
    status = from_api(RefitGroupStatus, written)
    _report(kubectl, "RefitGroup", "g", status)
    stored = kubectl.get("refitgroup", "g", NAMESPACE)
    assert stored is not None
    assert from_api(RefitGroup, stored).status == status
    assert len(json.dumps(stored["status"], separators=(",", ":"))) < 4096


@pytest.mark.parametrize("flags", [pytest.param((), id="client-side"), pytest.param(("--server-side", "--force-conflicts"), id="server-side")])
def test_the_definitions_come_back_as_written(kubectl: Kubectl, flags: tuple[str, ...]) -> None:
    """A bound that came back rounded, or a default that was rewritten, would be a difference for ever."""
    folder = str(Path(__file__).parents[2] / "crds")
    kubectl("apply", *flags, "-k", folder)
    assert kubectl("diff", *flags, "-k", folder) == ""

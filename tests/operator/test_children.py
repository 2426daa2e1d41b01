"""A RefitGroup becomes pods: children on a real API server, owned, complete, applied once, repaired; and what users read when it cannot be."""

from __future__ import annotations

import asyncio

import pytest
from refit_api.mounted import Mounted
from refit_runtime.settings import RuntimeSettings

from tests.operator.stage import APPS, CORE, POLICY, Body, Stage, condition, refit_group

CHILDREN = (
    ("deployments", "demo-generator", APPS),
    ("statefulsets", "demo-trainer", APPS),
    ("services", "demo-refit", CORE),
    ("configmaps", "demo-refit", CORE),
    ("serviceaccounts", "demo-refit", CORE),
    ("poddisruptionbudgets", "demo-generator", POLICY),
)


async def children(stage: Stage) -> list[Body]:
    """All of them, once they are there."""
    return [await stage.until(plural, name, bool, prefix) for plural, name, prefix in CHILDREN]


async def test_a_group_gets_its_children_and_a_status(stage: Stage) -> None:
    """One apply is enough: both workloads, what their pods need, and a status that says what it waits for."""
    made = await stage.create(refit_group())
    there = await children(stage)
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "TemplateValid")[0] == "True")
    assert all(child["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"] for child in there)
    assert condition(group, "Ready") == ("False", "CreatingPods")
    assert group["status"]["observedGeneration"] == 1


async def test_the_mounted_file_is_one_that_the_runtime_reads(stage: Stage, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator and runtime never meet but in this file."""
    await stage.create(refit_group())
    data = (await stage.until("configmaps", "demo-refit", bool, CORE))["data"]
    assert Mounted.model_validate_json(data["settings.json"]).catalog == "refit-catalog.refit-system.svc:7450"
    assert data["ca.crt"].startswith("-----BEGIN CERTIFICATE-----")
    for name in ("NAME", "UID", "NAMESPACE", "IP"):
        monkeypatch.setenv(f"POD_{name}", "x")
    file = tmp_path / "settings.json"  # type: ignore[operator]
    file.write_text(data["settings.json"])
    monkeypatch.setenv("REFIT_SETTINGS", str(file))
    assert RuntimeSettings.load().group.name == "demo"


async def test_nothing_is_written_twice(stage: Stage) -> None:
    """A quiet group costs nothing: neither new passes nor a new operator change a child or the status."""
    await stage.create(refit_group())
    await children(stage)
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "TemplateValid")[0] == "True")
    before = [child["metadata"]["resourceVersion"] for child in await children(stage)]
    await stage.patch("refitgroups", "demo", {"metadata": {"labels": {"touched": "yes"}}})
    await stage.restart()
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("catalogEpoch", 0) > group["status"]["catalogEpoch"])
    assert [child["metadata"]["resourceVersion"] for child in await children(stage)] == before


async def test_what_others_change_or_delete_comes_back(stage: Stage) -> None:
    """Children are the operator's: drift is repaired without waiting for a resync."""
    await stage.create(refit_group())
    old = (await children(stage))[3]["metadata"]["uid"]
    await stage.cluster.delete("ConfigMap", stage.namespace, "demo-refit", old)
    await stage.until("configmaps", "demo-refit", lambda c: c["metadata"]["uid"] != old, CORE)
    await stage.patch("deployments", "demo-generator", {"spec": {"replicas": 7}}, APPS)
    await stage.until("deployments", "demo-generator", lambda d: d["spec"]["replicas"] == 1 and d["metadata"]["generation"] >= 3, APPS)


async def test_scaling_never_changes_a_template(stage: Stage) -> None:
    """kubectl scale goes through the scale subresource; pods that run are not touched."""
    await stage.create(refit_group())
    before = (await children(stage))[0]
    path = stage.path("refitgroups", "demo/scale")
    await stage.cluster.request("PATCH", path, {"spec": {"replicas": 3}}, "application/merge-patch+json")
    after = await stage.until("deployments", "demo-generator", lambda d: d["spec"]["replicas"] == 3, APPS)
    assert after["spec"]["template"] == before["spec"]["template"]
    budget = await stage.until("poddisruptionbudgets", "demo-generator", lambda b: "minAvailable" in b["spec"], POLICY)
    assert "maxUnavailable" not in budget["spec"]


async def test_suspend_takes_the_pods_and_leaves_the_objects(stage: Stage) -> None:
    await stage.create(refit_group())
    await children(stage)
    await stage.patch("refitgroups", "demo", {"spec": {"suspend": True}})
    await stage.until("deployments", "demo-generator", lambda d: d["spec"]["replicas"] == 0, APPS)
    await stage.until("statefulsets", "demo-trainer", lambda s: s["spec"]["replicas"] == 0, APPS)
    await stage.until("refitgroups", "demo", lambda g: g["status"]["phase"] == "Suspended")


async def announced(stage: Stage, reason: str) -> set[str]:
    """Types of the events with this reason; they follow the status."""
    types: set[str] = set()
    for _ in range(100):
        events = await stage.list("events", "/apis/events.k8s.io/v1")
        types = {event["type"] for event in events if event["reason"] == reason and event["regarding"]["name"] == "demo"}
        if types:
            break
        await asyncio.sleep(0.05)
    return types


@pytest.mark.parametrize(
    ("spec", "reason", "told"),
    [
        pytest.param(
            {"generators": {"template": {"spec": {"containers": [{"name": "a", "imagee": "b"}]}}}},
            "InvalidTemplate",
            "imagee",
            id="a misspelt field of a template",
        ),
        pytest.param({"generators": {"template": {"spec": {"containers": "none"}}}}, "InvalidTemplate", "containers", id="a template of the wrong shape"),
        pytest.param({"generators": {"template": {}}}, "InvalidTemplate", "containers", id="a template without containers"),
        pytest.param({"scheduling": {"gang": "Kueue"}}, "NotImplemented", "spec.scheduling.gang", id="a field of a later release"),
    ],
)
async def test_a_bad_spec_is_told_and_nothing_is_made(stage: Stage, spec: Body, reason: str, told: str) -> None:
    """The author reads the API server's own words in `kubectl describe`; after the correction the group goes on by itself."""
    await stage.create(refit_group(**spec))
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "Stalled")[0] == "True")
    assert condition(group, "Stalled")[1] == reason
    assert told in next(c["message"] for c in group["status"]["conditions"] if c["type"] == "Stalled")
    assert await stage.list("deployments", APPS) == []
    assert "Warning" in await announced(stage, reason)
    good = refit_group()["spec"]
    await stage.patch("refitgroups", "demo", {"spec": {"generators": good["generators"], "scheduling": None}})
    await stage.until("deployments", "demo-generator", bool, APPS)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "Stalled")[0] == "False")


async def test_a_name_that_belongs_to_somebody_else_is_not_taken(stage: Stage) -> None:
    """Server-side apply would take it over without a word."""
    foreign = {"metadata": {"name": "demo-refit"}, "data": {"mine": "yes"}}
    await stage.cluster.request("POST", stage.path("configmaps", prefix=CORE), foreign)
    await stage.create(refit_group())
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "Stalled")[0] == "True")
    assert condition(group, "Stalled")[1] == "NameTaken"
    await asyncio.sleep(1.0)
    assert (await stage.get("configmaps", "demo-refit", CORE))["data"] == {"mine": "yes"}

"""A RefitGroup becomes pods: children on a real API server, owned, complete, applied once."""

from __future__ import annotations

from tests.operator.stage import APPS, CORE, POLICY, Stage, condition, refit_group


async def test_a_group_gets_its_children_and_a_status(stage: Stage) -> None:
    """One apply is enough: both workloads, what their pods need, and a status that says what it waits for."""
    made = await stage.create(refit_group())
    group = await stage.until("refitgroups", "demo", lambda g: condition(g, "TemplateValid")[0] == "True")
    await stage.until("statefulsets", "demo-trainer", bool, APPS)
    await stage.until("deployments", "demo-generator", bool, APPS)
    children = [
        *[await stage.get("deployments", "demo-generator", APPS), await stage.get("statefulsets", "demo-trainer", APPS)],
        *[await stage.get(plural, "demo-refit", CORE) for plural in ("services", "configmaps", "serviceaccounts")],
        await stage.get("poddisruptionbudgets", "demo-generator", POLICY),
    ]
    assert all(child["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"] for child in children)
    assert condition(group, "Ready") == ("False", "CreatingPods")
    assert group["status"]["observedGeneration"] == 1

"""Child objects as text: golden, so that a change of what users' pods look like is seen in review. `REWRITE=1` writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from refit_api import names
from refit_api.dialect import from_api
from refit_api.v1alpha1 import RefitGroupSpec
from refit_operator.decide.facts import Group
from refit_operator.resources import children, resolved, template_hash, workloads

from tests.examples import examples

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
GROUP = Group("ns", "demo", "00000000-0000-0000-0000-000000000001", 1)
ENGINE = {
    "metadata": {"labels": {"team": "rl"}, "annotations": {"mine": "stays"}},
    "spec": {
        "serviceAccountName": "mine",
        "terminationGracePeriodSeconds": 300,
        "volumes": [{"name": "weights", "emptyDir": {}}],
        "initContainers": [{"name": "warm", "image": "example/warm:1"}],
        "containers": [
            {
                "name": "engine",
                "image": "example/engine:1",
                "args": ["--model=/m"],
                "env": [{"name": "POD_IP", "value": "mine"}],
                "ports": [{"name": "metrics", "containerPort": 9090}, {"name": "http", "containerPort": 8000}],
                "volumeMounts": [{"name": "weights", "mountPath": "/m"}],
            },
            {"name": "sidecar", "image": "example/sidecar:1"},
        ],
    },
}
TRAINER = {"spec": {"containers": [{"name": "trainer", "image": "example/trainer:1"}]}}


def spec(**parts: Any) -> RefitGroupSpec:
    generators = {"template": ENGINE, "replicas": 3, "minAvailable": 2, **parts.pop("generators", {})}
    trainer = {"template": TRAINER, "replicas": 2, **parts.pop("trainer", {})}
    return from_api(RefitGroupSpec, {"model": {"name": "tiny", "revision": "r1"}, "trainer": trainer, "generators": generators, **parts})


def made(**parts: Any) -> dict[str, dict[str, Any]]:
    return {child["kind"]: child for child in children(GROUP, spec(**parts), "refit-catalog.refit-system.svc:7450", "CA")}


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment", "Service", "ConfigMap", "ServiceAccount", "PodDisruptionBudget"])
def test_golden(kind: str) -> None:
    text = yaml.safe_dump(made()[kind], sort_keys=False)
    file = GOLDEN / f"{kind.lower()}.yaml"
    if os.environ.get("REWRITE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_what_the_user_wrote_stays() -> None:
    """Ours is added around it; where both would name the same thing, the user's counts."""
    pod = made()["Deployment"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "mine"
    assert pod["terminationGracePeriodSeconds"] == 300
    engine = pod["containers"][0]
    assert [e for e in engine["env"] if e["name"] == "POD_IP"] == [{"name": "POD_IP", "value": "mine"}]
    assert engine["args"] == ["--model=/m"]
    assert "command" not in engine
    for container in (*pod["containers"], *pod["initContainers"]):
        assert {m["mountPath"] for m in container["volumeMounts"]} >= {names.SETTINGS_DIR, "/var/run/secrets/refit.dev"}


def test_pods_have_time_to_let_their_readers_finish() -> None:
    """A generator's hook waits drainSeconds + leaseSeconds; a trainer's time is the same at the defaults and never changes: that would end its run."""
    versions = {"drainSeconds": 200, "leaseSeconds": 20, "publishDeadlineSeconds": 300}
    graces = [
        [pods[kind]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] for kind in ("Deployment", "StatefulSet")]
        for pods in (made(generators={"template": TRAINER}), made(generators={"template": TRAINER}, versions=versions))
    ]
    assert graces == [[105, 105], [235, 105]]
    own = {"spec": {**TRAINER["spec"], "terminationGracePeriodSeconds": 1}}
    assert made(trainer={"template": own})["StatefulSet"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 1


@pytest.mark.parametrize(
    ("account", "name", "mounted"),
    [
        pytest.param({}, "demo-refit", False, id="ours, which may do nothing: no token"),
        pytest.param({"serviceAccountName": "mine"}, "mine", None, id="an account of one's own is there to be used"),
        pytest.param({"serviceAccount": "mine"}, None, None, id="also by its old name"),
        pytest.param({"automountServiceAccountToken": True}, "demo-refit", True, id="who asks for the token gets it"),
        pytest.param({"serviceAccountName": "mine", "automountServiceAccountToken": False}, "mine", False, id="who refuses it does not"),
    ],
)
def test_whose_token_is_mounted(account: dict[str, Any], name: str | None, mounted: bool | None) -> None:
    template = {"spec": {**TRAINER["spec"], **account}}
    pod = made(generators={"template": template})["Deployment"]["spec"]["template"]["spec"]
    assert (pod.get("serviceAccountName"), pod.get("automountServiceAccountToken")) == (name, mounted)


def test_the_quickstart_lists_what_is_added() -> None:
    bare = {"spec": {"containers": [{"name": "a", "image": "i", "ports": [{"containerPort": 1}]}]}}
    given, added = set(bare["spec"]["containers"][0]), set()
    for child in workloads(GROUP, spec(generators={"template": bare}, trainer={"template": bare}, restart={"id": "1"})):
        template = child["spec"]["template"]
        pod, container = template["spec"], template["spec"]["containers"][0]
        added |= {*template["metadata"]["labels"], *template["metadata"]["annotations"], *pod, *container} - given
        added |= {one["name"] for one in (*pod["volumes"], *container["env"])} | {one["mountPath"] for one in container["volumeMounts"]}
        added |= {gate["conditionType"] for gate in pod.get("readinessGates", ())}
        added |= {hook["httpGet"]["path"] for hook in container.get("lifecycle", {}).values()}
    section = (ROOT / "docs" / "quickstart.md").read_text().partition("### What is added to your pods")[2].partition("\n## ")[0]
    listed = {word for row in re.findall(r"^\|[^|]*\|([^|]*)\|", section, re.MULTILINE) for word in re.findall("`([^`]+)`", row)}
    assert added - {"containers"} == listed


def test_injection_twice_is_injection_once() -> None:
    """A template that somebody copied from a running pod is fine."""
    once = made()["Deployment"]["spec"]["template"]
    copied = {**once, "metadata": {**once["metadata"], "labels": {k: v for k, v in once["metadata"]["labels"].items() if k != names.LABEL_TEMPLATE}}}
    assert made(generators={"template": copied})["Deployment"]["spec"]["template"] == once


@pytest.mark.parametrize(
    ("container", "port"),
    [
        pytest.param({"readinessProbe": {"httpGet": {"port": "web"}}, "ports": [{"containerPort": 1}]}, "web", id="where the readiness probe asks"),
        pytest.param({"ports": [{"containerPort": 9090}, {"name": "http", "containerPort": 8000}]}, 8000, id="else the port named http"),
        pytest.param({"ports": [{"containerPort": 9090}]}, 9090, id="else the first"),
        pytest.param({}, None, id="no port, no hook"),
    ],
)
def test_where_the_prestop_hook_asks(container: dict[str, Any], port: int | str | None) -> None:
    template = {"spec": {"containers": [{"name": "engine", "image": "i", **container}]}}
    first = made(generators={"template": template})["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    hook = first.get("lifecycle", {}).get("preStop", {}).get("httpGet")
    assert hook == (None if port is None else {"path": names.PRESTOP_PATH, "port": port})


def test_a_hook_of_the_user_stays() -> None:
    mine = {"preStop": {"exec": {"command": ["bye"]}}}
    template = {"spec": {"containers": [{"name": "engine", "image": "i", "ports": [{"containerPort": 1}], "lifecycle": mine}]}}
    assert made(generators={"template": template})["Deployment"]["spec"]["template"]["spec"]["containers"][0]["lifecycle"] == mine


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        pytest.param({"generators": {"replicas": 9}}, [], id="replicas never restart pods"),
        pytest.param({"generators": {"minAvailable": 1, "maxSurge": 2}}, [], id="nor do bounds"),
        pytest.param({"versions": {"drainSeconds": 30}}, [], id="nor a deadline"),
        pytest.param({"rollout": {"paused": True}}, [], id="nor does the rollout"),
        pytest.param({"suspend": True}, [], id="nor does suspend"),
        pytest.param({"restart": {"id": "2026-12-01"}}, ["StatefulSet", "Deployment"], id="restart.id replaces all pods"),
        pytest.param({"generators": {"engine": {"kv": "Reset"}}}, ["Deployment"], id="what an engine reads at start replaces generators"),
        pytest.param({"trainer": {"redundancy": 3}}, ["StatefulSet"], id="what a trainer reads at start replaces trainers"),
    ],
)
def test_what_replaces_pods(change: dict[str, Any], rolls: list[str]) -> None:
    before, after = made(), made(**change)
    assert [kind for kind in ("StatefulSet", "Deployment") if template_hash(before[kind]) != template_hash(after[kind])] == rolls


@pytest.mark.parametrize(("amount", "whole", "is_"), [(2, 10, 2), ("50%", 3, 2), ("0%", 3, 0), ("100%", 3, 3), ("1%", 1, 1), ("10%", 0, 0)])
def test_percentages_round_up(amount: int | str, whole: int, is_: int) -> None:
    assert resolved(amount, whole) == is_


def test_a_budget_never_blocks_drains_for_ever() -> None:
    assert made()["PodDisruptionBudget"]["spec"]["minAvailable"] == 2
    assert made(generators={"replicas": 2})["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@examples(100)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("spec", "metadata"), JSON)),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("containers", "volumes", "initContainers"), JSON)),
)
def test_any_shape_is_passed_on_to_the_api_server(template: dict[str, Any], pod: dict[str, Any]) -> None:
    """Templates are opaque: nonsense is judged by the server, and never crashes a pass."""
    for one in (template, {"spec": pod}, {"spec": {"containers": [pod]}}):
        for workload in workloads(GROUP, spec(generators={"template": one})):
            assert workload["kind"] in ("StatefulSet", "Deployment")


def test_a_generator_that_a_framework_drives_has_no_hook_and_another_template() -> None:
    """Nobody would answer the hook; who drives is read once, at start. The gate stays."""
    managed, driven = made()["Deployment"], made(rollout={"policy": "Manual"})["Deployment"]
    pod = driven["spec"]["template"]["spec"]
    assert "lifecycle" not in pod["containers"][0]
    assert {"conditionType": names.READINESS_GATE} in pod["readinessGates"]
    assert template_hash(driven) != template_hash(managed)
    assert template_hash(made()["StatefulSet"]) == template_hash(made(rollout={"policy": "Manual"})["StatefulSet"])


def test_who_drives_is_part_of_a_template_without_a_hook_too() -> None:
    bare = {"template": {"spec": {"containers": [{"name": "engine", "image": "example/engine:1"}]}}}
    assert template_hash(made(generators=bare)["Deployment"]) != template_hash(made(generators=bare, rollout={"policy": "Manual"})["Deployment"])

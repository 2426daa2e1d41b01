"""Who may write what, judged by a real API server: pods and people cannot forge versions or status, and nobody is kept from deleting."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from refit_api import names

from e2e.kubectl import Kubectl, KubectlError, eventually
from tests.operator.stage import refit_group

ROOT = Path(__file__).parents[2]
POLICIES = ROOT / "manifests" / "base" / "policies.yaml"
NAMESPACE = "guarded"
VERSION: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": "WeightVersion",
    "metadata": {"name": "demo-v000000001", "namespace": NAMESPACE},
    "spec": {
        "groupRef": {"name": "demo"},
        "version": 1,
        "trainerStep": 0,
        "trainerRunId": "run",
        "expectedSlots": 1,
        "planKey": "plan",
        "idempotencyKey": "run:0",
    },
}


@pytest.fixture(scope="module")
def operator(kubectl: Kubectl, operator_user: Path) -> Iterator[Kubectl]:
    """kubectl as the operator, in a namespace that the policies guard; other suites' namespaces are left alone."""
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": {"guarded": "yes"}}})
    policies = list(yaml.safe_load_all(POLICIES.read_text()))
    for document in policies:
        if document["kind"] == "ValidatingAdmissionPolicyBinding":
            document["spec"]["matchResources"] = {"namespaceSelector": {"matchLabels": {"guarded": "yes"}}}
    kubectl.apply(*policies)
    eventually("the policies are in force", lambda: refused(kubectl, VERSION), 30)
    yield Kubectl(kubectl.program, operator_user)
    for document in policies:
        kubectl("delete", document["kind"], document["metadata"]["name"])


def refused(kubectl: Kubectl, body: dict[str, Any]) -> str:
    """What the server says to a creation; empty if it is fine."""
    try:
        kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(body))
    except KubectlError as error:
        return error.stderr
    return ""


def test_only_the_operator_makes_versions(kubectl: Kubectl, operator: Kubectl) -> None:
    assert "cannot be made by hand" in refused(kubectl, VERSION)
    assert refused(operator, VERSION) == ""


def test_only_the_operator_writes_status(kubectl: Kubectl, operator: Kubectl) -> None:
    group = refit_group()
    group["metadata"]["namespace"] = NAMESPACE
    kubectl.apply(group)
    body = yaml.safe_dump({**group, "spec": None, "status": {"currentVersion": 7}})
    write = ("apply", "--server-side", "--force-conflicts", "--subresource=status", "-f", "-")
    with pytest.raises(KubectlError, match="written by the Refit operator only"):
        kubectl(*write, stdin=body)
    operator(*write, stdin=body)


def test_people_hold_abort_and_delete(kubectl: Kubectl, operator: Kubectl) -> None:
    """What was published cannot be changed; what becomes of it can."""
    operator("create", "-f", "-", stdin=yaml.safe_dump(VERSION))
    kubectl("patch", "weightversion", "demo-v000000001", "-n", NAMESPACE, "--type=merge", "-p", '{"spec":{"hold":true,"abort":true}}')
    with pytest.raises(KubectlError, match="immutable"):
        kubectl("patch", "weightversion", "demo-v000000001", "-n", NAMESPACE, "--type=merge", "-p", '{"spec":{"trainerStep":9}}')
    kubectl("delete", "weightversion", "demo-v000000001", "-n", NAMESPACE, timeout=20)


def test_the_operator_never_writes_a_spec(operator: Kubectl) -> None:
    """Spec writes would be drift for GitOps; it has no right to."""
    with pytest.raises(KubectlError, match="cannot patch resource"):
        operator("patch", "refitgroup", "demo", "-n", NAMESPACE, "--type=merge", "-p", '{"spec":{"suspend":true}}')


@pytest.mark.parametrize(
    "what", ["list secrets", "get secrets", "create pods", "delete refitgroups", "patch refitgroups", "create rolebindings", "get nodes", "delete namespaces"]
)
def test_what_the_operator_may_not(operator: Kubectl, what: str) -> None:
    verb, resource = what.split()
    with pytest.raises(KubectlError):
        operator("auth", "can-i", verb, resource, "-n", NAMESPACE)


def test_the_runbook_ends_versions_whose_operator_is_gone(kubectl: Kubectl, operator: Kubectl) -> None:
    """Also where the policies are in force: they never keep anybody from deleting."""
    name = VERSION["metadata"]["name"]
    operator.apply({**VERSION, "metadata": {**VERSION["metadata"], "finalizers": [names.FINALIZER]}})
    kubectl("delete", "weightversion", name, "--namespace", NAMESPACE, "--wait=false")
    assert name in kubectl("get", "weightversions", "--namespace", NAMESPACE, "-o", "name")
    (line,) = re.findall("^kubectl (patch .*)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    kubectl(*shlex.split(line.replace("NAMESPACE", NAMESPACE).replace("NAME", name, 1)))
    kubectl("wait", "--for=delete", "--timeout=30s", f"weightversion/{name}", "--namespace", NAMESPACE)

"""The API server that other tests stand on: real, alone, and gone afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.cluster.audit import Write
from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import kubectl_program
from e2e.cluster.processes import call, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer.start(tmp_path_factory.mktemp("apiserver"), controller_manager=True) as running:
        yield running


def kubectl(kubeconfig: Path, *words: str) -> str:
    return call([kubectl_program(), f"--kubeconfig={kubeconfig}", *words])


def test_it_serves_its_administrator(server: ApiServer) -> None:
    assert kubectl(server.kubeconfig, "get", "--raw=/readyz") == "ok"


def test_another_user_may_do_what_is_granted_and_no_more(server: ApiServer) -> None:
    reader = server.user("reader", ("readers",))
    assert kubectl(reader, "auth", "whoami", "--output=jsonpath={.status.userInfo.username}") == "reader"
    with pytest.raises(ClusterError, match="forbidden"):
        kubectl(reader, "get", "namespaces")
    kubectl(server.kubeconfig, "create", "clusterrole", "lists-namespaces", "--verb=list", "--resource=namespaces")
    kubectl(server.kubeconfig, "create", "clusterrolebinding", "readers", "--clusterrole=lists-namespaces", "--group=readers")
    # the server's own view of its rules follows a moment later
    wait_until(lambda: _may(reader, "list", "namespaces"), "the new rule", 10)
    assert "namespace/default" in kubectl(reader, "get", "namespaces", "--output=name")
    assert not _may(reader, "create", "namespaces")


def _may(kubeconfig: Path, verb: str, resource: str) -> bool:
    try:
        return kubectl(kubeconfig, "auth", "can-i", verb, resource).strip() == "yes"
    except ClusterError:  # "no" is its exit code 1
        return False


def test_writes_are_counted_by_user(server: ApiServer) -> None:
    kubectl(server.kubeconfig, "create", "configmap", "counted", "--from-literal=a=b")
    kubectl(server.kubeconfig, "get", "configmap", "counted")
    ours = [write for write in server.writes() if write.name == "counted"]
    assert ours == [Write("admin", "create", "configmaps", "default", "counted", 201)]


def test_controllers_run_when_asked_for(server: ApiServer) -> None:
    kubectl(server.kubeconfig, "create", "namespace", "passing")
    kubectl(server.kubeconfig, "wait", "--for=create", "serviceaccount/default", "--namespace=passing", "--timeout=30s")
    kubectl(server.kubeconfig, "delete", "namespace", "passing", "--timeout=30s")
    assert "passing" not in json.dumps(json.loads(kubectl(server.kubeconfig, "get", "namespaces", "--output=json")))

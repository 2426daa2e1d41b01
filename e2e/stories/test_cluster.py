"""The cluster under the stories is one command away from working, whatever died."""

from __future__ import annotations

import json
import signal

import pytest

from e2e.cluster.local import LocalCluster
from e2e.cluster.processes import alive, send, wait_until
from e2e.installation import NAMESPACE, Installation


@pytest.mark.story
def test_killed_components_come_back_and_pods_go_on(installation: Installation) -> None:
    cluster = installation.cluster
    if not isinstance(cluster, LocalCluster):
        pytest.skip("only the local cluster has components of ours")

    def pods() -> dict[str, int]:
        found = json.loads(installation.kubectl("get", "pods", "--namespace", NAMESPACE, "--output=json"))["items"]
        return {pod["metadata"]["uid"]: sum(one["restartCount"] for one in pod["status"]["containerStatuses"]) for pod in found}

    before = pods()
    killed = [record.identity for record in map(cluster.components().running, ("kubelet", "containerd", "etcd")) if record is not None]
    assert len(killed) == 3
    for identity in killed:
        send(identity, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, killed)), "the killed to be gone", 10)
    cluster.up()
    assert {state for _, state in cluster.status() if not state.startswith("running")} == set()
    assert pods() == before

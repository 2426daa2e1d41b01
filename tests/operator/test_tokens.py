"""Who calls the catalog, with real projected tokens of a real API server and the operator's real rights."""

from __future__ import annotations

import pytest
from refit_api.errors import Denied
from refit_api.names import AUDIENCE
from refit_api.wire import Role, WorkerRef
from refit_operator import kube
from refit_operator.catalog.auth import Gate, PodCaller
from refit_operator.kube import KubeCluster

from tests.operator.stage import CORE, Stage, SystemClock, refit_group


async def token(stage: Stage, pod: str, uid: str, audience: str = AUDIENCE) -> str:
    """As the kubelet asks for it: bound to the pod."""
    bound = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [audience], "expirationSeconds": 600, "boundObjectRef": bound},
    }
    answer = await stage.cluster.request("POST", stage.path("serviceaccounts", "demo-refit/token", CORE), body)
    return str(answer["status"]["token"])


async def test_a_pod_is_known_by_its_token_and_by_the_watch(stage: Stage) -> None:
    """Checked offline against the cluster's keys; the pod index decides group and role; another pod's worker is refused."""
    assert stage.operator is not None
    await stage.create(refit_group())
    uid = await stage.pod("demo-generator-a", Role.GENERATOR)
    client = await kube.connect(stage.identity)
    try:
        gate = Gate(KubeCluster(client), stage.operator.watch, SystemClock())
        caller = await gate.identify(f"Bearer {await token(stage, 'demo-generator-a', uid)}")
        assert caller == PodCaller(stage.namespace, "demo-generator-a", uid)
        mine = WorkerRef(uid, Role.GENERATOR, 0, "a")
        await stage.until("pods", "demo-generator-a", bool, CORE)
        await gate.admit(caller, "Heartbeat", stage.key(), mine)
        with pytest.raises(Denied):
            await gate.admit(caller, "Heartbeat", stage.key(), WorkerRef("other", Role.GENERATOR, 0, "a"))
        with pytest.raises(Denied):
            await gate.admit(caller, "Heartbeat", stage.key("another"), mine)
        with pytest.raises(Denied):
            await gate.identify(f"Bearer {await token(stage, 'demo-generator-a', uid, audience='somebody-else')}")
    finally:
        await client.close()


async def test_people_are_asked_about(stage: Stage) -> None:
    """TokenReview says who it is, SubjectAccessReview whether they may read the group."""
    await stage.create(refit_group())
    client = await kube.connect(stage.identity)
    try:
        cluster = KubeCluster(client)
        assert (await cluster.signing_keys())["keys"]
        assert (await cluster.issuer()).startswith("https://")
        assert await cluster.review("no token", AUDIENCE) is None
        assert await cluster.may_get({"username": "admin", "groups": ["system:masters"]}, stage.key())
        assert not await cluster.may_get({"username": "stranger", "groups": []}, stage.key())
    finally:
        await client.close()

"""With the real controllers beside it: pods are made, chosen and collected by Kubernetes, as the operator told it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT, kubectl_of
from tests.operator.conftest import identity, running
from tests.operator.stage import APPS, CORE, POLICY, Body, Stage, condition, refit_group

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.apiserver import ApiServer

GENERATORS = refit_group()["spec"]["generators"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, Path]]:
    """etcd, API server and controllers; no node, so pods stay pending until the test says otherwise."""
    from e2e.cluster.apiserver import ApiServer

    with ApiServer.start(tmp_path_factory.mktemp("controllers"), controller_manager=True) as server:
        kubectl = kubectl_of(server)
        kubectl("apply", "--server-side", "-k", str(ROOT / "crds"))
        kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/refitgroups.refit.dev", "crd/weightversions.refit.dev")
        yield server, identity(server, kubectl)


@pytest.fixture
async def stage(cluster: tuple[ApiServer, Path]) -> AsyncIterator[Stage]:
    async with running(*cluster) as made:
        yield made


async def pods(stage: Stage, role: str, count: int) -> list[Body]:
    """That many, none of them going."""
    there: list[Body] = []
    for _ in range(300):
        there = [
            p for p in await stage.list("pods", CORE) if p["metadata"]["labels"].get("refit.dev/role") == role and "deletionTimestamp" not in p["metadata"]
        ]
        if len(there) == count:
            return there
        await asyncio.sleep(0.1)
    raise AssertionError(f"{len(there)} {role} pods, {count} expected")


async def left(stage: Stage) -> list[str]:
    """What is in the namespace that was not there before the group."""
    kinds = [
        ("refitgroups", None),
        ("weightversions", None),
        *((k, CORE) for k in ("pods", "services")),
        *((k, APPS) for k in ("deployments", "statefulsets", "replicasets")),
    ]
    found = [f"{kind}/{one['metadata']['name']}" for kind, prefix in kinds for one in await (stage.list(kind, prefix) if prefix else stage.list(kind))]
    found += [f"budget/{one['metadata']['name']}" for one in await stage.list("poddisruptionbudgets", POLICY)]
    shared = [(kind, one["metadata"]["name"]) for kind in ("configmaps", "serviceaccounts") for one in await stage.list(kind, CORE)]
    return found + [f"{kind}/{name}" for kind, name in shared if name not in ("default", "kube-root-ca.crt")]


async def test_deleting_a_group_leaves_nothing(stage: Stage) -> None:
    """Children, pods, versions with their finalizers: all of it, in bounded time, although versions are served."""
    made = await stage.create(refit_group())
    (trainer_pod,), (generator_pod,) = await pods(stage, "trainer", 1), await pods(stage, "generator", 1)
    trainer = await stage.trainer(trainer_pod["metadata"]["name"], trainer_pod["metadata"]["uid"])
    await stage.generator(generator_pod["metadata"]["name"], generator_pod["metadata"]["uid"])
    number = await trainer.publish(step=0)
    await stage.until("refitgroups", "demo", lambda g: g["status"].get("currentVersion") == number)
    await stage.cluster.delete("RefitGroup", stage.namespace, "demo", made["metadata"]["uid"])
    remains: list[str] = []
    for _ in range(300):
        remains = await left(stage)
        if not remains:
            break
        await asyncio.sleep(0.2)
    assert remains == []


async def test_the_pod_without_weights_goes_first(stage: Stage) -> None:
    """Scale down: Kubernetes picks by deletion cost, which follows the readiness gate."""
    await stage.create(refit_group(generators={**GENERATORS, "replicas": 3}))
    (trainer_pod,) = await pods(stage, "trainer", 1)
    first, second, third = await pods(stage, "generator", 3)
    trainer = await stage.trainer(trainer_pod["metadata"]["name"], trainer_pod["metadata"]["uid"])
    for pod in (first, third):
        await stage.generator(pod["metadata"]["name"], pod["metadata"]["uid"])
    await stage.ready(second["metadata"]["name"])
    await trainer.publish(step=0)
    for pod in (first, third):
        await stage.until("pods", pod["metadata"]["name"], lambda p: "controller.kubernetes.io/pod-deletion-cost" in p["metadata"].get("annotations", {}), CORE)
    await stage.cluster.request("PATCH", stage.path("refitgroups", "demo/scale"), {"spec": {"replicas": 2}}, "application/merge-patch+json")
    names = {pod["metadata"]["name"] for pod in await pods(stage, "generator", 2)}
    assert names == {first["metadata"]["name"], third["metadata"]["name"]}


async def test_a_new_trainer_template_replaces_all_trainer_pods_at_once(stage: Stage) -> None:
    """One by one, the first new rank would wait for ever for the others."""
    trainer = {"replicas": 2, "template": {"spec": {"containers": [{"name": "trainer", "image": "localhost/none"}]}}}
    await stage.create(refit_group(trainer=trainer))
    before = {pod["metadata"]["uid"] for pod in await pods(stage, "trainer", 2)}
    await stage.patch("refitgroups", "demo", {"spec": {"restart": {"id": "again"}}})
    for _ in range(300):
        there = await stage.list("pods", CORE)
        new = [p for p in there if p["metadata"]["labels"]["refit.dev/role"] == "trainer" and p["metadata"]["uid"] not in before]
        if len(new) == 2:
            break
        await asyncio.sleep(0.1)
    assert len(new) == 2


async def test_a_group_made_again_under_its_name_starts_anew(stage: Stage) -> None:
    """While the children of the former one are still being collected; nothing of it is taken for the new one's."""
    made = await stage.create(refit_group())
    old = (await stage.until("deployments", "demo-generator", bool, APPS))["metadata"]["uid"]
    await stage.cluster.delete("RefitGroup", stage.namespace, "demo", made["metadata"]["uid"])
    await stage.create(refit_group())
    await stage.until("deployments", "demo-generator", lambda d: d["metadata"]["uid"] != old, APPS, seconds=60.0)
    await pods(stage, "generator", 1)
    await stage.until("refitgroups", "demo", lambda g: condition(g, "Stalled")[0] == "False")

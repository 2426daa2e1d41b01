"""What a test does around the operator: objects, pods as a kubelet would show them, and waiting for what should come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiClient
from refit_api import names
from refit_api.errors import CatalogUnavailable
from refit_api.wire import GroupRef, Role, WorkerRef
from refit_operator import handlers, kube, wiring
from refit_operator.catalog.memory import MemoryCatalog
from refit_operator.kube import KubeCluster
from refit_operator.settings import OperatorSettings

from tests.operator.actors import Actor, Generator, Trainer

APPS, CORE, POLICY = "/apis/apps/v1", "/api/v1", "/apis/policy/v1"
GROUP = f"/apis/{names.API_VERSION}"
WAIT_SECONDS = 20.0

Body = dict[str, Any]


def refit_group(name: str = "demo", **spec: Any) -> Body:
    """A small group; keywords replace parts of its spec."""
    container = {"name": "engine", "image": "localhost/none", "ports": [{"name": "http", "containerPort": 8000}]}
    whole = {
        "model": {"name": "tiny"},
        "trainer": {"replicas": 1, "template": {"spec": {"containers": [{"name": "trainer", "image": "localhost/none"}]}}},
        "generators": {"replicas": 1, "template": {"spec": {"containers": [container]}}, "engine": {"kind": "Custom"}},
    }
    return {"apiVersion": names.API_VERSION, "kind": "RefitGroup", "metadata": {"name": name}, "spec": {**whole, **spec}}


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


@dataclass(slots=True)
class Running:
    """One life of the operator, as the process would be: its memory ends with it."""

    client: ApiClient
    catalog: MemoryCatalog
    watch: handlers.Watch
    flags: wiring.Flags
    task: asyncio.Task[None]

    async def stop(self) -> None:
        self.flags.stop.set()
        await asyncio.wait_for(self.task, 30.0)
        await self.client.close()


@dataclass(slots=True)
class Stage:
    """One namespace with its operator. Pods are made here, since no controller runs. `cluster` is an administrator's."""

    cluster: KubeCluster
    identity: Path
    namespace: str
    operator: Running | None = None
    actors: list[Actor] = field(default_factory=list)

    @classmethod
    async def make(cls, cluster: KubeCluster, identity: Path, namespace: str) -> Stage:
        await cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        return cls(cluster, identity, namespace)

    async def start(self) -> None:
        """A new operator process, as far as anybody can see."""
        assert self.operator is None
        settings = OperatorSettings(namespaces=(self.namespace,), catalog_host="127.0.0.1", catalog_port=0, health_port=0)
        client, clock = await kube.connect(self.identity), SystemClock()
        catalog, watch = MemoryCatalog(clock), handlers.Watch()
        flags = wiring.Flags(asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future())
        parts = wiring.Parts(KubeCluster(client), catalog, watch, clock, partial(kube.connection, client))
        self.operator = Running(client, catalog, watch, flags, asyncio.create_task(wiring.run(settings, parts, flags)))
        await asyncio.wait_for(flags.ready.wait(), 30.0)

    async def restart(self) -> None:
        """The old one is gone, with all that it remembered; workers find the new one."""
        assert self.operator is not None
        await self.operator.stop()
        self.operator = None
        await self.start()
        for actor in self.actors:
            if isinstance(actor, Generator):
                await actor.leave()
            actor.catalog = self.catalog
            await self._registered(actor.join)

    @property
    def catalog(self) -> MemoryCatalog:
        assert self.operator is not None
        return self.operator.catalog

    def key(self, name: str = "demo") -> GroupRef:
        return GroupRef(self.namespace, name)

    async def pod(self, name: str, role: Role, group: str = "demo") -> str:
        """A pod as the workload's controller would make it; gives its uid."""
        workload = ("deployments", f"{group}-generator") if role is Role.GENERATOR else ("statefulsets", f"{group}-trainer")
        template = (await self.until(*workload, bool, APPS))["spec"]["template"]
        body = {"metadata": {**template["metadata"], "name": name}, "spec": {**template["spec"], "terminationGracePeriodSeconds": 0}}
        return str((await self.cluster.request("POST", self.path("pods", prefix=CORE), body))["metadata"]["uid"])

    async def ready(self, name: str) -> None:
        """As the kubelet says, once containers and gate are."""
        body = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await self.cluster.request("PATCH", self.path("pods", f"{name}/status", CORE), body, "application/strategic-merge-patch+json")

    async def trainer(self, name: str = "demo-trainer-0", uid: str = "") -> Trainer:
        """A trainer pod whose only rank has registered; made here, unless it has a uid already."""
        made = Trainer(self.catalog, self.key(), WorkerRef(uid or await self.pod(name, Role.TRAINER), Role.TRAINER, 0, "a"))
        await self._play(name, made)
        return made

    async def generator(self, name: str, uid: str = "") -> Generator:
        """A generator pod that has registered and follows orders."""
        made = Generator(self.catalog, self.key(), WorkerRef(uid or await self.pod(name, Role.GENERATOR), Role.GENERATOR, 0, "a"))
        await self._play(name, made)
        return made

    async def _play(self, name: str, actor: Actor) -> None:
        await self._registered(actor.join)
        await self.ready(name)
        self.actors.append(actor)

    async def _registered(self, join: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The catalog answers once the operator has opened the group and written its epoch."""
        for _ in range(100):
            with suppress(CatalogUnavailable):
                return await join()
            await asyncio.sleep(0.1)
        return await join()

    async def close(self) -> None:
        for actor in self.actors:
            if isinstance(actor, Generator):
                await actor.leave()
        if self.operator is not None:
            await self.operator.stop()

    def path(self, plural: str, name: str = "", prefix: str = GROUP) -> str:
        return f"{prefix}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    async def create(self, body: Body) -> Body:
        return await self.cluster.request("POST", self.path("refitgroups"), body)

    async def get(self, plural: str, name: str, prefix: str = GROUP) -> Body:
        return await self.cluster.request("GET", self.path(plural, name, prefix))

    async def list(self, plural: str, prefix: str = GROUP) -> list[Body]:
        return list((await self.cluster.request("GET", self.path(plural, prefix=prefix)))["items"])

    async def patch(self, plural: str, name: str, body: Body, prefix: str = GROUP) -> Body:
        return await self.cluster.request("PATCH", self.path(plural, name, prefix), body, "application/merge-patch+json")

    async def until(self, plural: str, name: str, true: Callable[[Body], bool], prefix: str = GROUP, seconds: float = WAIT_SECONDS) -> Body:
        """The object, once it is as wanted; fails with the object as it is."""
        body: Body = {}
        for _ in range(int(seconds / 0.05)):
            body = next((item for item in await self.list(plural, prefix) if item["metadata"]["name"] == name), {})
            if body and true(body):
                return body
            await asyncio.sleep(0.05)
        raise AssertionError(f"{plural} {name} never became so; its status is {body.get('status', body)}")


def condition(body: Body, kind: str) -> tuple[str, str]:
    """Status and reason."""
    found = next((c for c in body.get("status", {}).get("conditions", ()) if c["type"] == kind), {})
    return found.get("status", ""), found.get("reason", "")

"""What a test does around the operator: objects, pods as a kubelet would show them, and waiting for what should come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refit_api import names
from refit_operator.kube import KubeCluster

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


@dataclass(frozen=True, slots=True)
class Stage:
    cluster: KubeCluster
    namespace: str

    @classmethod
    async def make(cls, cluster: KubeCluster, namespace: str) -> Stage:
        await cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        return cls(cluster, namespace)

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
        raise AssertionError(f"{plural} {name} never became so; it is {body}")


def condition(body: Body, kind: str) -> tuple[str, str]:
    """Status and reason."""
    found = next((c for c in body.get("status", {}).get("conditions", ()) if c["type"] == kind), {})
    return found.get("status", ""), found.get("reason", "")

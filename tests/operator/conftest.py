"""The whole operator in the test's own event loop, against a real API server without controllers: pods and child status are the test's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

import pytest
from refit_operator import kube, wiring
from refit_operator.catalog.memory import MemoryCatalog
from refit_operator.settings import OperatorSettings

from tests.operator.stage import Stage

if TYPE_CHECKING:
    from e2e.cluster.apiserver import ApiServer


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


@pytest.fixture
async def stage(api_server: ApiServer) -> AsyncIterator[Stage]:
    """A namespace of its own with a running operator that watches only it."""
    client = await kube.connect(api_server.kubeconfig)
    cluster, clock = kube.KubeCluster(client), SystemClock()
    made = await Stage.make(cluster, MemoryCatalog(clock), f"refit-{time.time_ns():x}")
    settings = OperatorSettings(
        namespaces=(made.namespace,), POD_NAMESPACE=made.namespace, catalog_host="127.0.0.1", catalog_port=0, health_port=0, resync_seconds=600.0
    )
    flags = wiring.Flags(asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future())
    parts = wiring.Parts(cluster, made.catalog, clock, partial(kube.connection, client))
    running = asyncio.create_task(wiring.run(settings, parts, flags))
    try:
        await asyncio.wait_for(flags.ready.wait(), 30.0)
        yield made
    finally:
        await made.close()
        flags.stop.set()
        await asyncio.wait_for(running, 30.0)
        await client.close()

"""The whole operator in the test's own event loop, against a real API server without controllers: pods and child status are the test's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from refit_operator import kube

from tests.operator.stage import Stage

if TYPE_CHECKING:
    from e2e.cluster.apiserver import ApiServer
    from e2e.kubectl import Kubectl


BASE = Path(__file__).parents[2] / "manifests" / "base"
SERVICE_ACCOUNT = "system:serviceaccount:refit-system:refit-operator"


def identity(server: ApiServer, kubectl: Kubectl) -> Path:
    """The operator's own, with the rights that its manifests grant and no others."""
    for name in ("namespace.yaml", "rbac.yaml"):
        kubectl("apply", "--server-side", "-f", str(BASE / name))
    return server.user(SERVICE_ACCOUNT, ("system:serviceaccounts", "system:serviceaccounts:refit-system", "system:authenticated"))


@asynccontextmanager
async def running(server: ApiServer, user: Path) -> AsyncIterator[Stage]:
    """A namespace of its own, with an operator that watches only it."""
    client = await kube.connect(server.kubeconfig)
    made = await Stage.make(kube.KubeCluster(client), user, f"refit-{time.time_ns():x}")
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        await client.close()
        await asyncio.sleep(0.05)  # closed transports end in the loop's next rounds, not after its end


@pytest.fixture(scope="session")
def operator_user(api_server: ApiServer, kubectl: Kubectl) -> Path:
    return identity(api_server, kubectl)


@pytest.fixture
async def stage(api_server: ApiServer, operator_user: Path) -> AsyncIterator[Stage]:
    async with running(api_server, operator_user) as made:
        yield made

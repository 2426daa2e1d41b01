"""`python -m refit_operator`: settings -> logging -> wiring -> kopf."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial

import kopf
import structlog
from prometheus_client import start_http_server
from refit_api.errors import RefitError

from refit_operator import handlers, kube, telemetry, wiring
from refit_operator.catalog.memory import MemoryCatalog
from refit_operator.settings import OperatorSettings


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


async def _run(settings: OperatorSettings) -> None:
    client = await kube.connect(settings.kubeconfig)
    cluster = kube.KubeCluster(client)
    login = kopf.login_with_service_account if settings.kubeconfig is None else partial(kube.connection, client)
    clock = SystemClock()
    flags = wiring.Flags(asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future())
    try:
        await wiring.run(settings, wiring.Parts(cluster, MemoryCatalog(clock), handlers.Watch(), clock, login), flags)
    finally:
        await cluster.close()


def main() -> int:
    """Exit code 0: stopped as asked; 1: a part failed, and the log says which."""
    try:
        telemetry.configure("INFO")
        settings = OperatorSettings.load()
        telemetry.configure(settings.log_level)
        if settings.metrics_port:
            start_http_server(settings.metrics_port)
        asyncio.run(_run(settings))
    except RefitError as error:
        structlog.get_logger(__name__).error("operator ended", error=type(error).__name__, message=error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

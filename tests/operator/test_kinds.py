"""The operator never runs blind: it waits for the two kinds, says when they are not there, and ends when they go away."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
import yaml
from aiohttp import web
from refit_operator import kube

from e2e.cluster.apiserver import free_ports
from tests.conftest import ROOT, kubectl_of
from tests.operator.conftest import identity
from tests.operator.test_process import WAIT_SECONDS, ask, operator

if TYPE_CHECKING:
    from e2e.kubectl import Kubectl


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kubectl, Path]]:
    """An API server that does not know the kinds."""
    from e2e.cluster.apiserver import ApiServer

    with ApiServer.start(tmp_path_factory.mktemp("bare")) as server:
        kubectl = kubectl_of(server)
        yield kubectl, identity(server, kubectl)


def variables(user: Path, **more: str) -> dict[str, str]:
    ports = dict(zip(("CATALOG_PORT", "METRICS_PORT", "HEALTH_PORT"), map(str, free_ports(3)), strict=True))
    return {f"REFIT_OPERATOR_{name}": value for name, value in {"KUBECONFIG": str(user), "CATALOG_HOST": "127.0.0.1", **ports, **more}.items()}


def ended(code: int, log: str) -> None:
    assert code == 1
    (said,) = (line for line in map(json.loads, log.splitlines()) if line["event"] == "operator ended")
    assert said["error"] == "SpecError"
    assert re.search("does not have .*(refitgroups|weightversions) of refit.dev/v1alpha1: apply the CRDs of crds/$", said["message"])


def test_without_the_kinds_it_ends_and_says_what_to_apply(bare: tuple[Kubectl, Path]) -> None:
    with operator(**variables(bare[1], KINDS_SECONDS="1")) as process:
        _, log = process.communicate(timeout=WAIT_SECONDS)
    ended(process.returncode, log)


def test_it_waits_for_the_kinds_and_ends_when_they_go(bare: tuple[Kubectl, Path]) -> None:
    kubectl, user = bare
    settings = variables(user, KINDS_SECONDS="60")
    with operator(**settings) as process:
        assert process.stderr is not None
        assert "waiting for the kinds" in process.stderr.readline()
        kubectl("apply", "--server-side", "-k", str(ROOT / "crds"))
        assert "queue" in ask(f"http://127.0.0.1:{settings['REFIT_OPERATOR_HEALTH_PORT']}/healthz")
        section = (ROOT / "docs" / "quickstart.md").read_text().partition("\nRefit itself:")[2].partition("\n## ")[0]
        groups, versions, _ = re.findall("^kubectl (.*)$", section, re.MULTILINE)
        for line in (groups, versions):  # with nothing there to delete they are fine too
            kubectl(*line.split())
        kubectl("delete", "-k", str(ROOT / "crds"))
        _, log = process.communicate(timeout=WAIT_SECONDS)
    ended(process.returncode, log)


def through(port: int, user: Path, folder: Path) -> Path:
    config = yaml.safe_load(user.read_text())
    config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
    place = folder / "slow.kubeconfig"
    place.write_text(yaml.safe_dump(config))
    return place


@asynccontextmanager
async def slow(user: Path, folder: Path, plural: str) -> AsyncIterator[tuple[Path, asyncio.Event]]:
    """A kubeconfig of the same API server, which does not answer who watches `plural`; the event: somebody tries."""
    client, waiting = await kube.connect(user), asyncio.Event()
    known = client.configuration
    credentials = ssl.create_default_context(cafile=known.ssl_ca_cert)
    credentials.load_cert_chain(known.cert_file, known.key_file)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=credentials))

    async def forward(request: web.Request) -> web.StreamResponse:
        if request.path.endswith(plural) and "watch" in request.query:
            waiting.set()
            await asyncio.Event().wait()
        target = f"{known.host}{request.rel_url}"
        async with session.request(request.method, target, data=await request.read() or None, headers=request.headers) as answer:
            reply = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            with suppress(ConnectionError):
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
            return reply

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(application, shutdown_timeout=1.0)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield through(port, user, folder), waiting
    finally:
        await runner.cleanup()
        await session.close()
        await client.close()


async def test_a_watch_that_waits_for_its_answer_does_not_hold_the_end(bare: tuple[Kubectl, Path], tmp_path: Path) -> None:
    """kopf takes the end of such a watch for a pause, and watches on: it killed the process ten seconds later, without a word of the reason."""
    kubectl, user = bare
    crds = str(ROOT / "crds")
    await asyncio.to_thread(kubectl, "apply", "--server-side", "-k", crds)
    async with slow(user, tmp_path, "weightversions") as (kubeconfig, waiting):
        with operator(**variables(kubeconfig, KINDS_SECONDS="60")) as process:
            await asyncio.wait_for(waiting.wait(), WAIT_SECONDS)
            await asyncio.to_thread(kubectl, "delete", "-k", crds)
            _, log = await asyncio.to_thread(process.communicate, timeout=WAIT_SECONDS)
        ended(process.returncode, log)

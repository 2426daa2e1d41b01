"""`vllm.endpoint_plugins`: the pod agent inside vLLM's API server, its routes, and the gate in front of all others.

One agent per generator: the API server that holds the pod's lock. It starts when the engine is up and is started again if it fails by a bug; the
engine then serves on what it serves. Routes need no dev mode and change nothing but what the kubelet asks for at the end (preStop). With policy Manual
a framework does all this, and nothing is attached.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from refit_api import names
from refit_api.errors import RefitError

from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.vllm.driver import VllmDriver
from refit_runtime.adapters.vllm.gate import Gate, noting
from refit_runtime.adapters.vllm.pod import Pod
from refit_runtime.agent import Agent
from refit_runtime.foreign import stack
from refit_runtime.settings import RuntimeSettings
from refit_runtime.status import document
from refit_runtime.wiring import catalog_of

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.2
RESTART_SECONDS = (1.0, 30.0)


class RefitEndpoint:
    """vLLM makes one, attaches its routes, and starts it when the engine is up."""

    name = "refit"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._settings = RuntimeSettings.load()
        self._pod = Pod(self._settings.pod.uid)
        self._agent: Agent | None = None
        self._task: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        if not self._settings.rollout.managed:
            return
        app.add_middleware(Gate, pod=self._pod)
        routes: dict[str, Callable[[], Awaitable[JSONResponse]]] = {
            names.VERSION_PATH: self.version,
            names.STATUS_PATH: self.status,
            names.PRESTOP_PATH: self.prestop,
        }
        for path, answer in routes.items():
            app.add_api_route(path, answer, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Without an engine (the render server) there is nothing to refit."""
        if engine_client is None or not self._settings.rollout.managed:
            return
        engine_client.generate = noting(engine_client.generate)
        if self._pod.lead():
            self._task = asyncio.create_task(self._run(engine_client.engine_core), name="refit-agent")

    async def _run(self, core: Any) -> None:
        """A driver for each agent: its first question goes through the engine, behind all that the agent before had asked of it."""
        wait = RESTART_SECONDS[0]
        while True:
            began = time.monotonic()
            driver = VllmDriver(core, self._pod, self._settings)
            self._agent = Agent(self._settings, catalog_of(self._settings), driver, SystemClock(), Random())
            leaver = asyncio.create_task(self._leave_when_asked(self._agent))
            try:
                await self._agent.run()
            except Exception as error:  # noqa: BLE001  the engine serves on; an agent that is gone would leave it on this version for good
                wait = RESTART_SECONDS[0] if time.monotonic() - began > RESTART_SECONDS[1] else wait  # it may have left the engine paused
                log.error("the agent failed and is started again", wait=wait, stack=stack(error))  # noqa: TRY400  see `foreign`
            finally:
                leaver.cancel()
            await asyncio.sleep(wait)
            wait = min(2 * wait, RESTART_SECONDS[1])

    async def _leave_when_asked(self, agent: Agent) -> None:
        """Until it has left: who asks without a right to is refused, and it listens on."""
        why_not: str | None = None
        while why_not != "":
            while not self._pod.asked_to_leave:  # noqa: ASYNC110  a file: another process may ask
                await asyncio.sleep(LOOK_SECONDS)
            try:
                await agent.leave()
                why_not = ""
            except RefitError as error:
                log.warning("not left in order", error=error.message, facts=error.facts)
                why_not = error.message
            self._pod.say_left(why_not)

    async def version(self) -> JSONResponse:
        state = self._pod.read()
        return JSONResponse({"version": 0 if state.closed else state.version, "closed": state.closed})

    async def status(self) -> JSONResponse:
        if self._agent is None:
            return JSONResponse({"error": "the agent of this pod is in another API server process, or not started yet: ask again"}, 503)
        return JSONResponse(document(self._agent.view()))

    async def prestop(self) -> JSONResponse:
        """Answers when the readers of this pod are gone, or when waiting longer is no use."""
        self._pod.ask_to_leave()
        versions = self._settings.versions
        deadline = time.monotonic() + versions.drain_seconds + versions.lease_seconds
        while (why_not := self._pod.left()) is None and time.monotonic() < deadline:  # noqa: ASYNC110  a file: another process may answer
            await asyncio.sleep(LOOK_SECONDS)
        return JSONResponse({"left": why_not == "", "reason": why_not if why_not is not None else "the agent did not answer"})

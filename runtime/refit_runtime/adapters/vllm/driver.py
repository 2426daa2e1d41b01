"""All ranks of all engine cores of one vLLM, from its API server.

- Orders to the ranks go through `collective_rpc` on every engine core: the public call of a server with several cores returns the first one's answer.
- What the ranks are doing is read from the pod's files, where they write it; the engine is asked at the start, and for ranks in other pods.
- They have no RPC timeout: an executor that stops reading at a late rank leaves that rank's answer for the next call to find. Deadlines are the agent's.
- An engine core that dies answers nothing that it was asked before, and raises what it is asked after; vLLM ends this process then.
- A pause is the engine core's own: it returns when no step is in flight and the device is idle. The label is set while paused, so no token of the new
  weights carries the old version.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import structlog
from refit_api.errors import EngineBusy, PeerUnavailable
from refit_api.wire import RankReport

from refit_runtime import last_words
from refit_runtime.adapters.vllm.messages import pack_order, unpack_report
from refit_runtime.adapters.vllm.pod import Pod, State
from refit_runtime.deadline import within
from refit_runtime.ports import CommitOrder, StageOrder
from refit_runtime.settings import RuntimeSettings

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.2
FAILED = 70  # exit status: an internal error, to be restarted


class VllmDriver:
    """`core`: the API server's client of its engine cores."""

    def __init__(self, core: Any, pod: Pod, settings: RuntimeSettings) -> None:
        self._core, self._pod, self._settings = core, pod, settings
        self._label = 0
        self._known: dict[int, tuple[int, RankReport]] = {}

    async def _ranks(self, method: str, *arguments: object) -> list[Any]:
        cores = await self._core.call_utility_all_async("collective_rpc", method, None, arguments, {})
        return list(chain.from_iterable(cores))

    async def _reports(self, method: str, *arguments: object) -> tuple[RankReport, ...]:
        return tuple([self._newest(answer) for answer in await self._ranks(method, *arguments)])

    def _newest(self, data: bytes) -> RankReport:
        made, report = unpack_report(data)
        known = self._known.get(report.worker.rank)
        if known is None or known[0] < made:
            self._known[report.worker.rank] = (made, report)
        return self._known[report.worker.rank][1]

    async def status(self) -> tuple[RankReport, ...]:
        written = [self._pod.report(rank) for rank in sorted(self._known)]
        here = [report for report in written if report is not None]
        if not here or len(here) < len(written):
            return await self._reports("refit_report")
        return tuple(self._newest(report) for report in here)

    async def stage(self, order: StageOrder) -> None:
        await self._reports("refit_stage", pack_order(order))

    async def prepare(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return await self._reports("refit_prepare", pack_order(order))

    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None:
        """Engine cores that act together take no resume while a pause is under way: one that does not wait for requests ends it."""
        try:
            await within(timeout, self._core.pause_scheduler_async(mode, clear_cache))
        except asyncio.TimeoutError as error:
            if mode == "wait":
                await self._core.pause_scheduler_async("keep", False)
            raise EngineBusy(f"the engine is not idle after {timeout:g} s of pause mode {mode}", retry_after=1.0, seen=mode) from error

    async def install(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return await self._reports("refit_install", pack_order(order))

    async def label(self, number: int) -> None:
        await self._core.call_utility_all_async("set_weight_version", str(number))
        self._label = number

    async def resume(self) -> None:
        """Requests come in again only with a whole version; before the first there is nothing that could run."""
        await self._core.resume_scheduler_async()
        if self._label:
            self._pod.write(State(self._label, closed=""))

    async def discard(self) -> None:
        await self._reports("refit_discard")

    async def release(self, number: int) -> None:
        await self._reports("refit_release", number)
        deadline = time.monotonic() + self._settings.versions.drain_seconds + self._settings.versions.lease_seconds
        while any(number in held for held in await self._ranks("refit_held")):
            if time.monotonic() > deadline:
                raise PeerUnavailable(f"version {number} is still read by others", seen=number)
            await asyncio.sleep(LOOK_SECONDS)

    async def fence(self, reason: str) -> None:
        """Running requests end as aborted: what they would still see is no version. Ranks are told at once, whether or not the pause ends."""
        self._pod.write(State(self._label, closed=f"fenced: {reason}"))
        await asyncio.gather(self._core.pause_scheduler_async("abort", True), self._reports("refit_fence", reason))

    async def end(self, reason: str) -> None:
        self._pod.write(State(self._label, closed=f"ending: {reason}"))
        log.error("engine process ends", reason=reason)
        _end(self._core, reason)


def _end(core: Any, reason: str) -> None:
    last_words.say(reason)
    for process in _processes(core):
        process.kill()
    os._exit(FAILED)


def _processes(core: Any) -> Sequence[Any]:
    """The engine cores that this API server started; another process started them if there are several servers, and notices."""
    manager = core.resources.engine_manager
    return manager.processes if manager is not None else ()

"""The engine driver of `Custom` engines: the ranks are in this process, and requests pass a gate that the agent closes for a commit.

Any program becomes an engine by answering its requests inside `gate.request()`: then no request sees half-installed parameters, none starts while the
engine is paused or fenced, and each knows the version that answers it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from refit_api.errors import EngineBusy, MixedRanks, PeerUnavailable
from refit_api.wire import RankReport

from refit_runtime.ports import CommitOrder, StageOrder
from refit_runtime.rank import GeneratorRank

T = TypeVar("T")


class Gate:
    """Open, paused (requests wait) or fenced (requests are refused). It starts closed: nothing is served before the first version."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._running = 0
        self._paused = True
        self._fenced = "no version is installed yet"
        self.version = 0

    @contextmanager
    def request(self, timeout: float = 60.0) -> Iterator[int]:
        """Gives the version that answers. Raises MixedRanks when fenced, EngineBusy if a pause outlasts `timeout`."""
        with self._state:
            if not self._state.wait_for(lambda: not self._paused or bool(self._fenced), timeout):
                raise EngineBusy("the engine is paused", retry_after=1.0)
            if self._fenced:
                raise MixedRanks(f"the engine serves nothing: {self._fenced}")
            self._running += 1
        try:
            yield self.version
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def pause(self, timeout: float) -> None:
        with self._state:
            self._paused = True
            if not self._state.wait_for(lambda: self._running == 0, timeout):
                raise EngineBusy(f"{self._running} requests did not end in {timeout:g} s", retry_after=1.0, seen=self._running)

    def open(self) -> None:
        with self._state:
            self._paused, self._fenced = False, ""
            self._state.notify_all()

    def shut(self, reason: str) -> None:
        with self._state:
            self._paused, self._fenced = True, reason
            self._state.notify_all()


class LocalEngine:
    """`stop` ends the process; what it is told goes where the kubelet looks."""

    def __init__(self, ranks: Sequence[GeneratorRank], gate: Gate, stop: Callable[[str], None]) -> None:
        self._ranks, self._gate, self._stop = tuple(ranks), gate, stop

    async def status(self) -> tuple[RankReport, ...]:
        return tuple(rank.report() for rank in self._ranks)

    async def stage(self, order: StageOrder) -> None:
        await self._all(lambda rank: rank.start(order))

    async def prepare(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return await self._all(lambda rank: rank.prepare(order))

    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None:
        """Requests of a module are short: every mode lets them end. There are no caches to clear."""
        await asyncio.to_thread(self._gate.pause, timeout)

    async def install(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return await self._all(lambda rank: rank.install(order))

    async def label(self, number: int) -> None:
        self._gate.version = number

    async def resume(self) -> None:
        self._gate.open()

    async def discard(self) -> None:
        await self._all(lambda rank: rank.discard())

    async def release(self, number: int) -> None:
        outcomes = await asyncio.gather(*(asyncio.to_thread(rank.release, number) for rank in self._ranks), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            raise PeerUnavailable(f"version {number} is still read: {failed[0]}") from failed[0]

    async def fence(self, reason: str) -> None:
        self._gate.shut(reason)
        await self._all(lambda rank: rank.fence(reason))

    async def end(self, reason: str) -> None:
        self._stop(reason)

    async def _all(self, call: Callable[[GeneratorRank], T]) -> tuple[T, ...]:
        return tuple(await asyncio.gather(*(asyncio.to_thread(call, rank) for rank in self._ranks)))

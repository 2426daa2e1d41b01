"""One generator of the real catalog with its agent, and what the operator would order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from refit_api.wire import CoordinateSources, Order, RankPhase, Report
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.local_engine import Gate, LocalEngine
from refit_runtime.agent import Agent


class Fleet:
    """`engine` makes the driver: the ranks in this process, or one that fails on order."""

    def __init__(self, world: Any, ranks: list[Any], engine: Callable[..., Any] = LocalEngine) -> None:
        self.world, self.ranks, self.gate = world, ranks, Gate()
        self.ended: list[str] = []
        self.driver: Any = engine(ranks, self.gate, self.ended.append)
        self.agent: Agent
        self.replace_agent()

    def replace_agent(self) -> None:
        """Another one for the same engine."""
        first = self.ranks[0]
        self.agent = Agent(first._settings, first._seams.catalog, self.driver, SystemClock(), Random(1))

    async def order(self, target: int, order: Order, sources: Any = (), seconds: float = 20.0, uid: str = "generator-0") -> None:
        catalog = self.world.catalog
        given = (CoordinateSources("tp0", tuple(sources)),) if sources else ()
        await asyncio.to_thread(catalog.run, catalog.store.assign(catalog.group, uid, "0", target, order, given, seconds))

    async def until(self, holds: Callable[[Report | None], bool], seconds: float = 30.0) -> Report:
        """What the catalog was told, once it says so."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            said = await asyncio.to_thread(self.reported)
            if holds(said):
                assert said is not None
                return said
            assert asyncio.get_running_loop().time() < deadline, said
            await asyncio.sleep(0.02)

    def reported(self) -> Report | None:
        kept = self.world.catalog.store._kept(self.world.catalog.group).group
        return next((report for key, report in kept.reports.items() if key.pod_uid == self.ranks[0].worker.ref.pod_uid), None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        task = asyncio.create_task(self.agent.run())
        try:
            yield self
        finally:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, Exception):  # no cancellation: a bug
                raise outcome


def serving(number: int) -> Callable[[Report | None], bool]:
    return lambda said: said is not None and bool(said.ranks) and all(rank.serving == number for rank in said.ranks)


def phase(wanted: RankPhase) -> Callable[[Report | None], bool]:
    return lambda said: said is not None and bool(said.ranks) and all(rank.phase is wanted for rank in said.ranks)


def failed(said: Report | None) -> bool:
    return said is not None and said.error is not None

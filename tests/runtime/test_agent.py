"""The agent follows orders of the real catalog and commits all ranks together, or none; whatever fails, one version serves or nobody is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from typing import Any

import pytest
import torch
from refit_api.errors import CatalogUnavailable, EngineBusy, MixedRanks
from refit_api.mounted import Engine
from refit_api.wire import CoordinateSources, GetVersion, Order, RankPhase, RankReport, Report
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.local_engine import Gate, LocalEngine
from refit_runtime.agent import Agent
from refit_runtime.ports import CommitOrder, Copies


class Fleet:
    """One generator of the real catalog, and what the operator would order."""

    def __init__(self, world: Any, ranks: list[Any]) -> None:
        self.world, self.ranks, self.gate = world, ranks, Gate()
        self.ended: list[str] = []
        self.driver: Any = LocalEngine(ranks, self.gate, self.ended.append)
        first = ranks[0]
        self.agent = Agent(first._settings, first._seams.catalog, self.driver, SystemClock(), Random(1))

    async def order(self, target: int, order: Order, sources: Any = (), seconds: float = 20.0, uid: str = "generator-0") -> None:
        catalog = self.world.catalog
        given = (CoordinateSources("tp0", tuple(sources)),) if sources else ()
        await asyncio.to_thread(catalog.run, catalog.store.assign(catalog.group, uid, "0", target, order, given, seconds))

    async def until(self, holds: Callable[[Report | None], bool], seconds: float = 15.0) -> Report:
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
            await asyncio.gather(task, return_exceptions=True)


def serving(number: int) -> Callable[[Report | None], bool]:
    return lambda said: said is not None and bool(said.ranks) and all(rank.serving == number for rank in said.ranks)


def phase(wanted: RankPhase) -> Callable[[Report | None], bool]:
    return lambda said: said is not None and bool(said.ranks) and all(rank.phase is wanted for rank in said.ranks)


def failed(said: Report | None) -> bool:
    return said is not None and said.error is not None


async def test_stages_and_commits_on_order(world: Any, net: Any) -> None:
    source, target = net(1), net(2)
    trainer = world.trainer(source)
    fleet = Fleet(world, [world.rank(target)])
    async with fleet.running():
        number = (await asyncio.to_thread(trainer.publish, 0)).number
        await asyncio.to_thread(world.version, number)
        with pytest.raises(MixedRanks, match="no version is installed"), fleet.gate.request(0.1):
            pass
        await fleet.order(number, Order.STAGE)
        await fleet.until(phase(RankPhase.STAGED))
        assert fleet.agent.view().version == 0
        await fleet.order(number, Order.COMMIT)
        await fleet.until(serving(number))
        with fleet.gate.request(5) as version:
            assert version == number
        assert fleet.agent.view().version == number
        parts = {"prepare", "pause", "install", "label", "resume"}
        await fleet.until(lambda said: said is not None and parts <= {part.stage for part in said.ranks[0].timings})
        assert torch.equal(source.embed, target.embed)
        facts = trainer._seams.catalog.get_version(GetVersion(world.catalog.group, number))
        assert (facts.generators, facts.serving) == (1, 1)


async def test_both_ranks_commit_together(world: Any, net: Any) -> None:
    source = net(1)
    targets = [net(2), net(3)]
    trainer = world.trainer(source)
    ranks = [world.rank(target, rank=rank, world=2, coordinate=f"tp{rank}") for rank, target in enumerate(targets)]
    fleet = Fleet(world, ranks)
    async with fleet.running():
        number = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(number, Order.COMMIT)
        await fleet.until(serving(number))
    assert all(torch.equal(source.embed, target.embed) for target in targets)


async def test_a_catalog_that_lost_its_memory_is_told_everything_again(world: Any, net: Any) -> None:
    """The data plane serves on, and the next version goes through as if nothing had happened."""
    source, target = net(1), net(2)
    trainer = world.trainer(source)
    fleet = Fleet(world, [world.rank(target)])
    async with fleet.running():
        first = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(first, Order.COMMIT)
        await fleet.until(serving(first))
        await asyncio.to_thread(world.catalog.lose_memory)
        assert fleet.agent.view().version == first
        for worker in (trainer.worker, fleet.ranks[0].worker):
            worker.poke()
        await fleet.until(serving(first))
        source.norm.data.add_(1)
        second = (await asyncio.to_thread(_publish_soon, trainer, 1)).number
        assert second > first
        await fleet.order(second, Order.COMMIT)
        await fleet.until(serving(second))
    assert torch.equal(source.norm, target.norm)


def _publish_soon(trainer: Any, step: int) -> Any:
    """As a training loop does: again when the catalog is back."""
    for _ in range(40):
        with suppress(CatalogUnavailable):
            return trainer.publish(step)
        SystemClock().sleep(0.25)
    raise AssertionError("never published")


class Breaks(LocalEngine):
    """An engine whose ranks fail to install as often as `times` says, by version."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: dict[int, int] = {}
        self.hang = False

    async def install(self, order: CommitOrder) -> tuple[RankReport, ...]:
        if self.hang:
            await asyncio.sleep(60)
        if self.times.get(order.number, 0) > 0:
            self.times[order.number] -= 1
            with last_copy_fails(self._ranks[-1], order.number):
                return await super().install(order)
        return await super().install(order)


class LastCopyFails:
    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def start(self) -> None:
        self._copies.start()
        raise RuntimeError("the last copy")

    def wait(self) -> None:
        """Nothing is on its way."""


@contextmanager
def last_copy_fails(rank: Any, number: int) -> Iterator[None]:
    """All others are done by then: the live parameters are a mix."""
    copies = rank.live.copy_list(rank._stager.holdings.whole(number))
    whole, copies._install = copies._install, LastCopyFails(copies._install)
    try:
        yield
    finally:
        copies._install = whole


CASES = {
    "the second try succeeds": (1, False, "second"),
    "the version before is put back": (2, True, "first"),
    "without it the engine is fenced": (2, False, "fenced"),
}


@pytest.mark.parametrize(("times", "keep", "outcome"), CASES.values(), ids=CASES.keys())
async def test_a_failed_install(world: Any, net: Any, times: int, keep: bool, outcome: str) -> None:
    source, target = net(1), net(2)
    trainer = world.trainer(source)
    rank = world.rank(target, engine=Engine(kind="Custom", keep_previous=keep))
    fleet = Fleet(world, [rank])
    fleet.driver = driver = Breaks([rank], fleet.gate, fleet.ended.append)
    fleet.agent = Agent(rank._settings, rank._seams.catalog, driver, SystemClock(), Random(1))
    async with fleet.running():
        first = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(first, Order.COMMIT)
        await fleet.until(serving(first))
        old = target.norm.clone()
        source.norm.data.add_(1)
        second = (await asyncio.to_thread(trainer.publish, 1)).number
        driver.times[second] = times
        await fleet.order(second, Order.COMMIT)
        if outcome == "second":
            await fleet.until(serving(second))
            assert torch.equal(target.norm, source.norm)
            return
        said = await fleet.until(failed)
        assert said.error is not None
        assert said.error.type == "InstallError"
        if outcome == "first":
            await fleet.until(serving(first))
            assert torch.equal(target.norm, old)
            with fleet.gate.request(1) as version:
                assert version == first
            return
        said = await fleet.until(lambda report: report is not None and report.fenced)
        with pytest.raises(MixedRanks, match="serves nothing"), fleet.gate.request(0.1):
            pass
        await fleet.order(second, Order.COMMIT)  # a full install ends the fence
        await fleet.until(serving(second))
        with fleet.gate.request(1) as version:
            assert version == second


async def test_a_hung_rank_ends_the_engine(world: Any, net: Any) -> None:
    trainer = world.trainer(net(1))
    rank = world.rank(net(2), engine=Engine(kind="Custom", pause_timeout_seconds=0.5))
    fleet = Fleet(world, [rank])
    fleet.driver = driver = Breaks([rank], fleet.gate, fleet.ended.append)
    fleet.agent = Agent(rank._settings, rank._seams.catalog, driver, SystemClock(), Random(1))
    driver.hang = True
    async with fleet.running():
        number = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(number, Order.COMMIT)
        said = await fleet.until(failed)
        assert said.error is not None
        assert said.fenced
        assert said.error.type == "InstallError"
        assert "no outcome" in fleet.ended[0]


async def test_requests_that_do_not_end_leave_the_old_version_serving(world: Any, net: Any) -> None:
    trainer = world.trainer(net(1))
    rank = world.rank(net(2), engine=Engine(kind="Custom", pause_timeout_seconds=0.3))
    fleet = Fleet(world, [rank])
    async with fleet.running():
        first = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(first, Order.COMMIT)
        await fleet.until(serving(first))
        with fleet.gate.request(1):
            second = (await asyncio.to_thread(trainer.publish, 1)).number
            await fleet.order(second, Order.COMMIT, seconds=1.0)
            said = await fleet.until(failed)
            assert said.error is not None
            assert said.error.type == EngineBusy.__name__
            with fleet.gate.request(1) as version:
                assert version == first
        await fleet.order(second, Order.COMMIT)
        await fleet.until(serving(second))


async def test_a_restarted_agent_resumes_only_what_is_one_version(world: Any, net: Any) -> None:
    trainer = world.trainer(net(1))
    fleet = Fleet(world, [world.rank(net(2))])
    async with fleet.running():
        number = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(number, Order.COMMIT)
        await fleet.until(serving(number))
    fleet.gate.pause(1)  # it was left paused
    async with replaced(fleet).running() as second:
        await second.until(lambda said: "resume" in second.driver.calls)
        assert second.driver.calls == [f"label {number}", "resume"]
    fleet.ranks[0].live.forget()  # it was left half installed
    fleet.ranks[0]._rest()
    async with replaced(fleet).running() as third:
        await third.until(lambda said: "resume" in third.driver.calls)
        assert third.driver.calls == ["fence", "install", f"label {number}", "resume"]
        with fleet.gate.request(5) as version:
            assert version == number


class Told(LocalEngine):
    """Keeps what it was told, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    async def install(self, order: CommitOrder) -> tuple[RankReport, ...]:
        self.calls.append("install")
        return await super().install(order)

    async def label(self, number: int) -> None:
        self.calls.append(f"label {number}")
        await super().label(number)

    async def resume(self) -> None:
        self.calls.append("resume")
        await super().resume()

    async def fence(self, reason: str) -> None:
        self.calls.append("fence")
        await super().fence(reason)


def replaced(fleet: Fleet) -> Fleet:
    """Another agent for the same engine."""
    again = Fleet(fleet.world, fleet.ranks)
    again.gate = fleet.gate
    again.driver = Told(fleet.ranks, fleet.gate, fleet.ended.append)
    again.agent = Agent(fleet.ranks[0]._settings, fleet.ranks[0]._seams.catalog, again.driver, SystemClock(), Random(2))
    return again


async def test_installed_then_labelled_then_resumed_then_reported(world: Any, net: Any) -> None:
    """O10: no token comes from a mislabelled version."""
    trainer = world.trainer(net(1))
    fleet = replaced(Fleet(world, [world.rank(net(2))]))
    async with fleet.running():
        number = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(number, Order.COMMIT)
        while not fleet.driver.calls:
            assert not serving(number)(await asyncio.to_thread(fleet.reported))
            await asyncio.sleep(0.005)
        await fleet.until(serving(number))
        assert fleet.driver.calls == ["install", f"label {number}", "resume"]


async def test_damage_after_the_install_fences(world: Any, net: Any) -> None:
    """`verification.installed: Async` re-reads the live parameters while requests run."""
    source, target = net(1), net(2)
    trainer = world.trainer(source)
    rank = world.rank(target, installed="Async")
    fleet = Fleet(world, [rank])
    async with fleet.running():
        for step in (0, 1):
            number = (await asyncio.to_thread(trainer.publish, step)).number
            await fleet.order(number, Order.COMMIT)
            await fleet.until(serving(number))
        rank.wait()
        assert fleet.agent.view().version == number
        target.embed.data[3, 3] += 1
        holding = rank.live.served
        rank._guarded(lambda: rank.live.check(holding, lambda: False))
        said = await fleet.until(lambda report: report is not None and report.fenced)
        assert said.ranks[0].error is not None
        assert said.ranks[0].error.facts["tensor"] == "embed"
        with pytest.raises(MixedRanks), fleet.gate.request(0.1):
            pass


async def test_an_abort_puts_the_served_version_back_into_the_arena(world: Any, net: Any) -> None:
    """The rank is its holder again, without a pull."""
    source, target = net(1), net(2)
    trainer = world.trainer(source)
    rank = world.rank(target)
    fleet = Fleet(world, [rank])
    async with fleet.running():
        first = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(first, Order.COMMIT)
        await fleet.until(serving(first))
        source.norm.data.add_(1)
        second = (await asyncio.to_thread(trainer.publish, 1)).number
        await fleet.order(second, Order.STAGE)
        await fleet.until(phase(RankPhase.STAGED))
        reads = rank._seams.transport.counters()["reads"]
        await fleet.order(second, Order.ABORT)
        said = await fleet.until(lambda report: report is not None and report.ranks[0].arena == first and report.ranks[0].arena_complete)
        assert said.ranks[0].serving == first
        assert rank._seams.transport.counters()["reads"] == reads


async def test_leaving_closes_what_is_offered(world: Any, net: Any) -> None:
    trainer = world.trainer(net(1))
    rank = world.rank(net(2))
    fleet = Fleet(world, [rank])
    async with fleet.running():
        number = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(number, Order.COMMIT)
        await fleet.until(serving(number))
        await fleet.agent.leave()
        said = await fleet.until(lambda report: report is not None and report.ranks[0].arena == 0)
        assert said.ranks[0].serving == number, "it serves until the pod stops"
        with fleet.gate.request(1) as version:
            assert version == number

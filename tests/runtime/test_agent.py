"""The agent follows orders of the real catalog and commits all ranks together; what fails on the way is in `test_commit`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import torch
from refit_api.errors import CatalogUnavailable, Denied, EngineBusy, MixedRanks
from refit_api.mounted import Engine
from refit_api.wire import GetVersion, Order, RankPhase, RankReport
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.local_engine import LocalEngine
from refit_runtime.ports import CommitOrder

from tests.runtime.fleet import Fleet, failed, phase, serving


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
    fleet = Fleet(world, [world.rank(net(2))], Told)
    async with fleet.running():
        number = (await asyncio.to_thread(trainer.publish, 0)).number
        await fleet.order(number, Order.COMMIT)
        await fleet.until(serving(number))
    fleet.gate.pause(1)  # it was left paused
    fleet.driver.calls.clear()
    fleet.replace_agent()
    async with fleet.running():
        await fleet.until(lambda said: "resume" in fleet.driver.calls)
        assert fleet.driver.calls == [f"label {number}", "resume"]
    fleet.ranks[0].live.forget()  # it was left half installed
    fleet.ranks[0]._rest()
    fleet.driver.calls.clear()
    fleet.replace_agent()
    async with fleet.running():
        await fleet.until(lambda said: "resume" in fleet.driver.calls)
        assert fleet.driver.calls == ["fence", "install", f"label {number}", "resume"]
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


async def test_installed_then_labelled_then_resumed_then_reported(world: Any, net: Any) -> None:
    """O10: no token comes from a mislabelled version."""
    trainer = world.trainer(net(1))
    fleet = Fleet(world, [world.rank(net(2))], Told)
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
        with pytest.raises(Denied, match="not being deleted"):
            await fleet.agent.leave()
        assert (await asyncio.to_thread(fleet.reported)).ranks[0].arena == number, "anybody may ask: it is the API server's word that counts"
        world.catalog.pods.deleted.add(rank.worker.ref.pod_uid)
        await fleet.agent.leave()
        said = await fleet.until(lambda report: report is not None and report.ranks[0].arena == 0)
        assert said.ranks[0].serving == number, "it serves until the pod stops"
        with fleet.gate.request(1) as version:
            assert version == number

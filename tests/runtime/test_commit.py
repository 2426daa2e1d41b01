"""Each step of a commit with each fault. Whatever happens: an answer is of the whole version that it names, or there is none; nothing waits without end.

Faults come in at the ports: the engine's door, the memory that copies, the transport, the catalog. Two ranks, so that there is something to mix.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import CatalogUnavailable, EngineBusy, MixedRanks
from refit_api.mounted import Engine, Rollout
from refit_api.wire import Leased, Order, RankPhase, VersionPhase
from refit_runtime.adapters.memory import Fault
from structlog.testing import capture_logs

from tests.runtime.failing import Answers, Client, Failing, Tripping
from tests.runtime.fleet import Fleet, failed, phase, serving
from tests.runtime.steps import perturb, same

PAUSE_SECONDS = 2.0


class Setting:
    """A trainer and a generator of two ranks that serves its first version."""

    def __init__(self, world: Any, net: Any, keep_previous: bool = False, installed: str = "Off", progress_seconds: float = 600.0) -> None:
        self.world, self.net, self.source = world, net, net(1)
        world.faults["trainer-0"] = self.fault = Fault()
        self.targets = [net(2), net(3)]
        self.memories = [Tripping(), Tripping()]
        self.answers: dict[str, Any] = {}
        self.trainer = world.trainer(self.source)
        ranks = [
            world.rank(
                target, rank=rank, world=2, coordinate=f"tp{rank}", installed=installed,
                engine=Engine(kind="Custom", keep_previous=keep_previous, pause_timeout_seconds=PAUSE_SECONDS),
                rollout=Rollout(progress_deadline_seconds=progress_seconds),
                wrap=lambda seams, rank=rank: replace(seams, memory=self.memories[rank], catalog=Answers(seams.catalog, self.answers)),
            )
            for rank, target in enumerate(self.targets)
        ]  # fmt: skip
        self.fleet = Fleet(world, ranks, Failing)
        self.client = Client(self.fleet.gate, self.targets)
        self.first = 0

    @property
    def faults(self) -> dict[str, str]:
        found: dict[str, str] = self.fleet.driver.faults
        return found

    async def publish(self, step: int) -> int:
        number: int = (await asyncio.to_thread(self.trainer.publish, step)).number
        copy = self.net(0)
        copy.load_state_dict(self.source.state_dict())
        self.client.published[number] = copy
        return number

    async def serve_first(self) -> None:
        self.first = await self.publish(0)
        await self.fleet.order(self.first, Order.COMMIT)
        await self.fleet.until(serving(self.first))
        perturb(self.source)

    async def stage_second(self) -> int:
        second = await self.publish(1)
        await self.fleet.order(second, Order.STAGE)
        await self.fleet.until(phase(RankPhase.STAGED))
        return second

    async def hang_amid_the_copies(self) -> tuple[int, threading.Event]:
        """The install of the second version on the second rank; (its number, what lets it go on)."""
        second, goes_on = await self.stage_second(), threading.Event()
        self.memories[1].trips = [(1, lambda: goes_on.wait(60))]
        await self.fleet.order(second, Order.COMMIT)
        return second, goes_on

    async def still_serves(self, number: int) -> None:
        said = await self.fleet.until(serving(number))
        assert not said.fenced
        assert self.fleet.agent.view().version == number
        with self.fleet.gate.request(10) as version:
            assert version == number
        assert self.fleet.ended == []

    async def is_fenced(self, ended: bool) -> None:
        await self.fleet.until(lambda said: said is not None and said.fenced and bool(self.fleet.ended) is ended)
        view = self.fleet.agent.view()
        assert (view.version, bool(view.fenced)) == (0, True)
        with pytest.raises((MixedRanks, EngineBusy)), self.fleet.gate.request(0.1):
            pass

    async def recovers(self, number: int) -> None:
        """A full install ends a fence."""
        await self.fleet.order(number, Order.COMMIT)
        await self.fleet.until(lambda said: serving(number)(said) and said is not None and not said.fenced)
        assert self.fleet.agent.view().version == number
        with self.fleet.gate.request(10) as version:
            assert version == number


STEPS = {
    "prepare fails": ({"prepare": "raises"}, "first"),
    "prepare hangs": ({"prepare": "hangs"}, "first"),
    "prepared, and no answer": ({"prepare": "gives no answer"}, "first"),
    "the pause fails, or its reset of the cache": ({"pause": "raises"}, "first"),
    "the pause hangs": ({"pause": "hangs"}, "first"),
    "the pause and the way out of it fail": ({"pause": "raises", "resume": "raises"}, "fenced"),
    "the pause and the way out of it hang": ({"pause": "hangs", "resume": "hangs"}, "ended"),
    "the engine dies in the install": ({"install": "raises", "fence": "raises"}, "ended"),
    "the install hangs": ({"install": "hangs"}, "ended"),
    "the install hangs, and the fence with it": ({"install": "hangs", "fence": "hangs"}, "ended"),
    "installed, and no answer": ({"install": "gives no answer"}, "ended"),
    "the label fails": ({"label": "raises"}, "fenced"),
    "the label hangs": ({"label": "hangs"}, "ended"),
    "resuming fails": ({"resume": "raises"}, "fenced"),
    "resuming hangs": ({"resume": "hangs"}, "ended"),
    "resumed, and no answer": ({"resume": "gives no answer"}, "ended"),
}


@pytest.mark.parametrize(("faults", "outcome"), STEPS.values(), ids=STEPS.keys())
async def test_a_fault_of_the_engine_at_each_step(world: Any, net: Any, faults: dict[str, str], outcome: str) -> None:
    setting = Setting(world, net)
    with setting.client.asking(), capture_logs() as logs:
        async with setting.fleet.running():
            await setting.serve_first()
            second = await setting.stage_second()
            setting.faults.update(faults)
            await setting.fleet.order(second, Order.COMMIT, seconds=3.0)
            said = await setting.fleet.until(failed)
            assert said.error is not None
            assert said.error.type in ("InstallError", "EngineHung")
            if outcome == "first":
                await setting.still_serves(setting.first)
            else:
                await setting.is_fenced(ended=outcome == "ended")
                fenced = [line for line in logs if line["event"].startswith("fenced")]
                assert fenced[0]["reason"].startswith(("the engine gave no answer to", "the engine failed at"))
            setting.faults.clear()
            await setting.recovers(second)
    assert setting.client.answered == {setting.first, second}


DEATHS = {
    "before it prepares": ("prepare", "hangs"),
    "before the pause": ("pause", "hangs"),
    "in the pause": ("pause", "gives no answer"),
    "before the install": ("install", "hangs"),
    "after the install": ("install", "gives no answer"),
    "after the label": ("label", "gives no answer"),
    "after it resumed": ("resume", "gives no answer"),
}


@pytest.mark.parametrize(("call", "fault"), DEATHS.values(), ids=DEATHS.keys())
async def test_the_agent_dies(world: Any, net: Any, call: str, fault: str) -> None:
    """The next one resumes what is one version, fences what is not, and goes on with its order."""
    setting = Setting(world, net)
    with setting.client.asking():
        async with setting.fleet.running():
            await setting.serve_first()
            second = await setting.stage_second()
            setting.faults[call] = fault
            setting.fleet.driver.calls.clear()
            await setting.fleet.order(second, Order.COMMIT)
            await setting.fleet.until(lambda _: call in setting.fleet.driver.calls)
        setting.faults.clear()
        setting.fleet.replace_agent()
        async with setting.fleet.running():
            await setting.still_serves(second)


async def test_the_agent_dies_amid_the_copies(world: Any, net: Any) -> None:
    """They may end at any time after: nobody counts on them, and nothing else is installed beside them."""
    setting = Setting(world, net)
    with setting.client.asking():
        async with setting.fleet.running():
            await setting.serve_first()
            second, goes_on = await setting.hang_amid_the_copies()
            await setting.fleet.until(lambda _: not setting.memories[1].trips)
        setting.fleet.replace_agent()
        async with setting.fleet.running():
            await setting.is_fenced(ended=False)
            goes_on.set()
            await setting.recovers(second)


def tripped(error: Exception) -> Callable[[], object]:
    def trip() -> None:
        raise error

    return trip


BROKEN, HOST, DEVICE = RuntimeError("a copy"), MemoryError("no host memory"), torch.OutOfMemoryError("no device memory")
INSTALLS: dict[str, tuple[int, list[Exception], bool, str]] = {
    "the first copy, once": (0, [BROKEN], False, "second"),
    "the last copy, once": (-1, [BROKEN], False, "second"),
    "device memory runs out, once": (1, [DEVICE], False, "second"),
    "one in the middle, twice": (1, [BROKEN] * 2, False, "fenced"),
    "host memory runs out, twice": (1, [HOST] * 2, False, "fenced"),
    "twice, and the version before is retained": (-1, [BROKEN] * 2, True, "first"),
    "twice, and then the way back": (1, [BROKEN] * 4, True, "fenced"),
}


@pytest.mark.parametrize(("place", "errors", "keep", "outcome"), INSTALLS.values(), ids=INSTALLS.keys())
async def test_the_nth_copy_of_an_install_fails(world: Any, net: Any, place: int, errors: list[Exception], keep: bool, outcome: str) -> None:
    setting = Setting(world, net, keep)
    with setting.client.asking():
        async with setting.fleet.running():
            await setting.serve_first()
            second = await setting.stage_second()
            setting.memories[1].trips = [(place, tripped(error)) for error in errors]
            await setting.fleet.order(second, Order.COMMIT)
            if outcome == "second":
                await setting.still_serves(second)
                return
            said = await setting.fleet.until(failed)
            assert said.error is not None
            assert said.error.type == "InstallError"
            assert str(errors[0]) in said.error.message
            if outcome == "first":
                await setting.still_serves(setting.first)
            else:
                await setting.is_fenced(ended=False)
            await setting.recovers(second)


async def test_an_order_back_to_the_version_that_is_kept_reads_nothing(world: Any, net: Any) -> None:
    """Both versions are held, and the catalog knows; what was given up after is held no more."""
    setting = Setting(world, net, keep_previous=True)
    with setting.client.asking():
        async with setting.fleet.running():
            await setting.serve_first()
            second = await setting.stage_second()
            await setting.fleet.order(second, Order.COMMIT)
            await setting.fleet.until(lambda said: serving(second)(said) and said is not None and all(rank.kept == setting.first for rank in said.ranks))
            facts = await asyncio.to_thread(world.catalog.run, world.catalog.store.facts(world.catalog.group))
            assert dict(facts.generators[0].offers) == {setting.first: True, second: True}
            assert facts.generators[0].arena_bytes == sum(rank._stager.arena.part_bytes * 2 for rank in setting.fleet.ranks)
            reads = [rank.counters()["reads"] for rank in setting.fleet.ranks]
            await setting.fleet.order(setting.first, Order.COMMIT)
            await setting.still_serves(setting.first)
            assert [rank.counters()["reads"] for rank in setting.fleet.ranks] == reads
            await setting.fleet.order(setting.first, Order.ABORT)
            await setting.fleet.until(lambda said: said is not None and all((rank.arena, rank.kept) == (setting.first, 0) for rank in said.ranks))


async def test_who_gives_up_a_version_offers_the_one_that_it_serves_again(world: Any, net: Any) -> None:
    """With one arena: what others go back to, when a version is taken back, is gathered from live parameters."""
    setting = Setting(world, net)
    async with setting.fleet.running():
        await setting.serve_first()
        await setting.stage_second()
        await setting.fleet.order(setting.first, Order.ABORT)
        await setting.fleet.until(lambda said: said is not None and all((rank.arena, rank.serving) == (setting.first,) * 2 for rank in said.ranks))
        facts = await asyncio.to_thread(world.catalog.run, world.catalog.store.facts(world.catalog.group))
        assert dict(facts.generators[0].offers) == {setting.first: True}


async def test_a_copy_that_hangs_ends_the_engine(world: Any, net: Any) -> None:
    """Should the process live on: what ends after the fence changes nothing, until a whole install."""
    setting = Setting(world, net)
    with setting.client.asking():
        async with setting.fleet.running():
            await setting.serve_first()
            second, goes_on = await setting.hang_amid_the_copies()
            await setting.is_fenced(ended=True)
            assert "no answer to install" in setting.fleet.ended[0]
            goes_on.set()
            await setting.fleet.until(lambda said: said is not None and said.ranks[1].phase is RankPhase.FENCED)
            await setting.recovers(second)


def lost(inner: Any, request: Any) -> Leased:
    """Answered late: its promise is nearly over."""
    inner.acquire_lease(request)
    return Leased(5.5)


def away(inner: Any, request: Any) -> Any:
    raise CatalogUnavailable("the catalog is away", retry_after=0.2)


def released(inner: Any, request: Any) -> Any:
    facts = inner.get_version(request)
    return replace(facts, version=replace(facts.version, phase=VersionPhase.RELEASING)) if request.runs else facts


BEFORE: dict[str, tuple[dict[str, Any], dict[str, Any], Exception | None, float, set[str]]] = {
    "wrong bytes": ({"corrupt": 100}, {}, None, 20.0, {"DigestMismatch"}),
    "the source dies": ({"die_at": 0}, {}, None, 4.0, {"PeerUnavailable", "TransferTimeout"}),
    "the deadline passes": ({"delay": 60.0}, {}, None, 4.0, {"TransferTimeout"}),
    "the lease is lost": ({"delay": 2.0}, {"acquire_lease": lost, "renew_lease": away}, None, 20.0, {"LeaseLost"}),
    "memory runs out": ({}, {}, HOST, 20.0, {"RefitError"}),
}


@pytest.mark.parametrize(("fault", "answers", "error", "seconds", "types"), BEFORE.values(), ids=BEFORE.keys())
async def test_before_the_install_the_old_version_serves_on(
    world: Any, net: Any, fault: dict[str, Any], answers: dict[str, Any], error: Exception | None, seconds: float, types: set[str]
) -> None:
    setting = Setting(world, net)
    with setting.client.asking():
        async with setting.fleet.running():
            await setting.serve_first()
            second = await setting.publish(1)
            setting.answers.update(answers)
            for name, value in fault.items():
                setattr(setting.fault, name, value)
            setting.memories[1].digest = tripped(error) if error is not None else lambda: None
            await setting.fleet.order(second, Order.COMMIT, seconds=seconds)
            said = await setting.fleet.until(failed)
            assert said.error is not None
            assert said.error.type in types, said.error
            await setting.still_serves(setting.first)
    assert setting.client.answered == {setting.first}


async def test_a_version_that_is_not_offered_any_more_is_not_installed(world: Any, net: Any) -> None:
    setting = Setting(world, net)
    async with setting.fleet.running():
        await setting.serve_first()
        second = await setting.stage_second()
        setting.answers["get_version"] = released
        await setting.fleet.order(second, Order.COMMIT)
        said = await setting.fleet.until(failed)
        assert said.error is not None
        assert said.error.type == "VersionRetired"
        await setting.still_serves(setting.first)


async def test_the_version_before_comes_back_from_a_holder(world: Any, net: Any) -> None:
    """Its own arena held the new version only, and so does the trainer: it is fenced until the operator sends it back, and pulls from its neighbour."""
    source, target = net(1), net(2)
    trainer, memory = world.trainer(source), Tripping()
    neighbour = world.rank(net(3), "g-1")
    rank = world.rank(target, installed="Off", wrap=lambda seams: replace(seams, memory=memory), rollout=Rollout())
    fleet = Fleet(world, [rank])
    async with fleet.running():
        first = (await asyncio.to_thread(trainer.publish, 0)).number
        other = Fleet(world, [neighbour])
        async with other.running():
            await other.order(first, Order.COMMIT, uid="g-1")
            await fleet.order(first, Order.COMMIT)
            await asyncio.gather(other.until(serving(first)), fleet.until(serving(first)))
            old = target.embed.clone()
            perturb(source)
            second = (await asyncio.to_thread(trainer.publish, 1)).number
            await fleet.order(second, Order.STAGE)
            await fleet.until(phase(RankPhase.STAGED))
            memory.trips = [(1, tripped(BROKEN))] * 2
            await fleet.order(second, Order.COMMIT)
            await fleet.until(lambda said: said is not None and said.fenced)
            await fleet.order(first, Order.COMMIT, sources=(world.source(neighbour),))
            await fleet.until(lambda said: serving(first)(said) and said is not None and not said.fenced)
            assert torch.equal(target.embed, old)
            with fleet.gate.request(10) as version:
                assert version == first


async def test_what_is_being_given_up_is_not_installed(world: Any, net: Any, orders: Any) -> None:
    """An abort puts the served version back into the memory of the one that is ordered next."""
    setting = Setting(world, net)
    async with setting.fleet.running():
        await setting.serve_first()
        second = await setting.stage_second()
    rank, served = setting.fleet.ranks[0], setting.client.published[setting.first]
    order = replace(orders.commit(second), catalog_epoch=rank._order[0], seq=rank._order[1])
    began, goes_on = threading.Event(), threading.Event()
    setting.answers["close_holder"] = lambda inner, request: (began.set(), goes_on.wait(30), inner.close_holder(request))[-1]
    rank.discard()
    assert began.wait(30)
    threading.Timer(0.2, goes_on.set).start()
    report = rank.install(order)
    assert report.error is not None
    assert report.error.type == "MixedRanks"
    assert same(served, setting.targets[0])


async def test_a_silent_engine_is_ended_in_time(world: Any, net: Any) -> None:
    """Nothing is ordered, so nothing is fenced: it goes on with what it said last, and the operator hears of it."""
    setting = Setting(world, net, progress_seconds=PAUSE_SECONDS)
    async with setting.fleet.running():
        await setting.serve_first()
        setting.faults["status"] = "hangs"
        said = await setting.fleet.until(failed)
        assert said.error is not None
        assert said.error.type == "EngineHung"
        assert serving(setting.first)(said)
        await setting.fleet.until(lambda _: setting.fleet.ended != [])
        assert "no answer for" in setting.fleet.ended[0]


async def test_an_agent_that_fails_by_a_bug_leaves_nothing_running(world: Any, net: Any) -> None:
    """Half of it would command the engine beside the next one."""
    setting = Setting(world, net)
    async with setting.fleet.running() as fleet:
        await setting.serve_first()
        assert fleet.agent is not None
    setting.fleet.replace_agent()
    setting.answers["report"] = lambda inner, request: {}["a bug"]
    before = asyncio.all_tasks()
    with pytest.raises(KeyError, match="a bug"):
        await asyncio.wait_for(setting.fleet.agent.run(), 30)
    assert asyncio.all_tasks() == before


def test_a_late_install_is_void_once_it_is_fenced(world: Any, net: Any, orders: Any) -> None:
    """And while it copies no order is taken."""
    trainer, memory = world.trainer(net(1)), Tripping()
    rank = world.rank(net(2), installed="Off", wrap=lambda seams: replace(seams, memory=memory))
    number = trainer.publish(0).number
    rank.start(orders.stage(number))
    rank.wait()
    goes_on = threading.Event()
    memory.trips = [(0, lambda: goes_on.wait(60))]
    late = threading.Thread(target=rank.install, args=(orders.commit(number),))
    late.start()
    while memory.trips:
        time.sleep(0.01)
    rank.fence("no answer")
    refused = [rank.prepare(orders.commit(number)), rank.install(orders.commit(number))]
    rank.discard()
    assert [report.error.type for report in refused if report.error is not None] == ["EngineBusy"] * 2
    goes_on.set()
    late.join(30)
    assert (rank.report().phase, rank.report().serving) == (RankPhase.FENCED, 0)
    assert rank.install(orders.commit(number)).serving == number

"""The memory store: who waits is woken by what they wait for, and time without service counts for nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from refit_api import wire
from refit_api.errors import CatalogUnavailable, NoClass, VersionRetired
from refit_api.wire import Order, Role, VersionPhase, WorkerRef
from refit_operator.catalog import memory
from refit_operator.catalog.local import TERMS
from refit_operator.catalog.memory import MemoryCatalog
from refit_operator.ports import Recorded

if TYPE_CHECKING:
    from tests.catalog.conftest import Hand
else:
    Hand = Any

GROUP = wire.GroupRef("ns", "demo")
TRAINER = WorkerRef("trainer-0", Role.TRAINER, 0, "a")
GENERATOR = WorkerRef("gen-0", Role.GENERATOR, 0, "a")
SOON = 5.0


@pytest.fixture
async def store(clock: Hand) -> MemoryCatalog:
    """A group whose every wish is written at once."""
    store = MemoryCatalog(clock)
    await store.open(GROUP, TERMS, Recorded())
    store.subscribe(lambda key: tasks.add(asyncio.ensure_future(write(store))))
    tasks: set[asyncio.Future[None]] = set()
    await write(store)
    return store


async def write(store: MemoryCatalog) -> None:
    wants = (await store.facts(GROUP)).wants
    if wants.epoch or wants.ceiling or wants.records:
        await store.confirm(GROUP, wants.epoch, wants.ceiling, frozenset(wants.records))


async def register(store: MemoryCatalog, ref: WorkerRef) -> None:
    layout = ref.role.value.encode()
    name = hashlib.sha256(layout).hexdigest()
    fields = {"run_id": "run-1"} if ref.role is Role.TRAINER else {"coordinate": "tp0"}
    await store.call(GROUP, "RegisterWorker", wire.RegisterWorker(wire.PROTOCOL, GROUP, ref, 1, name, wire.Endpoint("h", 1, "PEM"), **fields), SOON)
    await store.call(GROUP, "PutLayout", wire.Blob(GROUP, name, layout), SOON)


async def publish(store: MemoryCatalog, step: int) -> int:
    def request(plan_key: str) -> wire.CreateVersion:
        return wire.CreateVersion(GROUP, TRAINER, f"run-1:{step}", "run-1", step, plan_key, ("0",))

    plan_key = (await store.call(GROUP, "CreateVersion", request(""), SOON)).plan_key
    number: int = (await store.call(GROUP, "CreateVersion", request(plan_key), SOON)).version.number
    await store.call(GROUP, "SealShard", wire.SealShard(GROUP, TRAINER, number, "0", 1, plan_key, {0: b"root"}), SOON)
    return number


@asynccontextmanager
async def listening(stream: AsyncIterator[object]) -> AsyncIterator[asyncio.Queue[object]]:
    """What a stream gives, as it comes."""
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def listen() -> None:
        async for message in stream:
            heard.put_nowait(message)

    task = asyncio.create_task(listen())
    yield heard
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_waits_for_what_others_do(store: MemoryCatalog) -> None:
    await register(store, TRAINER)
    waiting = asyncio.create_task(publish(store, 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await register(store, GENERATOR)
    assert await asyncio.wait_for(waiting, SOON) == 1


async def test_a_call_ends_with_its_limit_and_says_what_it_waited_for(store: MemoryCatalog, clock: Hand) -> None:
    await register(store, TRAINER)
    with pytest.raises(NoClass):
        await store.call(GROUP, "CreateVersion", wire.CreateVersion(GROUP, TRAINER, "run-1:0", "run-1", 0, "", ("0",)), 0.0)


async def test_an_unknown_group_is_not_answered(store: MemoryCatalog) -> None:
    with pytest.raises(CatalogUnavailable, match="not known"):
        await store.call(wire.GroupRef("ns", "other"), "Heartbeat", wire.Heartbeat(GROUP, TRAINER), SOON)


async def test_versions_are_watched_from_the_beginning_and_in_every_change(store: MemoryCatalog) -> None:
    await register(store, TRAINER)
    await register(store, GENERATOR)
    await publish(store, 0)
    async with listening(store.watch_versions(wire.ListVersions(GROUP), SOON)) as heard:
        first = await asyncio.wait_for(heard.get(), SOON)
        assert isinstance(first, wire.Version)
        assert (first.number, first.phase) == (1, VersionPhase.READY)
        await store.retire(GROUP, 1, "Retired: enough")
        second = await asyncio.wait_for(heard.get(), SOON)
        assert isinstance(second, wire.Version)
        assert (second.number, second.phase, second.reason) == (1, VersionPhase.RELEASING, "Retired: enough")


async def test_each_generator_hears_its_own_orders(store: MemoryCatalog) -> None:
    other = WorkerRef("gen-1", Role.GENERATOR, 0, "a")
    await register(store, GENERATOR)
    await register(store, other)
    await store.assign(GROUP, "gen-0", "0", 1, Order.STAGE, (), 60.0)
    streams = [store.watch_assignment(wire.WatchAssignment(GROUP, ref), SOON) for ref in (GENERATOR, other)]
    async with listening(streams[0]) as mine, listening(streams[1]) as others:
        first = await asyncio.wait_for(mine.get(), SOON)
        await store.assign(GROUP, "gen-0", "0", 1, Order.COMMIT, (), 60.0)
        second = await asyncio.wait_for(mine.get(), SOON)
        assert isinstance(first, wire.Assignment)
        assert isinstance(second, wire.Assignment)
        assert [(order.seq, order.order) for order in (first, second)] == [(1, Order.STAGE), (2, Order.COMMIT)]
        assert others.empty()


async def test_the_reconciler_is_told_of_changes_but_not_of_heartbeats(store: MemoryCatalog) -> None:
    told: list[wire.GroupRef] = []
    store.subscribe(told.append)
    await register(store, GENERATOR)
    assert set(told) == {GROUP}
    told.clear()
    await store.call(GROUP, "Heartbeat", wire.Heartbeat(GROUP, GENERATOR), SOON)
    assert told == []
    assert [generator.pod_uid for generator in (await store.facts(GROUP)).generators] == ["gen-0"]


async def test_silence_ends_a_worker_but_a_stopped_catalog_does_not(store: MemoryCatalog, clock: Hand) -> None:
    await register(store, GENERATOR)
    clock.at += 600.0  # the process was stopped
    with pytest.raises(CatalogUnavailable, match="epoch 2"):
        await store.call(GROUP, "Heartbeat", wire.Heartbeat(GROUP, GENERATOR), 0.0)
    await write(store)
    beat = await store.call(GROUP, "Heartbeat", wire.Heartbeat(GROUP, GENERATOR), SOON)
    assert beat == wire.Beat(catalog_epoch=2, known=True)
    for _ in range(32):
        clock.at += 1.0
        store.tick()
    await write(store)
    beat = await store.call(GROUP, "Heartbeat", wire.Heartbeat(GROUP, GENERATOR), SOON)
    assert beat == wire.Beat(catalog_epoch=2, known=False)


async def test_who_is_not_the_leader_answers_nobody(clock: Hand) -> None:
    leading = True
    store = MemoryCatalog(clock, lambda: leading)
    await store.open(GROUP, TERMS, Recorded())
    await write(store)
    await register(store, GENERATOR)
    leading = False
    with pytest.raises(CatalogUnavailable, match="not the leader"):
        await store.call(GROUP, "Heartbeat", wire.Heartbeat(GROUP, GENERATOR), SOON)
    clock.at += 60.0
    store.tick()
    leading = True
    store.tick()
    await write(store)
    beat = await store.call(GROUP, "Heartbeat", wire.Heartbeat(GROUP, GENERATOR), SOON)
    assert beat == wire.Beat(catalog_epoch=2, known=True)


async def test_a_group_of_the_same_name_is_another_group(store: MemoryCatalog) -> None:
    await register(store, TRAINER)
    await register(store, GENERATOR)
    await publish(store, 0)
    await store.open(GROUP, replace(TERMS, uid="another"), Recorded())
    await write(store)
    with pytest.raises(VersionRetired):
        await store.call(GROUP, "GetVersion", wire.GetVersion(GROUP, 1), SOON)


async def test_time_passes_while_it_runs_and_a_failure_of_that_is_not_silent(clock: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryCatalog(clock)
    ticked = asyncio.Event()
    monkeypatch.setattr(memory, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(store, "tick", ticked.set)
    async with store.running():
        await asyncio.wait_for(ticked.wait(), SOON)

    def broken() -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(store, "tick", broken)
    with pytest.raises(AssertionError, match="a bug"):
        async with store.running():
            await asyncio.Event().wait()

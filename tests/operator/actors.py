"""Trainers and generators by script: real calls of the real catalog, without weights. Each does what a runtime does, when the test says so."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

from refit_api import wire
from refit_api.wire import GroupRef, Order, RankPhase, RankReport, Role, WorkerRef
from refit_operator.catalog.memory import MemoryCatalog

LIMIT = 10.0
BYTES = 1000


@dataclass(slots=True)
class Actor:
    """A pod's only worker."""

    catalog: MemoryCatalog
    group: GroupRef
    ref: WorkerRef

    async def join(self) -> None:
        """Registers, and says what it has; again after the catalog lost its memory."""
        raise NotImplementedError

    async def call(self, method: str, request: Any) -> Any:
        return await self.catalog.call(self.group, method, request, LIMIT)

    async def register(self, **fields: Any) -> None:
        text = f"{self.ref.role.value}-layout-{fields.pop('layout', '')}"
        name = hashlib.sha256(text.encode()).hexdigest()
        endpoint = wire.Endpoint(f"{self.ref.pod_uid}.pods", 7451, "PEM")
        request = wire.RegisterWorker(wire.PROTOCOL, self.group, self.ref, fields.pop("world", 1), name, endpoint, model="tiny", **fields)
        answer = await self.call("RegisterWorker", request)
        if answer.want_layout:
            await self.call("PutLayout", wire.Blob(self.group, name, text.encode()))


@dataclass(slots=True)
class Trainer(Actor):
    run: str = "run-1"

    async def join(self) -> None:
        await self.register(run_id=self.run)

    async def create(self, step: int) -> wire.Version:
        """The version, once the catalog knows a plan for it."""

        async def ask(plan_key: str) -> wire.Created:
            created: wire.Created = await self.call(
                "CreateVersion", wire.CreateVersion(self.group, self.ref, f"{self.run}:{step}", self.run, step, plan_key, ("0",))
            )
            return created

        created = await ask((await ask("")).plan_key)
        assert created.version is not None
        return created.version

    async def seal(self, version: wire.Version) -> None:
        await self.call("OpenShard", wire.OpenShard(self.group, self.ref, version.number, "0", BYTES))
        roots = {0: hashlib.sha256(version.key.encode()).digest()}
        await self.call("SealShard", wire.SealShard(self.group, self.ref, version.number, "0", BYTES, version.plan_key, roots))

    async def publish(self, step: int) -> int:
        version = await self.create(step)
        await self.seal(version)
        return version.number

    async def close(self, number: int) -> None:
        await self.call("CloseHolder", wire.CloseHolder(self.group, self.ref, number))


@dataclass(slots=True)
class Generator(Actor):
    """`follow` obeys orders at once, as a fast agent would; `refuse` is the error that it answers a stage with; `keeps`: as with keepPrevious."""

    order: wire.Assignment = field(default_factory=lambda: wire.Assignment(0, 0, 0, Order.STAGE))
    said: RankReport | None = None
    refuse: wire.ErrorDetail | None = None
    keeps: bool = False
    layout: str = ""
    orders: list[wire.Assignment] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def join(self) -> None:
        await self.register(coordinate="tp0", arena_bytes=BYTES, layout=self.layout)
        await self.say()
        self.task = asyncio.create_task(self.follow())

    async def follow(self) -> None:
        async for order in self.catalog.watch_assignment(wire.WatchAssignment(self.group, self.ref), 3600.0):
            self.order = order
            self.orders.append(order)
            if order.order is Order.STAGE:
                await self.stage(order.target)
            elif order.order is Order.COMMIT:
                await self.commit(order.target)
            else:
                await self.say(phase=RankPhase.SERVING, arena=order.target, arena_complete=True, staging=0)

    async def stage(self, number: int) -> None:
        if self.refuse is not None:
            await self.say(error=self.refuse)
            return
        kept = self.said.serving if self.said is not None and self.keeps else 0
        await self.say(phase=RankPhase.STAGING, arena=number, arena_complete=False, kept=kept, staging=number, bytes=BYTES)
        relays = [source.worker for one in self.order.sources for source in one.relays]
        holders = tuple(relays) or await self._trainers(number)
        await self.call("AcquireLease", wire.AcquireLease(self.group, self.ref, number, holders[:1]))
        await self.call("ReleaseLease", wire.ReleaseLease(self.group, self.ref, number))
        reads = (wire.ReadFrom("of a peer", Role.GENERATOR if relays else Role.TRAINER, BYTES),)
        pull = wire.Timing("pull", time.time(), 0.5)
        await self.say(phase=RankPhase.STAGED, arena=number, arena_complete=True, staging=0, verified=BYTES, bytes=BYTES, timings=(pull,), reads=reads)

    async def _trainers(self, number: int) -> tuple[WorkerRef, ...]:
        shards: wire.Sources = await self.call("ListShards", wire.ListShards(self.group, number))
        return tuple(source.worker for source in shards.sources if source.worker.role is Role.TRAINER)

    async def commit(self, number: int) -> None:
        stall = wire.Timing("install", time.time(), 0.01)
        await self.say(phase=RankPhase.SERVING, serving=number, timings=(*(self.said.timings if self.said else ()), stall))

    async def say(self, error: wire.ErrorDetail | None = None, fenced: bool = False, **fields: Any) -> None:
        """A report: what was said before, with these changes."""
        before = self.said if self.said is not None else RankReport(self.ref, "tp0", RankPhase.IDLE)
        number = fields.get("arena", 0)
        if number:
            facts = await self.call("GetVersion", wire.GetVersion(self.group, number))
            fields = {"plan_key": facts.version.plan_key, **fields}
        self.said = replace(before, **fields)
        await self.call("Report", wire.Report(self.group, self.ref, self.order.catalog_epoch, self.order.seq, (self.said,), fenced, error))

    async def leave(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

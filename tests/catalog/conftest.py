"""A small world around the pure model: a clock that is told, a trainer of two ranks, generators, and the calls that they make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from refit_api import wire
from refit_api.errors import RefitError
from refit_api.wire import Role, WorkerRef
from refit_operator.catalog import generators, model
from refit_operator.catalog.facts import Group, Moment, Pending, generator_of
from refit_operator.catalog.local import TERMS
from refit_operator.ports import Recorded

GROUP = wire.GroupRef("ns", "demo")


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@dataclass
class Hand:
    """A clock that is moved by hand."""

    at: float = 0.0

    def monotonic(self) -> float:
        return self.at

    def time(self) -> float:
        return 1_700_000_000.0 + self.at


class World:
    """`call` answers as the service would at the end of its waiting, unless `waits` is asked for."""

    def __init__(self, recorded: Recorded | None = None, **terms: Any) -> None:
        self.now = 1000.0
        self.terms = replace(TERMS, **terms)
        self.group: Group = model.start(GROUP, self.terms, recorded if recorded is not None else Recorded(), self.now)
        self.write()

    def write(self) -> None:
        """What the operator does when it is woken."""
        self.group = model.confirm(self.group, self.group.epoch, self.group.ceiling + model.wanted_ceiling(self.group), frozenset(self.group.versions))

    def look(self, method: str, request: Any, began: float | None = None) -> Any:
        """The first answer: a message or a Pending; what was refused is raised."""
        self.group, answer = model.handle(self.group, method, request, Moment(self.now, self.now if began is None else began))
        if isinstance(answer, RefitError):
            raise answer
        return answer

    def call(self, method: str, request: Any) -> Any:
        answer = self.look(method, request)
        if isinstance(answer, Pending):
            self.write()
            answer = self.look(method, request)
        answer = answer.otherwise if isinstance(answer, Pending) else answer
        if isinstance(answer, RefitError):
            raise answer
        return answer

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.group = model.tick(self.group, self.now)

    def wait(self, seconds: float, *beating: WorkerRef) -> None:
        """Time passes; these workers send their heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.group.beat_seconds)
            for ref in beating:
                self.look("Heartbeat", wire.Heartbeat(GROUP, ref))
            self.tick()

    # --- workers

    def register(self, ref: WorkerRef, world: int, layout: str = "", **fields: Any) -> wire.Registered:
        text = layout or f"{ref.role.value}-{ref.rank}"
        name = hashlib.sha256(text.encode()).hexdigest()
        endpoint = fields.pop("endpoint", wire.Endpoint(f"{ref.pod_uid}.pods", 7451, "PEM"))
        request = wire.RegisterWorker(fields.pop("protocol", wire.PROTOCOL), GROUP, ref, world, name, endpoint, **fields)
        answer: wire.Registered = self.call("RegisterWorker", request)
        if answer.want_layout:
            self.call("PutLayout", wire.Blob(GROUP, name, text.encode()))
        return answer

    def trainer(self, rank: int, world: int = 2, pod: str = "", run: str = "run-1", incarnation: str = "a", **fields: Any) -> WorkerRef:
        ref = WorkerRef(pod or f"trainer-{rank}", Role.TRAINER, rank, incarnation)
        self.register(ref, world, run_id=run, **fields)
        return ref

    def generator(self, pod: str = "gen-0", rank: int = 0, world: int = 1, incarnation: str = "a", **fields: Any) -> WorkerRef:
        ref = WorkerRef(pod, Role.GENERATOR, rank, incarnation)
        self.register(ref, world, **{"coordinate": f"tp{rank}", **fields})
        return ref

    # --- versions

    def create(
        self, ref: WorkerRef, step: int = 0, slots: tuple[str, ...] = ("0", "1"), run: str = "run-1", plan_key: str | None = None,
        base: int = 0, select: wire.Select | None = None,
    ) -> wire.Created:  # fmt: skip
        def request(key: str) -> wire.CreateVersion:
            return wire.CreateVersion(GROUP, ref, f"{run}:{step}", run, step, key, slots, base, select)

        if plan_key is None:
            plan_key = self.call("CreateVersion", request("")).plan_key
        created: wire.Created = self.call("CreateVersion", request(plan_key))
        return created

    def seal(self, ref: WorkerRef, number: int, slot: str = "", content: str = "", runs: tuple[int, ...] = ()) -> None:
        slot = slot or str(ref.rank)
        plan_key = self.group.versions[number].version.plan_key if number in self.group.versions else ""
        self.call("OpenShard", wire.OpenShard(GROUP, ref, number, slot, 100))
        roots = {run: digest(f"{number} {run} {content}") for run in (runs or (min(int(rank) for rank in slot.split("-")),))}
        self.call("SealShard", wire.SealShard(GROUP, ref, number, slot, 100, plan_key, roots))

    def publish(self, step: int = 0, trainers: tuple[WorkerRef, ...] = ()) -> int:
        """A Ready version, by a trainer of two ranks with a slot each; the engine class must be there."""
        ranks = trainers or (self.trainer(0), self.trainer(1))
        created = self.create(ranks[0], step)
        assert created.version is not None
        for ref in ranks:
            self.seal(ref, created.version.number)
        return created.version.number

    def phase(self, number: int) -> str:
        return self.group.versions[number].version.phase.value

    # --- holders and readers

    def lease(self, reader: WorkerRef, number: int, *holders: WorkerRef) -> None:
        self.call("AcquireLease", wire.AcquireLease(GROUP, reader, number, holders))

    def close(self, ref: WorkerRef, number: int, leaving: bool = False) -> tuple[str, ...]:
        closed: wire.Closed = self.call("CloseHolder", wire.CloseHolder(GROUP, ref, number, 0.0, leaving))
        return closed.readers

    def report(self, *ranks: WorkerRef, seq: int = 1, epoch: int = 1, phase: wire.RankPhase = wire.RankPhase.SERVING, **fields: Any) -> None:
        """By the first of `ranks`, the same for all of them."""
        entry = self.group.versions.get(fields.get("staging") or fields.get("arena") or 0)
        fields = {"plan_key": entry.version.plan_key if entry is not None else "", **fields}
        said = tuple(wire.RankReport(worker, f"tp{worker.rank}", phase, **fields) for worker in ranks)
        self.call("Report", wire.Report(GROUP, ranks[0], epoch, seq, said))

    def hold(self, ref: WorkerRef, number: int) -> None:
        """The generator has staged and serves the version."""
        self.report(ref, serving=number, arena=number, arena_complete=True)

    def assign(self, ref: WorkerRef, target: int) -> None:
        self.group = generators.assign(self.group, generator_of(ref), target, wire.Order.STAGE, (), 600.0)


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def clock() -> Hand:
    return Hand()

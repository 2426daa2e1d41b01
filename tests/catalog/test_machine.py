"""A small world under random events: two trainers, two generators, crashes, lost memory, time.

The oracle knows what the processes really do: whose memory holds which version, and who may still be reading from it by its own clock. After
every step: memory was never reused under a reader, no number was given twice, every version moved along its table, its root never changed.
At the end, with everybody gone, everything has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from refit_api import wire
from refit_api.errors import PeerError, RefitError
from refit_api.wire import Role, VersionPhase, WorkerRef
from refit_operator.catalog.facts import ENDED, MOVES
from refit_operator.ports import Recorded, RecordedVersion

from tests.examples import examples

if TYPE_CHECKING:
    from tests.catalog.conftest import World
else:
    World = Any

GROUP = wire.GroupRef("ns", "demo")
MARGIN = 5.0  # a reader stops this long before its lease ends
ranks = st.sampled_from([0, 1])


class Fleet(RuleBasedStateMachine):
    def __init__(self, make_world: Callable[..., World]) -> None:
        super().__init__()
        self.make_world, self.world = make_world, make_world(lease_seconds=15.0, drain_seconds=10.0, publish_deadline_seconds=60.0)
        self.run, self.starts = 1, 0
        self.steps: dict[WorkerRef, int] = {}
        self.trainers: dict[int, WorkerRef] = {}
        self.generators: dict[int, WorkerRef] = {}
        self.memory: dict[WorkerRef, int] = {}  # process -> the version that its arena holds
        self.reads: dict[tuple[WorkerRef, WorkerRef, int], float] = {}  # (reader, holder, version) -> until when, by the reader's clock
        self.numbers: dict[int, str] = {}
        self.phases: dict[int, VersionPhase] = {}
        self.roots: dict[int, bytes] = {}
        for rank in (0, 1):
            self.start_generator(rank)
            self.start_trainer(rank)

    def incarnation(self) -> str:
        self.starts += 1
        return str(self.starts)

    def start_trainer(self, rank: int) -> None:
        self.trainers[rank] = self.world.trainer(rank, run=f"run-{self.run}", incarnation=self.incarnation())

    def start_generator(self, rank: int) -> None:
        self.generators[rank] = self.world.generator(f"gen-{rank}", incarnation=self.incarnation())

    def reuse(self, ref: WorkerRef, number: int) -> bool:
        """Closes what the arena holds; when the catalog says that nobody reads it, the memory changes."""
        held = self.memory.get(ref, 0)
        if held and held != number:
            if self.world.close(ref, held):
                return False
            reading = [key for key, until in self.reads.items() if key[1:] == (ref, held) and until > self.world.now]
            assert not reading, f"memory of {ref} is reused under {reading}"
        self.memory[ref] = number
        return True

    def attempt(self, act: Callable[[], object]) -> bool:
        """Processes meet errors all the time; those of the tree are fine."""
        try:
            act()
        except PeerError:
            return False
        return True

    @rule(rank=ranks)
    def publish(self, rank: int) -> None:
        """A rank goes on to its next step when it has sealed the present one."""
        ref = self.trainers[rank]
        step = self.steps.get(ref, 0)

        def act() -> None:
            version = self.world.create(ref, step, run=f"run-{self.run}").version
            assert version is not None
            assert self.numbers.setdefault(version.number, version.key) == version.key
            if version.phase is VersionPhase.FAILED:
                self.steps[ref] = step + 1
            elif self.reuse(ref, version.number):
                self.world.seal(ref, version.number)
                self.steps[ref] = step + 1

        self.attempt(act)

    @rule()
    def publish_on_both(self) -> None:
        for rank in (0, 1, 0, 1):
            self.publish(rank)

    @rule(reader=ranks, source=ranks, relay=st.booleans())
    def read(self, reader: int, source: int, relay: bool) -> None:
        ref = self.generators[reader]
        holder = self.generators[1 - reader] if relay else self.trainers[source]
        number = self.memory.get(holder, 0)

        def act() -> None:
            others = [other for reading, other, version in self.reads if (reading, version) == (ref, number)]
            self.world.lease(ref, number, *others, holder)  # a lease names all that it is about
            if self.memory.get(holder) == number:
                self.reads[ref, holder, number] = self.world.now + 15.0 - MARGIN

        if number:
            self.attempt(act)

    @rule(reader=ranks)
    def renew(self, reader: int) -> None:
        ref = self.generators[reader]
        for key, until in list(self.reads.items()):
            if key[0] == ref and until > self.world.now and self.attempt(lambda key=key: self.world.call("RenewLease", wire.RenewLease(GROUP, ref, key[2]))):
                self.reads[key] = self.world.now + 15.0 - MARGIN

    @rule(reader=ranks)
    def finish(self, reader: int) -> None:
        """All reads ended: what was read is staged, and offered to others."""
        ref = self.generators[reader]
        done = [key for key in self.reads if key[0] == ref]
        for key in done:
            del self.reads[key]
            self.world.call("ReleaseLease", wire.ReleaseLease(GROUP, ref, key[2]))
        if done and self.attempt(lambda: self.reuse(ref, done[-1][2])) and self.memory.get(ref) == done[-1][2]:
            number = self.memory[ref]
            self.attempt(lambda: self.world.report(ref, serving=number, arena=number, arena_complete=True, epoch=self.world.group.epoch))

    @rule(kind=st.sampled_from(["generator", "trainers", "catalog", "retire"]), rank=ranks)
    def misfortune(self, kind: str, rank: int) -> None:
        match kind:
            case "generator":
                self.lose(self.generators[rank])
                self.start_generator(rank)
            case "trainers":
                self.run += 1
                for ref in self.trainers.values():
                    self.lose(ref)
                for each in (0, 1):
                    self.start_trainer(each)
            case "catalog":
                self.lose_catalog()
            case _:
                numbers = sorted(self.world.group.versions)[-2:]
                for number in numbers[: rank + 1]:
                    self.attempt(lambda number=number: self.world.call("RetireVersion", wire.EndVersion(GROUP, number)))

    def lose(self, ref: WorkerRef) -> None:
        """The process is gone, with its memory and its reads."""
        self.reads = {key: until for key, until in self.reads.items() if ref not in key[:2]}
        self.memory.pop(ref, None)

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0]), alive=st.booleans())
    def time_passes(self, seconds: float, alive: bool) -> None:
        self.world.now += seconds
        for ref in (*self.trainers.values(), *self.generators.values()) if alive else ():
            self.heartbeat(ref)
        self.world.tick()

    def heartbeat(self, ref: WorkerRef) -> None:
        """Who is not known any more registers again, and says again what it holds."""
        if self.world.call("Heartbeat", wire.Heartbeat(GROUP, ref)).known:
            return
        number = self.memory.get(ref, 0)
        if ref.role is Role.TRAINER:
            self.world.trainer(ref.rank, run=f"run-{self.run}", incarnation=ref.incarnation)
            if number:
                self.attempt(lambda: self.world.seal(ref, number))
        else:
            self.world.generator(ref.pod_uid, incarnation=ref.incarnation)
            if number:
                self.world.report(ref, serving=number, arena=number, arena_complete=True, epoch=self.world.group.epoch)
        for number in {read for reader, _, read in self.reads if reader == ref}:
            sources = [holder for reader, holder, read in self.reads if (reader, read) == (ref, number)]
            self.attempt(lambda number=number, sources=sources: self.world.lease(ref, number, *sources))

    def lose_catalog(self) -> None:
        kept = [
            RecordedVersion(v.number, v.key, v.run_id, v.step, v.plan_key, v.phase, v.root, v.bytes, len(v.slots))
            for v in (entry.version for entry in self.world.group.versions.values())
        ]
        now, recorded, terms = self.world.now, Recorded(self.world.group.epoch, self.world.group.ceiling, tuple(kept)), self.world.terms
        self.world = self.make_world(recorded=recorded, lease_seconds=terms.lease_seconds, drain_seconds=10.0, publish_deadline_seconds=60.0)
        shift = now - self.world.now
        self.reads = {key: until - shift for key, until in self.reads.items()}  # each world has its own clock
        for ref in self.trainers.values():  # readers come back with their next heartbeat, and read on meanwhile
            self.heartbeat(ref)

    @invariant()
    def versions_move_along_their_table(self) -> None:
        for number, entry in self.world.group.versions.items():
            before, phase = self.phases.get(number, VersionPhase.PUBLISHING), entry.version.phase
            assert phase in reachable(before), f"version {number}: {before} -> {phase}"
            self.phases[number] = phase
            if entry.version.root:
                assert self.roots.setdefault(number, entry.version.root) == entry.version.root

    @invariant()
    def the_index_of_engines_is_that_of_the_workers(self) -> None:
        listed = [key for keys in self.world.group.engines.values() for key in keys]
        assert set(listed) == {key for key in self.world.group.workers if key.role is Role.GENERATOR}
        assert len(listed) == len(set(listed))

    @invariant()
    def leases_are_on_living_versions(self) -> None:
        for number in self.world.group.leases:
            assert self.world.group.versions[number].version.phase is not VersionPhase.RELEASED

    def teardown(self) -> None:
        for _ in range(30):
            self.world.tick(5.0)
        assert {entry.version.phase for entry in self.world.group.versions.values()} <= ENDED
        assert (self.world.group.leases, self.world.group.holders, self.world.group.workers, self.world.group.reports) == ({}, {}, {}, {})


def reachable(phase: VersionPhase) -> set[VersionPhase]:
    return {phase}.union(*(reachable(following) for following in MOVES[phase]))


@pytest.mark.hypothesis
def test_whatever_happens(make_world: Callable[..., World]) -> None:
    run_state_machine_as_test(lambda: Fleet(make_world), settings=settings(examples(60), stateful_step_count=40))


def test_refused_calls_leave_no_trace(world: World) -> None:
    """A handler that raises has changed nothing."""
    world.generator()
    world.publish()
    before = world.group
    for method, request in {
        "AcquireLease": wire.AcquireLease(GROUP, WorkerRef("gen-0", Role.GENERATOR, 0, "a"), 9, ()),
        "SealShard": wire.SealShard(GROUP, WorkerRef("trainer-0", Role.TRAINER, 0, "a"), 1, "7", 1, "", {}),
        "RenewLease": wire.RenewLease(GROUP, WorkerRef("gen-0", Role.GENERATOR, 0, "a"), 1),
    }.items():
        try:
            world.call(method, request)
        except RefitError:  # noqa: PERF203 (three calls)
            assert world.group is before
        else:
            raise AssertionError(method)

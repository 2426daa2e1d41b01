"""`staging: Windowed`: a version moves through a ring while the engine is paused. Live are the version, or the one before, or nothing that may serve.

Five windows of 4 MiB; a trip at the n-th run of a copy list is one at the n-th window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import CatalogUnavailable, InstallError, RefitError
from refit_api.mounted import Engine, Rollout, Trainer
from refit_api.wire import Leased, ListShards, RankPhase, Role, Select
from refit_runtime import offers
from refit_runtime.adapters.memory import Fault
from refit_runtime.adapters.torch_module import TorchTarget
from refit_runtime.generator import GeneratorClient

from tests.runtime.failing import Answers, Tripping
from tests.runtime.steps import perturb, publish_all, refit, same
from tests.runtime.test_subsets import WIRES, chosen, halved, moved, size, step

MIB = 1 << 20
WINDOWED = Engine(kind="Custom", staging="Windowed")
WINDOWS = 5


class Tall(torch.nn.Module):
    """17 MB in float32, in layers of 2 MB."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Linear(512, 1031) for _ in range(8))
        self.model.norm = torch.nn.Parameter(torch.randn(257))


BYTES = size(Tall(0).parameters())


class Setting:
    """One rank that serves its first version, and a second one that is published. `trip(w, what)`: at the copy of window w of the next install."""

    def __init__(self, world: Any, orders: Any, *, trainers: int = 1, engine: Engine = WINDOWED, **options: Any) -> None:
        self.world, self.orders, self.memory = world, orders, Tripping()
        self.source, self.target, self.step, self.answers = Tall(1), Tall(2), 0, dict[str, Any]()
        for rank in range(trainers):
            world.faults[f"trainer-{rank}"] = Fault()
        terms = Trainer(redundancy=trainers)
        self.trainers = [world.trainer(self.source, rank, trainers, replica=rank, options=terms) for rank in range(trainers)]
        self.fault = world.faults["trainer-0"]
        self.rank = world.rank(
            self.target, engine=engine,
            wrap=lambda seams: replace(seams, memory=self.memory, catalog=Answers(seams.catalog, self.answers)), **options,
        )  # fmt: skip
        self.first = self.publish()
        refit(self.rank, orders, self.first)
        self.rank.wait()
        self.before = Tall(0)
        self.before.load_state_dict(self.source.state_dict())
        perturb(self.source)
        self.fault.moved = 0
        self.second = self.publish()

    def publish(self) -> int:
        self.step += 1
        return publish_all(self.trainers, self.step)

    def stage(self) -> Any:
        self.rank.start(self.orders.stage(self.second))
        self.rank.wait()
        return self.rank.report()

    def install(self) -> Any:
        return self.rank.install(self.orders.commit(self.second))

    def trip(self, window: int, what: Callable[[], object]) -> None:
        self.memory.trips = [*[(0, lambda: None)] * window, (0, what)]

    def stands(self, number: int) -> None:
        """That version is live, whole, and said so."""
        report = self.rank.report()
        assert (report.phase, report.serving) == (RankPhase.SERVING, number)
        assert same(self.source if number == self.second else self.before, self.target)

    def is_fenced(self) -> None:
        assert (self.rank.report().phase, self.rank.report().serving, self.rank.live.torn) == (RankPhase.FENCED, 0, True)

    def mends(self) -> None:
        """The second try of a commit."""
        self.memory.trips = []
        self.fault.corrupt, self.fault.die_at, self.fault.delay = 0, None, 0.0
        assert self.install().error is None
        self.stands(self.second)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_version_moves_in_the_pause_only_and_nothing_is_made_twice(world: Any, orders: Any, wire: Any) -> None:
    source, target = Tall(1), Tall(2)
    trainer, rank = world.trainer(source, wrap=wire), world.rank(target, engine=WINDOWED, wrap=wire, installed="Async")
    counts = []
    for number in range(1, 4):
        version, before = trainer.publish(number).number, target.model.norm.clone()
        bytes_before = rank.counters()["bytes"]
        rank.start(orders.stage(version))
        rank.wait()
        staged = rank.prepare(orders.commit(version))
        assert (staged.phase, staged.arena, staged.arena_complete, staged.bytes) == (RankPhase.PREPARED, version, True, BYTES)
        assert staged.arena_root == world.version(version).root
        assert rank.counters()["bytes"] == bytes_before
        assert torch.equal(before, target.model.norm)
        report = rank.install(orders.commit(version))
        assert (report.error, report.serving, moved(report)) == (None, version, BYTES)
        assert {"pull", "install"} <= {timing.stage for timing in rank.report().timings}
        assert same(source, target)
        rank.wait()
        assert rank.report().phase is RankPhase.SERVING
        trainer.release(version, 20)  # nobody reads it any more
        perturb(source)
        counts.append({name: count for name, count in rank.counters().items() if name not in ("reads", "bytes")})
    assert counts == [{"plans": 1, "allocations": 1, "registrations": 1, "connections": 1}] * 3
    assert rank.worker._request.arena_bytes == rank._stager.arena.whole.numel() == 8 * MIB


def test_it_holds_nothing_that_others_could_read(world: Any, orders: Any) -> None:
    setting = Setting(world, orders)
    assert setting.stage().phase is RankPhase.STAGED
    world.report(setting.rank)
    ask = ListShards(setting.rank.worker.group, setting.second, (), "", "tp0")
    assert {source.worker.role for source in setting.rank._seams.catalog.list_shards(ask).sources} == {Role.TRAINER}
    assert setting.rank.held() == ()


def test_a_rank_with_an_arena_relays_to_one_without(world: Any, orders: Any) -> None:
    source, target = Tall(1), Tall(2)
    trainer, full, rank = world.trainer(source), world.rank(Tall(3), "g-1"), world.rank(target, engine=WINDOWED)
    number = trainer.publish(0).number
    refit(full, orders, number)
    world.report(full)
    report = refit(rank, orders, number, (world.source(full),))
    assert same(source, target)
    assert (report.read_from(Role.GENERATOR), report.read_from(Role.TRAINER)) == (BYTES, 0)


@pytest.mark.parametrize("installed", ["Async", "Blocking", "Off"])
def test_damage_after_the_copies_is_found_as_the_group_asks(world: Any, orders: Any, installed: str) -> None:
    """Something else writes to a parameter of the first window while the last one is installed."""
    setting = Setting(world, orders, installed=installed)
    setting.stage()
    setting.trip(WINDOWS - 1, lambda: setting.target.model.layers[0].weight.data[5].zero_())
    report = setting.install()
    assert (report.error is None) == (installed != "Blocking")
    setting.rank.wait()
    if installed == "Off":
        assert setting.rank.report().phase is RankPhase.SERVING
        return
    assert setting.rank.report().error.type == "DigestMismatch"
    setting.is_fenced()
    setting.stage()
    setting.mends()


@pytest.mark.parametrize("window", [0, 1, WINDOWS - 1])
def test_a_copy_that_fails_fences_and_a_whole_install_mends(world: Any, orders: Any, window: int) -> None:
    setting = Setting(world, orders)
    setting.stage()

    def broken() -> None:
        raise RuntimeError("a copy")

    setting.trip(window, broken)
    assert setting.install().error.type == "InstallError"
    setting.is_fenced()
    setting.mends()


@contextmanager
def slow(fault: Fault, seconds: float) -> Iterator[None]:
    fault.delay = seconds
    yield
    fault.delay = 0.0


READING: dict[str, Callable[[Fault], None]] = {
    "the source dies": lambda fault: setattr(fault, "die_at", fault.moved),
    "its bytes stay wrong": lambda fault: setattr(fault, "corrupt", 1000),
}


@pytest.mark.parametrize("fault", READING.values(), ids=READING)
@pytest.mark.parametrize("window", [0, 2])
def test_a_window_that_cannot_be_read_is_not_copied_and_the_next_try_goes_on_there(world: Any, orders: Any, fault: Any, window: int) -> None:
    """Nobody else holds the version. Before the first copy nothing is lost; after it the rank is fenced."""
    setting = Setting(world, orders)
    setting.stage()
    if window:
        setting.trip(window - 1, lambda: fault(setting.fault))
    else:
        fault(setting.fault)
    error = setting.install().error
    assert error.type in ("PeerUnavailable", "DigestMismatch")
    done = setting.rank._stager._promise.done
    if window:
        setting.is_fenced()
        assert window <= done <= window + 1  # the one after may have been there already
    else:
        setting.stands(setting.first)
        assert done == 0
    read = setting.fault.moved
    setting.mends()
    assert setting.fault.moved - read <= BYTES - 4 * MIB * done


@pytest.mark.parametrize("terms", [{"redundancy": 2}], ids=["redundancy: 2"])
@pytest.mark.parametrize("fault", READING.values(), ids=READING)
def test_the_next_owner_of_a_run_is_read_from(world: Any, orders: Any, fault: Any) -> None:
    setting = Setting(world, orders, trainers=2)
    setting.stage()
    setting.trip(1, lambda: fault(setting.fault))
    assert setting.install().error is None
    setting.stands(setting.second)


def test_every_source_sends_for_every_window(world: Any, orders: Any) -> None:
    """Tensor-parallel trainers: half of each layer comes from each, and a window is of about the same layers on both."""
    source, target, memory = Tall(1), Tall(2), Tripping()
    halves = [halved(source, rank) for rank in range(2)]
    faults = [world.faults.setdefault(f"trainer-{rank}", Fault()) for rank in range(2)]
    trainers = [world.trainer(module, rank, 2, parts=parts) for rank, (module, parts) in enumerate(halves)]
    rank = world.rank(target, engine=WINDOWED, installed="Off", wrap=lambda seams: replace(seams, memory=memory))
    number = publish_all(trainers, 0)
    rank.start(orders.stage(number))
    rank.wait()
    seen: list[list[int]] = []
    memory.trips = [(0, lambda: seen.append([fault.moved for fault in faults])) for _ in range(WINDOWS)]
    assert rank.install(orders.commit(number)).error is None
    assert same(source, target)
    assert sum(fault.moved for fault in faults) == BYTES
    assert all(min(one) >= 2 * MIB * (window + 1) - MIB for window, one in enumerate(seen[:-1]))


def test_wrong_bytes_are_read_again(world: Any, orders: Any) -> None:
    setting = Setting(world, orders)
    setting.stage()
    setting.trip(1, lambda: setattr(setting.fault, "corrupt", 1))
    report = setting.install()
    assert report.error is None
    setting.stands(setting.second)
    assert moved(report) > BYTES


def test_a_read_that_never_ends_costs_the_agent_and_not_the_install(world: Any, orders: Any) -> None:
    """No window's memory is given to the next one before that."""
    setting = Setting(world, orders)
    setting.stage()
    before = setting.rank.worker.ref.incarnation
    setting.trip(1, lambda: setattr(setting.fault, "drop", 1))
    assert setting.install().error is None
    assert setting.rank.worker.ref.incarnation != before
    setting.stands(setting.second)


def soon_over(inner: Any, request: Any) -> Leased:
    """Its promise has this long to go, less the margin of 5 s."""
    inner.acquire_lease(request)
    return Leased(10.0)


def away(inner: Any, request: Any) -> Any:
    raise CatalogUnavailable("the catalog is away", retry_after=0.2)


def test_a_lease_that_is_lost_before_the_install_takes_the_promise_back(world: Any, orders: Any) -> None:
    setting = Setting(world, orders)
    setting.answers |= {"acquire_lease": soon_over, "renew_lease": away}
    assert setting.stage().arena == setting.second
    time.sleep(5.3)
    report = setting.rank.report()
    assert (report.phase, report.arena, report.error.type) == (RankPhase.SERVING, 0, "LeaseLost")
    assert setting.rank.prepare(orders.commit(setting.second)).error.type == "LeaseLost"
    assert setting.install().error.type == "MixedRanks"
    setting.stands(setting.first)
    setting.answers.clear()
    setting.stage()
    setting.mends()


def test_a_lease_that_is_lost_in_the_pause_is_asked_for_again(world: Any, orders: Any) -> None:
    setting = Setting(world, orders)
    setting.answers |= {"acquire_lease": soon_over, "renew_lease": away}
    setting.stage()

    def expire() -> None:
        setting.answers.clear()
        time.sleep(5.3)

    setting.trip(1, expire)
    report = setting.install()
    assert report.error is None
    assert moved(report) >= BYTES, "what was on its way may come twice"
    setting.stands(setting.second)


def test_a_rank_that_is_fenced_while_it_installs_stops(world: Any, orders: Any) -> None:
    setting = Setting(world, orders)
    setting.stage()
    setting.trip(1, lambda: setting.rank.fence("the agent said so"))
    setting.install()
    setting.is_fenced()
    assert setting.rank._stager._promise.done == 2
    setting.mends()


def test_a_slow_link_is_waited_for_window_by_window(world: Any, orders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of a window come together: the time between two of them says nothing of the next window."""
    monkeypatch.setattr(offers, "SLOWEST", 1e6)
    setting = Setting(world, orders)
    setting.stage()
    with slow(setting.fault, 1.5):
        assert setting.install().error is None
    setting.stands(setting.second)


def test_an_install_ends_in_time_and_says_what_time_it_wants(world: Any, orders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "LEAST_SECONDS", 20.0)
    setting = Setting(world, orders, engine=Engine(kind="Custom", staging="Windowed", pause_timeout_seconds=6.0))
    setting.stage()
    done = []
    with slow(setting.fault, 1.1):
        for _ in range(8):
            report = setting.install()
            if report.error is None:
                break
            assert report.error.type == "InstallError"
            assert "pauseTimeoutSeconds (6)" in report.error.message
            done.append(int(report.error.facts["bytes"]))
    assert done == sorted(done)
    assert done[-1] > 0
    setting.stands(setting.second)


@pytest.mark.parametrize("fails", [False, True], ids=["at once", "in the second try, with everything"])
def test_of_a_subset_over_its_base_only_its_blocks_are_read(world: Any, orders: Any, fails: bool) -> None:
    setting = Setting(world, orders)
    setting.stage()
    setting.install()
    select, shadow = Select(layers=(2, 5)), setting.before
    shadow.load_state_dict(setting.source.state_dict())
    step(setting.source, shadow, select)
    setting.second = setting.trainers[0].publish(9, select).number
    assert setting.stage().bytes < size(chosen(setting.source, select).values()) + 8 * MIB

    def broken() -> None:
        raise RuntimeError("a copy")

    if fails:
        setting.trip(0, broken)
        assert setting.install().error.type == "InstallError"
        setting.is_fenced()
        setting.memory.trips = []
    report = setting.install()
    assert report.error is None
    assert same(shadow, setting.target)
    assert (moved(report) < BYTES) != fails


def test_a_subset_without_its_base_is_installed_whole(world: Any, orders: Any) -> None:
    source, shadow, target = Tall(1), Tall(1), Tall(2)
    trainer, rank = world.trainer(source), world.rank(target, engine=WINDOWED)
    trainer.publish(0)
    step(source, shadow, Select(layers=(1,)))
    report = refit(rank, orders, trainer.publish(1, Select(layers=(1,))).number)
    assert same(shadow, target)
    assert moved(report) == BYTES


def test_casts_between_engines_that_differ(world: Any, orders: Any) -> None:
    source, low, high = Tall(1), Tall(2).to(torch.bfloat16), Tall(3)
    trainer, ranks = world.trainer(source), [world.rank(low, "g-1", engine=WINDOWED), world.rank(high, "g-2", engine=WINDOWED)]
    number = trainer.publish(0).number
    for rank in ranks:
        refit(rank, orders, number)
    assert same(source, low, torch.bfloat16)
    assert same(source, high)


class Derives(TorchTarget):
    """An engine that makes something of its parameters, once all are there."""

    def __init__(self, module: Any, source: Any) -> None:
        super().__init__(module)
        self.seen: list[bool] = []
        self._pair = module, source

    def remake(self) -> None:
        self.seen.append(same(*self._pair))


def test_what_an_engine_derives_is_made_after_the_last_window(world: Any, orders: Any) -> None:
    source, module = Tall(1), Tall(2)
    target = Derives(module, source)
    trainer, rank = world.trainer(source), world.rank(module, target=target, engine=WINDOWED)
    refit(rank, orders, trainer.publish(0).number)
    assert target.seen == [True]


def test_given_up_and_taken_up(world: Any, orders: Any) -> None:
    """A discard frees the trainer; the same order again finds the promise, another version replaces it."""
    setting = Setting(world, orders)
    setting.stage()
    lease = setting.rank._stager._promise.lease
    setting.stage()
    assert setting.rank._stager._promise.lease is lease
    setting.rank.discard()
    setting.rank.wait()
    assert (setting.rank.report().phase, setting.rank.report().arena) == (RankPhase.SERVING, 0)
    setting.trainers[0].release(setting.second, 1)
    setting.second = setting.publish()
    setting.stage()
    setting.mends()


def test_the_client_of_a_framework(world: Any) -> None:
    source, target = Tall(1), Tall(2)
    trainer = world.trainer(source)
    settings = world.settings("generator-0", Role.GENERATOR, engine=WINDOWED, rollout=Rollout(policy="Manual"))
    memory = Tripping()
    client = GeneratorClient(settings, "tp0", replace(world.seams(settings), memory=memory))
    client.bind(TorchTarget(target))
    world.stack.callback(client.close)
    client.install(client.stage(trainer.publish(0).number))
    assert same(source, target)
    perturb(source)
    staged = client.stage(trainer.publish(1).number)

    def broken() -> None:
        raise RuntimeError("a copy")

    memory.trips = [(0, broken)]
    with pytest.raises(InstallError):
        client.install(staged)
    client.install(staged)
    assert same(source, target)
    client.release()


def test_a_ring_that_does_not_fit_is_refused_with_numbers(world: Any) -> None:
    class Full(Tripping):
        def allocate(self, size: int, device: Any) -> Any:
            return super().allocate(size + (1 << 60), device)

    with pytest.raises(RefitError, match=f"needs {8 * MIB + (1 << 60)} bytes"):
        world.rank(Tall(1), engine=WINDOWED, close=False, wrap=lambda seams: replace(seams, memory=Full()))

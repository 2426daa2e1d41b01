"""The ordering rules of the data plane, each as a test of what was called before what. O1: tests/seams/test_transport.py; O10: test_agent.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import MixedRanks, RefitError
from refit_api.wire import GetManifest, RankPhase, Role, Source
from refit_runtime.adapters.torch_module import TorchTarget


class Told:
    """A seam that writes down its calls; what comes back from `connect`, `read` and `copies` as well."""

    def __init__(self, inner: Any, log: list[str], name: str = "") -> None:
        self._inner, self._log, self._name = inner, log, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._log.append(name)
            answer = found(*arguments, **named)
            return Told(answer, self._log) if name in ("connect", "read", "copies") else answer

        return call


def told(log: list[str]) -> Callable[[Any], Any]:
    return lambda seams: replace(
        seams, catalog=Told(seams.catalog, log), transport=Told(seams.transport, log), manifests=Told(seams.manifests, log), memory=Told(seams.memory, log)
    )


def only(log: list[str], *names: str) -> list[str]:
    return [name for name in log if name in names]


def test_o2_a_rank_binds_once(world: Any, net: Any) -> None:
    trainer, rank = world.trainer(net(1)), world.rank(net(2))
    with pytest.raises(AssertionError, match="once"):
        trainer.bind(trainer._source)
    with pytest.raises(AssertionError, match="once"):
        rank.bind(TorchTarget(net(3)))


def test_o3_all_slots_are_known_when_a_version_is_created(world: Any, net: Any) -> None:
    trainer = world.trainer(net(1))
    world.rank(net(2))
    version = trainer.publish(0)
    assert version.slots == trainer._planned.plan.slots == ("0",)


def test_o4_the_manifest_is_served_before_its_shard_is_advertised(world: Any, net: Any) -> None:
    served: list[str] = []

    class Asks(Told):
        """Fetches the manifest at the moment of the advertisement."""

        def __getattr__(self, name: str) -> Any:
            if name in ("open_shard", "seal_shard"):
                manifest = trainer._holdings.answer(GetManifest(1, trainer.worker.ref, trainer.worker.ref))
                served.append(f"{name}: {sum(run.bytes > 0 for run in manifest.runs)} of {len(manifest.runs)} runs")
            return getattr(self._inner, name)

    trainer = world.trainer(net(1), wrap=lambda seams: replace(seams, catalog=Asks(seams.catalog, [])))
    world.rank(net(2))
    trainer.publish(0)
    trainer._sealing.exception(20)
    assert served == ["open_shard: 0 of 1 runs", "seal_shard: 1 of 1 runs"]


def test_o5_and_o8_lease_then_manifest_then_all_reads_then_waiting_then_digests(world: Any, net: Any, orders: Any) -> None:
    log: list[str] = []
    trainer = world.trainer(net(1))
    rank = world.rank(net(2), wrap=told(log))
    number = trainer.publish(0).number
    log.clear()  # digests are compiled when a rank is bound
    rank.start(orders.stage(number))
    rank.wait()
    order = only(log, "acquire_lease", "fetch", "connect", "read", "done", "digests", "release_lease")
    reads = order.count("read")
    assert reads == 5
    assert order[: 3 + reads] == ["acquire_lease", "fetch", "connect", *["read"] * reads]
    assert order[3 + reads] == "done"
    assert order[-1] == "release_lease"
    assert order.count("digests") == reads


def test_o6_nothing_is_installed_that_was_not_verified(world: Any, net: Any, orders: Any) -> None:
    target = net(2)
    before = target.embed.clone()
    rank = world.rank(target)
    number = world.trainer(net(1)).publish(0).number
    assert rank.prepare(orders.commit(number)).phase is RankPhase.IDLE
    report = rank.install(orders.commit(number))
    assert report.error.type == MixedRanks.__name__
    assert torch.equal(before, target.embed)


def test_o9_memory_changes_after_its_holder_was_closed(world: Any, net: Any, orders: Any) -> None:
    log: list[str] = []
    source = net(1)
    trainer = world.trainer(source, wrap=told(log))
    rank = world.rank(net(2), wrap=told(log))
    first = trainer.publish(0).number
    rank.start(orders.stage(first))
    rank.wait()
    log.clear()
    second = trainer.publish(1).number
    assert only(log, "close_holder", "start")[:2] == ["close_holder", "start"], "the snapshot comes after"
    world.version(second)
    log.clear()
    rank.start(orders.stage(second))
    rank.wait()
    assert only(log, "close_holder", "read")[:2] == ["close_holder", "read"]


def test_o11_the_arena_is_registered_once(world: Any, net: Any, orders: Any) -> None:
    log: list[str] = []
    trainer = world.trainer(net(1))
    rank = world.rank(net(2), wrap=told(log))
    for step in range(3):
        rank.start(orders.stage(trainer.publish(step).number))
        rank.wait()
    assert only(log, "allocate") == ["allocate"]
    assert rank._seams.transport.counters()["registrations"] == 1


def test_a_stage_and_its_commit_cost_few_calls(world: Any, net: Any, orders: Any) -> None:
    """At most 8 per generator and version; heartbeats and renewals are not counted."""
    log: list[str] = []
    trainer = world.trainer(net(1))
    rank = world.rank(net(2), wrap=told(log))
    for step in range(2):
        number = trainer.publish(step).number
        world.version(number)
        log.clear()
        rank.start(orders.stage(number))
        rank.wait()
        rank.prepare(orders.commit(number))
        rank.install(orders.commit(number))
    calls = only(log, "get_version", "get_layout", "list_shards", "close_holder", "acquire_lease", "release_lease", "fetch")
    assert calls == ["get_version", "close_holder", "list_shards", "acquire_lease", "fetch", "release_lease"]


def test_a_stranger_gets_no_manifest_and_an_old_incarnation_no_answer(world: Any, net: Any) -> None:
    trainer, rank = world.trainer(net(1)), world.rank(net(2))
    number = trainer.publish(0).number
    endpoint = trainer.worker._request.endpoint
    old = replace(trainer.worker.ref, incarnation="an earlier start")
    with pytest.raises(RefitError, match="started again"):
        rank._seams.manifests.fetch(Source(old, endpoint), GetManifest(number, rank.worker.ref, old), 5)
    assert trainer.worker.ref.role is Role.TRAINER

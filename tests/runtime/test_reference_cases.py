"""Reference cases of the wire and of a version's life that no other file states, by their ids. `tests/plan/test_geometry.py` says where all others are."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import CatalogUnavailable
from refit_api.wire import RankPhase, Role
from refit_runtime.adapters.memory import Fault
from refit_runtime.adapters.torch_module import TorchTarget

from tests.runtime.test_faults import publish, stage
from tests.runtime.test_order import only, told


class NoRelease:
    """A catalog that is away exactly when a lease is given back."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def release_lease(self, request: Any) -> None:
        raise CatalogUnavailable("the catalog is away", retry_after=1.0)


def test_c57_bytes_without_a_digest_are_never_read(world: Any, net: Any, orders: Any) -> None:
    """Absent is no agreement: the holder offers nothing that could be proven."""
    trainer, target, log = world.trainer(net(1)), net(2), []
    rank = world.rank(target, wrap=told(log))
    number = publish([trainer], 0)
    trainer._holdings.all()[0].digests.clear()
    report = stage(rank, orders, number, seconds=1.5)
    assert (report.phase, report.read_from(Role.TRAINER), only(log, "read")) == (RankPhase.IDLE, 0, [])
    assert report.error.type == "TransferTimeout"


@pytest.mark.parametrize("held", ["nothing yet", "the version before"])
def test_c82_bytes_that_moved_at_an_impossible_rate_are_not_installed(world: Any, net: Any, orders: Any, held: str) -> None:
    """No ceiling has to say so (ADR 0016): what a read left where it was does not have this version's digests."""
    module, target = net(secrets.randbits(32)), net(2)  # weights of no other test, whose arenas' memory this one's may have been
    trainer, rank = world.trainer(module), world.rank(target)
    fault = world.faults["trainer-0"] = Fault()
    if held == "the version before":
        number = publish([trainer], 0)
        assert stage(rank, orders, number).phase is RankPhase.STAGED
        rank.install(orders.commit(number))
        with torch.no_grad():
            module.embed[-1, -1] += 1
    before = target.embed.clone()
    fault.hollow = 100
    number = publish([trainer], 1)
    report = stage(rank, orders, number)
    assert report.phase is (RankPhase.IDLE if held == "nothing yet" else RankPhase.SERVING)
    assert report.error.type == "DigestMismatch"
    assert report.error.facts.keys() >= {"source", "tensor", "block"}
    assert rank.install(orders.commit(number)).error.type == "MixedRanks"
    assert torch.equal(before, target.embed)


def test_c72_only_who_is_read_from_is_dialled(world: Any, orders: Any) -> None:
    """Four trainers hold a quarter of the rows each; the engine needs the first half."""
    rows = torch.randn(8, 4)

    def part(lo: int, hi: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_parameter("w", torch.nn.Parameter(rows[lo:hi].clone()))
        return module

    target, log = part(4, 8), []
    parts = {"w": ((8, 4), ((0, 4), (0, 4)))}
    trainers = [world.trainer(part(2 * r, 2 * r + 2), r, 4, parts={"w": ((8, 4), ((2 * r, 2 * r + 2), (0, 4)))}) for r in range(4)]
    rank = world.rank(target, target=TorchTarget(target, parts=parts), wrap=told(log))
    number = publish(trainers, 0)
    assert stage(rank, orders, number).phase is RankPhase.STAGED
    rank.install(orders.commit(number))
    assert torch.equal(target.w, rows[:4])
    assert (only(log, "fetch"), only(log, "connect")) == (["fetch"] * 2, ["connect"] * 2)


def test_c92_a_manifest_that_does_not_give_the_catalog_s_root_is_left_out(world: Any, net: Any, orders: Any) -> None:
    trainer, target, log = world.trainer(net(1)), net(2), []
    rank = world.rank(target, wrap=told(log))
    number = publish([trainer], 0)
    held = trainer._holdings.all()[0]
    held.digests = {run: bytes([digests[0] ^ 1]) + digests[1:] for run, digests in held.digests.items()}
    report = stage(rank, orders, number)
    assert report.phase is RankPhase.IDLE
    assert "its digests of run 0 are not those that were published" in report.error.message
    assert only(log, "connect", "read") == []
    assert log.count("release_lease") == 1


@pytest.mark.parametrize("wrong", [False, True], ids=["after a success", "after a failure"])
def test_c95_a_lease_that_cannot_be_given_back_hides_nothing(world: Any, net: Any, orders: Any, wrong: bool) -> None:
    """It runs out by itself; what the stage met is what is reported."""
    trainer = world.trainer(net(1))
    rank = world.rank(net(2), wrap=lambda seams: replace(seams, catalog=NoRelease(seams.catalog)))
    number = publish([trainer], 0)
    if wrong:
        held = trainer._holdings.all()[0]
        held.digests = {run: bytes(len(digests)) for run, digests in held.digests.items()}
    report = stage(rank, orders, number)
    if wrong:
        assert "its digests of run 0" in report.error.message
    else:
        assert (report.phase, report.error) == (RankPhase.STAGED, None)


def test_c96_a_version_that_is_not_ready_is_waited_for_until_the_deadline_without_a_lease(world: Any, net: Any, orders: Any) -> None:
    first, _ = (world.trainer(net(1), rank, 2, replica=rank) for rank in (0, 1))
    log: list[str] = []
    rank = world.rank(net(2), wrap=told(log))
    number = first.publish(0).number
    report = stage(rank, orders, number, seconds=1.0)
    assert (report.phase, report.error.type, only(log, "acquire_lease")) == (RankPhase.IDLE, "TransferTimeout", [])
    assert "Publishing" in report.error.message


def test_c98_a_version_is_released_once(world: Any, net: Any) -> None:
    log: list[str] = []
    trainer = world.trainer(net(1), wrap=told(log))
    world.rank(net(2))
    number = publish([trainer], 0)
    for _ in range(2):
        trainer.release(number, 5)
    assert only(log, "close_holder") == ["close_holder"]

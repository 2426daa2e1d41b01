"""Real DTensors of eight ranks: what each rank publishes is its part of the whole model, and together they are all of it, from any mesh to any engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_api.tensors import Box, RankShards
from refit_runtime.adapters.fsdp.source import FsdpSource
from refit_runtime.adapters.torch_module import TorchTarget

from tests.adapters.fsdp.models import Tiny
from tests.adapters.fsdp.ranks import CASES, WORLD
from tests.runtime.steps import refit

ROOT = Path(__file__).parents[3]
REFUSED = {
    "partial": "UnsupportedLayout: norm.weight: placement Partial",
    "fsdp_over_uneven_tp": "UnsupportedLayout: blocks.0.up.weight: placement _StridedShard",
    "laid_out_again": "UnsupportedLayout: norm.weight: laid out otherwise than when it was bound; bind the model again",
}
HELD = [*(name for name in CASES if name not in REFUSED), "trained"]
REPLICAS = {"hsdp": 2, "hsdp_over_tp": 2, "replicated": WORLD}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ranks.py")), str(made)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return made


def said(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}.{rank}.pt", weights_only=False) for rank in range(WORLD)]


def inside(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(lo, hi) for lo, hi in box)]


@pytest.mark.parametrize("case", HELD)
def test_every_rank_holds_its_part_of_the_whole(folder: Path, case: str) -> None:
    ranks = said(folder, case)
    whole = ranks[0]["whole"]
    covered: dict[tuple[int, str], torch.Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.int64))
    for rank, found in enumerate(ranks):
        facts: RankShards = found["facts"]
        assert facts.rank == rank
        for shard, view in zip(facts.shards, found["views"], strict=True):
            tensor = whole[shard.tensor.name]
            assert (shard.tensor.shape, shard.tensor.dtype.value) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert torch.equal(view, inside(tensor, shard.box)), (rank, shard)
            times = torch.zeros(tensor.shape, dtype=torch.int64)
            inside(times, shard.box).add_(1)
            covered[facts.replica, shard.tensor.name] = covered[facts.replica, shard.tensor.name] + times
    replicas = {found["facts"].replica for found in ranks}
    assert replicas == set(range(REPLICAS.get(case, 1)))
    assert set(covered) == {(replica, name) for replica in replicas for name in whole}, "a tied head is published once, a mask and a table are not"
    assert all(times.min() > 0 for times in covered.values())


@pytest.mark.parametrize(("case", "why"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_told_is_refused_on_every_rank(folder: Path, case: str, why: str) -> None:
    assert all(found["refused"].startswith(why) for found in said(folder, case)), said(folder, case)[0]["refused"]


def test_uneven_shards_leave_some_ranks_without_a_part(folder: Path) -> None:
    ranks = said(folder, "fsdp")
    holders = {name: sum(name == shard.tensor.name for found in ranks for shard in found["facts"].shards) for name in ranks[0]["whole"]}
    assert holders == holders | {"embed.weight": 6, "norm.weight": 5, "scale": 1, "bias_of_router": 8, "blocks.0.up.weight": 5}


class Told:
    """What a rank said, as the source of a trainer in this process."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._facts, self._views = found["facts"], found["views"]

    def shards(self) -> RankShards:
        facts: RankShards = self._facts
        return facts

    def view(self, index: int) -> torch.Tensor:
        view: torch.Tensor = self._views[index]
        return view


@pytest.mark.parametrize("case", ["fsdp", "fsdp_bf16", "hsdp", "fsdp_over_tp", "hsdp_over_tp", "trained"])
def test_into_a_plain_engine_byte_for_byte(folder: Path, world: Any, orders: Any, case: str) -> None:
    ranks = said(folder, case)
    engine = Tiny(seed=8).to(next(iter(ranks[0]["whole"].values())).dtype)
    engine.head = torch.nn.Identity()  # type: ignore[assignment]  # the checkpoint's name is embed.weight
    trainers = [world.publisher(Told(found), rank, WORLD) for rank, found in enumerate(ranks)]
    generator = world.rank(engine, target=TorchTarget(engine))
    with ThreadPoolExecutor(WORLD) as pool:
        (number,) = {version.number for version in pool.map(lambda trainer: trainer.publish(0), trainers)}
    refit(generator, orders, number)
    for name, parameter in engine.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), ranks[0]["whole"][name].view(torch.uint8)), name


def test_a_module_without_dtensors_needs_no_mesh() -> None:
    """What FSDP ignores is whole on every rank; without anything cut, each rank is a replica."""
    source = FsdpSource(Tiny(), 3)
    assert source.shards().replica == 3
    assert {shard.tensor.name for shard in source.shards().shards} == {*dict(Tiny().named_parameters()), "bias_of_router", "embed.weight"} - {"head.weight"}

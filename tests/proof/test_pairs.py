"""The proof: whatever the layouts of trainer and engine, a refitted engine is, byte for byte, the engine that its own loader makes from the checkpoint.

Trainers are megatron.core models, engines vLLM's classes; needs come from their loaders, bytes travel through the whole path: catalog, plan, snapshot,
pull, digests, install.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_api.mounted import Engine, Trainer
from refit_api.wire import GroupRef, RankPhase
from refit_operator.catalog.local import TERMS, local_catalog
from refit_runtime.adapters.memory import Fault

from tests.proof.pairs import PAIRS, Case, NixlWorld, assert_same, logits
from tests.runtime.conftest import MIB, Orders, World
from tests.runtime.steps import publish_all, refit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron.*")


@pytest.fixture(scope="module", params=PAIRS.values(), ids=PAIRS.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def group(wire: type[World], case: Case, tmp_path: Path) -> Iterator[World]:
    with local_catalog(GroupRef("default", "demo"), replace(TERMS, redundancy=case.pair.redundancy)) as catalog, ExitStack() as stack:
        yield wire(catalog, tmp_path, stack, TERMS.lease_seconds, TERMS.publish_deadline_seconds)


WAYS = {"memory": (World, "Full"), "nixl": (NixlWorld, "Full"), "through a ring": (World, "Windowed")}


@pytest.mark.parametrize(("wire", "staging"), WAYS.values(), ids=WAYS)
def test_a_refitted_engine_is_the_one_that_its_loader_makes(case: Case, group: World, staging: Any) -> None:
    orders, pair = Orders(), case.pair
    options = Trainer(redundancy=pair.redundancy)
    trainers = [group.publisher(source, rank, pair.world.size, options=options) for rank, source in enumerate(case.sources)]
    ranks = [
        (group.rank(None, name, coordinate=one.coordinate, rank=number, world=len(engine), target=one.target, engine=Engine(staging=staging)), one)
        for name, engine in case.engines.items()
        for number, one in enumerate(engine)
    ]
    for _, one in ranks:
        spoil(one)
    if pair.dies is not None:
        group.faults[f"trainer-{pair.dies}"] = Fault(die_at=MIB)
    number = publish_all(trainers, 0)
    for rank, one in ranks:
        report = refit(rank, orders, number)
        assert report.phase is RankPhase.SERVING
        assert_same(one.module, one.reference)
        if one.config.parallel_config.tensor_parallel_size == 1:
            assert torch.equal(logits(one, one.module), logits(one, one.reference))
    if pair.dies is not None:
        assert 0 < group.faults[f"trainer-{pair.dies}"].moved <= MIB


def spoil(one: Any) -> None:
    """Nothing that a refit before this one wrote is there any more."""
    for need in one.target.needs().needs:
        one.target.view(need.parameter.name)[tuple(slice(lo, hi) for lo, hi in need.at)] = 7

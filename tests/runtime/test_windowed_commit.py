"""`staging: Windowed` under an agent: what a client is answered is of one whole version, whatever happens in the pause."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

from refit_api.mounted import Rollout
from refit_api.wire import Order, RankPhase
from refit_runtime.adapters.memory import Fault

from tests.runtime.failing import Client, Failing, Tripping
from tests.runtime.fleet import Fleet, phase, serving
from tests.runtime.steps import perturb
from tests.runtime.test_windowed import WINDOWED, Tall


class Pair:
    """Two ranks with an agent, and a client that compares every answer with the version that it names."""

    def __init__(self, world: Any) -> None:
        self.source, self.targets, self.memories = Tall(1), [Tall(2), Tall(3)], [Tripping(), Tripping()]
        world.faults["trainer-0"] = self.fault = Fault()
        self.trainer = world.trainer(self.source)
        ranks = [
            world.rank(
                target, rank=rank, world=2, coordinate=f"tp{rank}", engine=WINDOWED, rollout=Rollout(),
                wrap=lambda seams, rank=rank: replace(seams, memory=self.memories[rank]),
            )
            for rank, target in enumerate(self.targets)
        ]  # fmt: skip
        self.fleet = Fleet(world, ranks, Failing)
        self.client = Client(self.fleet.gate, self.targets)

    async def publish(self) -> int:
        perturb(self.source)
        number: int = (await asyncio.to_thread(self.trainer.publish, len(self.client.published))).number
        self.client.published[number] = Tall(0)
        self.client.published[number].load_state_dict(self.source.state_dict())
        return number


async def test_an_agent_commits_and_a_failed_window_is_fenced_until_a_whole_install(world: Any) -> None:
    pair = Pair(world)
    fleet = pair.fleet
    with pair.client.asking():
        async with fleet.running():
            first = await pair.publish()
            await fleet.order(first, Order.COMMIT)
            await fleet.until(serving(first))
            second = await pair.publish()
            await fleet.order(second, Order.STAGE)
            await fleet.until(phase(RankPhase.STAGED))
            pair.fault.die_at = 0  # before any window is there: the old version serves on
            fleet.driver.calls.clear()
            await fleet.order(second, Order.COMMIT, seconds=30.0)
            await fleet.until(lambda said: said is not None and said.error is not None, 90)
            await fleet.until(serving(first))
            moves = [call for call in fleet.driver.calls if call in ("stage", "pause")]
            assert moves[:2] == ["pause", "stage"]
            assert ("pause", "pause") not in pairwise(moves)  # it is asked for beside the requests first
            pair.fault.die_at = None

            def broken() -> None:
                raise RuntimeError("a copy")

            pair.memories[1].trips = [(0, lambda: None), (0, broken), (0, broken)]
            await fleet.order(second, Order.COMMIT)
            await fleet.until(lambda said: said is not None and said.fenced)
            pair.memories[1].trips = []
            await fleet.order(second, Order.COMMIT)
            said = await fleet.until(lambda said: serving(second)(said) and said is not None and not said.fenced)
            assert said.error is None
            with fleet.gate.request(10) as version:
                assert version == second
    assert pair.client.answered == {first, second}
    assert fleet.ended == []

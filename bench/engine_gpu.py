"""What a refit costs a real vLLM that serves: `python -m bench engine_gpu`. Prints a table and writes bench/results/engine_gpu.json.

Llama-3.1-8B's shape in bf16, 16.06 GB, on one device that trainer and engine share: the pull is a copy within the device, so nothing is said about wires.
vLLM runs as it does by default, with CUDA graphs and torch.compile, and decodes 64 requests without a break. A framework drives it through vLLM's
weight-transfer API: a version is staged beside the requests, then the scheduler pauses, the version is installed, the scheduler goes on.

After each of twenty versions every live parameter is compared with the trainer's, and every token of new prompts with the choices of the trained module.
`python -m bench.engine_gpu` tries the same with a tiny model on whatever is here, and records nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.figures import Metric, metric, record
from bench.publisher import GENERATOR, Publisher, publisher
from tests import pods

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPTS = [[first, *range(10, 25)] for first in range(1, 5)]
ANSWER_TOKENS = 16
BEFORE, AFTER = 0.05, 0.25  # seconds around a commit that count as around it
QUIET = 0.5
STAGE_SECONDS, LOOK_SECONDS = 120.0, 0.02


@dataclass(frozen=True, slots=True)
class Size:
    """How large a trial is; `engine`: arguments of vLLM."""

    name: str
    model: dict[str, Any]
    requests: int
    tokens: int
    commits: int
    engine: dict[str, Any]


EIGHT = Size(
    "8B", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 128256, "max_position_embeddings": 8192}, requests=64, tokens=3500, commits=20,
    engine={"max_model_len": 4096, "gpu_memory_utilization": 0.6, "attention_backend": "TRITON_ATTN"},
)  # fmt: skip
TINY = Size(
    "tiny", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
             "max_position_embeddings": 512}, requests=8, tokens=400, commits=3, engine={"max_model_len": 512, "max_num_seqs": 16},
)  # fmt: skip


class Traffic:
    """Requests that decode all the time; the gaps between the tokens of each, by when they began and ended."""

    def __init__(self, engine: Any, size: Size) -> None:
        self._engine, self._size = engine, size
        self._starts, self._ends = array("d"), array("d")
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._requests(place)) for place in range(self._size.requests)]

    async def _requests(self, place: int) -> None:
        """One after the other; the first ones end at different times."""
        tokens, number = random.Random(place).randrange(self._size.tokens // 2, self._size.tokens), 0
        while not self._stopping:
            last = 0.0
            prompt = {"prompt_token_ids": [1, 2, 3, place + 4]}
            async with aclosing(self._engine.generate(prompt, greedy(tokens), f"traffic-{place}-{number}")) as outputs:
                async for _ in outputs:
                    now = time.perf_counter()
                    if last:
                        self._starts.append(last)
                        self._ends.append(now)
                    last = now
                    if self._stopping:
                        break
            tokens, number = self._size.tokens, number + 1

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds, of gaps that lie in that time at least in part."""
        starts, ends = np.array(self._starts), np.array(self._ends)
        there = (ends > begin) & (starts < end)
        return [float(gap) for gap in 1e3 * (ends[there] - starts[there])]

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second."""
        ends = np.array(self._ends)
        return int(((begin < ends) & (ends <= end)).sum()) / (end - begin)


def greedy(tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@dataclass(slots=True)
class Series:
    """Of all commits, in milliseconds unless named otherwise."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **more: float) -> None:
        for name, value in more.items():
            self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return median(self.values[name])

    def most(self, name: str) -> float:
        return max(self.values[name])


class Driver:
    """The framework: it publishes on the trainer and drives the engine."""

    def __init__(self, engine: Any, source: Publisher) -> None:
        self._engine, self._source = engine, source
        self._asked = 0
        self.taken: dict[str, float] = {}

    async def call(self, method: str, *arguments: object) -> Any:
        return (await self._engine.collective_rpc(method, args=arguments))[0]

    async def publish(self, seed: int) -> dict[str, Any]:
        answer: dict[str, Any] = await asyncio.to_thread(self._source.ask, "publish", seed)
        return answer

    async def rest(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What the rank says, once a stage or a check ended as it should."""
        deadline = time.monotonic() + STAGE_SECONDS
        while True:
            said: dict[str, Any] = await self.call("probe_rank")
            self._source.require()
            assert time.monotonic() < deadline, f"the rank does not come to rest: {said}"
            if said["resting"]:
                assert true(said), said
                return said
            await asyncio.sleep(LOOK_SECONDS)

    async def stage(self, number: int) -> dict[str, Any]:
        await self.call("refit_stage", number)
        return await self.rest(lambda said: bool(said["phase"] == "Staged"))

    async def commit(self, number: int) -> tuple[float, float]:
        """When the pause began and when the scheduler ran again."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.start_weight_update()
        begin = time.perf_counter()
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info={"version": number}))
        updated = time.perf_counter()
        await self._engine.finish_weight_update()
        await self._engine.resume_generation()
        end = time.perf_counter()
        self.taken = {"pause": 1e3 * (paused - begin), "update": 1e3 * (updated - paused), "stall": 1e3 * (end - begin)}
        return begin, end

    async def tokens(self) -> list[list[int]]:
        self._asked += 1
        return list(await asyncio.gather(*(self._answer(prompt, f"ask-{self._asked}-{at}") for at, prompt in enumerate(PROMPTS))))

    async def _answer(self, prompt: list[int], name: str) -> list[int]:
        answer: list[int] = []
        async for output in self._engine.generate({"prompt_token_ids": prompt}, greedy(ANSWER_TOKENS), name):
            answer += output.outputs[0].token_ids
        return answer

    async def right(self, answers: list[list[int]]) -> bool:
        chosen: bool = await asyncio.to_thread(self._source.ask, "chosen", PROMPTS, answers)
        return chosen


async def one_version(driver: Driver, traffic: Traffic, seed: int, series: Series) -> None:
    """One version, from its publish to the proof that it is what serves."""
    published = await driver.publish(seed)
    began = time.perf_counter()
    staged = await driver.stage(published["number"])
    ended = time.perf_counter()
    await asyncio.sleep(QUIET)
    begin, end = await driver.commit(published["number"])
    await asyncio.sleep(AFTER)
    rested = await driver.rest(lambda said: bool(said["serving"] == published["number"] and not said["error"]))
    live = await driver.call("probe_live")
    answers = await driver.tokens()
    quiet = traffic.gaps(ended + 0.05, begin - BEFORE)
    series.add(
        publish=published["milliseconds"], staged=1e3 * (ended - began), pull=staged["milliseconds"].get("pull", 0.0), **driver.taken,
        install=rested["milliseconds"]["install"], gap=max(traffic.gaps(begin - BEFORE, end + AFTER)), quiet=median(quiet), quiet_most=max(quiet),
        rate=traffic.rate(ended, begin), rate_staging=traffic.rate(began, ended),
        live=live == published["live"], right=await driver.right(answers),
    )  # fmt: skip
    print(f"version {published['number']}: { ({name: round(values[-1], 2) for name, values in series.values.items()}) }", flush=True)


async def alone(driver: Driver, seed: int, series: Series) -> tuple[dict[str, Any], list[list[int]]]:
    """One version without traffic: what the rank says afterwards, and what the engine answers."""
    published = await driver.publish(seed)
    await driver.stage(published["number"])
    before = await driver.call("probe_memory")
    await driver.commit(published["number"])
    after = await driver.call("probe_memory")
    said = await driver.rest(lambda said: bool(said["serving"] == published["number"] and not said["error"]))
    answers = await driver.tokens()
    series.add(taken_bytes=after - before, live=await driver.call("probe_live") == published["live"], right=await driver.right(answers))
    return said, answers


async def back_and_forth(driver: Driver, series: Series) -> None:
    """A version that comes back gives its tokens again."""
    first, second, third = [(await alone(driver, seed, series))[1] for seed in (1001, 1002, 1001)]
    series.add(again=first == third, other=first != second)


def metrics_of(size: Size, series: Series, started: float) -> list[Metric]:
    name, commits = f"{size.name}, {size.requests} requests", size.commits + 4
    eight = size is EIGHT  # targets are this shape's
    values = series.values
    return [
        metric("versions committed", commits, least=commits),
        metric("commits after which all live parameters are the trainer's", sum(values["live"]), least=commits),
        metric("commits after which all tokens are the trained module's choices", sum(values["right"]), least=commits),
        metric("a version that comes back gives its tokens again, another gives others", sum(values["again"]) + sum(values["other"]), least=2),
        metric("device memory taken in a pause, most of the last three", max(values["taken_bytes"][1:]), "B", most=0),
        metric(f"{name}: between tokens, without a commit", series.median("quiet"), "ms"),
        metric(f"{name}: largest token gap without a commit, median of {size.commits}", series.median("quiet_most"), "ms"),
        metric(f"{name}: largest token gap around a commit, median", series.median("gap"), "ms", **({"most": 22} if eight else {})),
        metric(f"{name}: largest token gap around a commit, most", series.most("gap"), "ms"),
        metric(f"{name}: stall, from pause to resume, median", series.median("stall"), "ms"),
        metric(f"{name}: stall, most", series.most("stall"), "ms"),
        metric(f"{name}: until paused, median", series.median("pause"), "ms"),
        metric(f"{name}: update call in the pause, median", series.median("update"), "ms"),
        metric(f"{name}: install, median", series.median("install"), "ms", **({"most": 10} if eight else {})),
        metric(f"{name}: install, most", series.most("install"), "ms"),
        metric(f"{name}: live parameters read back and verified, alone on the device", series.most("check"), "ms"),
        metric(f"{name}: staged beside the requests, median", series.median("staged"), "ms"),
        metric(f"{name}: pull and verification of it, median", series.median("pull"), "ms"),
        metric(f"{name}: tokens a second, median", series.median("rate"), "1/s"),
        metric(f"{name}: tokens a second while a version is staged, median", series.median("rate_staging"), "1/s"),
        metric(f"{name}: publish on the trainer, median", series.median("publish"), "ms"),
        metric("engine start", started, "s"),
    ]


async def measure(size: Size, model: Path, source: Publisher) -> list[Metric]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enable_prefix_caching=False,
            worker_extension_cls="bench.probe.Probe", **size.engine,
        )
    )  # fmt: skip
    started = time.perf_counter() - began
    print(f"the engine is up after {started:.1f} s", flush=True)
    driver, traffic, series = Driver(engine, source), Traffic(engine, size), Series()
    try:
        said, _ = await alone(driver, 1000, series)  # the first install of a process is checked in the pause, the others beside the requests
        series.add(check=said["milliseconds"]["check"])
        traffic.start()
        await asyncio.sleep(3)
        for seed in range(size.commits):
            await one_version(driver, traffic, seed, series)
        await traffic.stop()
        await back_and_forth(driver, series)
    finally:
        engine.shutdown()
    return metrics_of(size, series, started)


def run(size: Size) -> list[Metric]:
    """The engine's processes find the group's settings as those of a pod would."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**LLAMA, **size.model}))
        with publisher(folder, model) as source:
            os.environ.update(pods.environment(source.generator, folder, GENERATOR) | {"HF_HUB_OFFLINE": "1"})
            return asyncio.run(measure(size, model, source))


def main() -> None:
    metrics = run(EIGHT)
    record("engine_gpu", metrics, torch.cuda.get_device_name(0), ("torch", "triton", "vllm", "nixl", "transformers"), cuda=str(torch.version.cuda))


if __name__ == "__main__":
    for each in run(TINY):
        print(f"{each.name}: {each.value:g} {each.unit}")

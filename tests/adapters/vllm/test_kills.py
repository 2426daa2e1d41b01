"""What a real `vllm serve` does when one of its processes fails, is killed or stands still at a step of a commit (docs/runbook.md).

Whatever happens, an answer's tokens are those of the version that it names. Where the engine cannot go on, every process of the server ends, for the
kubelet to start it again; but an API server that is killed leaves the engine to the end of its container.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from refit_api.mounted import Engine
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog

from e2e.reference import reference
from e2e.workloads.tiny_llama import TinyLlama
from tests.adapters.vllm.served import START_SECONDS, Server, mounted, serving
from tests.adapters.vllm.steps import AGENT_STEPS, COPIES, FAIL, Steps
from tests.adapters.vllm.story import Said, Training, keep_checkpoint, said, training
from tests.adapters.vllm.traffic import Traffic, mislabelled, untrue

TIMEOUT_SECONDS = 10.0
END_SECONDS = 6 * TIMEOUT_SECONDS + 60.0  # a pause and the resume after it, the fence, then vLLM's own end
LEFT_SECONDS = 60.0
STILL_SECONDS = 1.5 * TIMEOUT_SECONDS
AGENT, CORE, WORKER = "agent", "VLLM::EngineCore", "VLLM::Worker"

ENDS = [
    *((victim, signal.SIGKILL, step) for victim in (AGENT, CORE, WORKER) for step in ("prepare", "pause", COPIES, "label", "resume")),
    *((CORE, signal.SIGSTOP, step) for step in ("pause", "install", "label", "resume")),
    *((WORKER, signal.SIGSTOP, step) for step in ("pause", COPIES)),
]
GOES_ON = [
    *((AGENT, signal.SIGSTOP, step) for step in AGENT_STEPS),
    *((victim, signal.SIGSTOP, "prepare") for victim in (CORE, WORKER)),
    *((WORKER, signal.SIGSTOP, step) for step in ("label", "resume")),
]

pytestmark = [pytest.mark.engine, pytest.mark.soak]


@dataclass(frozen=True, slots=True)
class Trial:
    server: Server
    trainer: Training
    steps: Steps

    def process(self, name: str) -> psutil.Process:
        own = psutil.Process(self.server.process.pid)
        return own if name == AGENT else next(child for child in own.children(recursive=True) if " ".join(child.cmdline()).startswith(name))


@contextmanager
def trial(catalog: LocalCatalog, folder: Path) -> Iterator[Trial]:
    """Version 1 is served."""
    TinyLlama().write_config(folder / "model")
    given = mounted(catalog, folder, "generator-0", Role.GENERATOR, Engine(pause_timeout_seconds=TIMEOUT_SECONDS))
    with serving(folder / "model", folder, given, "generator-0") as server, training(catalog, folder) as trainer:
        server.until("the server answers", lambda: server.version() is not None, START_SECONDS)
        trainer.refit(server)
        yield Trial(server, trainer, Steps(folder))


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("truth")
    with reference(folder) as engine:
        versions = range(1, 2 + len(AGENT_STEPS) + len(GOES_ON))
        return said(engine, {str(number): keep_checkpoint(folder, number) for number in versions})


def check(traffic: Traffic, truth: Said) -> None:
    """Of every answer that there is, also of those that ended early."""
    answers = [answer for answer in traffic.answers if answer.status == 200 and answer.tokens and answer.spans]
    assert mislabelled(answers) == []
    assert untrue(answers, truth) == []


def still_there(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """After a while. Where nobody reaps orphans, they stay as zombies."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("victim", "kill", "step"), ENDS, ids=[f"{victim}-{kill.name}-{step}" for victim, kill, step in ENDS])
def test_the_server_ends(victim: str, kill: signal.Signals, step: str, truth: Said, catalog_server: LocalCatalog, tmp_path: Path) -> None:
    with trial(catalog_server, tmp_path) as tried, Traffic(tried.server) as traffic:
        tried.trainer.stand(tried.server, tried.steps, step)
        processes = psutil.Process(tried.server.process.pid).children(recursive=True)
        tried.process(victim).send_signal(kill)
        tried.steps.go_on()
        try:
            ended = tried.server.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it goes on: {tried.server.log.read_text()[-6000:]}")
        left = still_there(processes) if victim != AGENT else []  # the first process of a container: the kernel ends the others with it
    assert ended != 0
    assert left == []
    check(traffic, truth)


def test_the_server_goes_on_with_whole_versions(truth: Said, catalog_server: LocalCatalog, tmp_path: Path) -> None:
    """One server: the agent fails at each step and another one takes up; then processes stand still for a while."""
    with trial(catalog_server, tmp_path) as tried, Traffic(tried.server) as traffic:
        for step in AGENT_STEPS:
            number = tried.trainer.stand(tried.server, tried.steps, step)
            tried.steps.go_on(FAIL)
            served(tried, number, step)
        for victim, kill, step in GOES_ON:
            number = tried.trainer.stand(tried.server, tried.steps, step)
            process = tried.process(victim)
            process.send_signal(kill)
            tried.steps.go_on()
            time.sleep(STILL_SECONDS)
            process.send_signal(signal.SIGCONT)
            served(tried, number, f"{step}, {victim}")
    assert [answer for answer in traffic.answers if not answer.whole] == []
    check(traffic, truth)


def served(tried: Trial, number: int, step: str) -> None:
    tried.server.until(f"version {number} is served after {step}", lambda: tried.server.version() == number, 3 * END_SECONDS)

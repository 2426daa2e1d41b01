"""The programs of docs/how-to/rl-loop.md, as they stand there: four processes, NIXL between them, and a reward that rises."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from refit_api.mounted import Engine, Rollout, Trainer
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog, local_catalog

from e2e.cluster.apiserver import free_ports
from tests.conftest import ROOT
from tests.pods import environment, mounted

STEPS = 40
PROGRAMS = dict(re.findall(r"^`(\w+\.py)`.*?```python\n(.*?)```", (ROOT / "docs" / "how-to" / "rl-loop.md").read_text(), re.DOTALL | re.MULTILINE))

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program of the page as a pod would, with a token and settings of its own."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    with local_catalog() as catalog, ExitStack() as stack:
        yield lambda *made: stack.enter_context(program(catalog, tmp_path, *made))


@contextmanager
def program(catalog: LocalCatalog, folder: Path, name: str, role: Role, worker_port: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    driven = {"trainer": Trainer(redundancy=1), "engine": Engine(kind="Custom"), "rollout": Rollout(policy="Manual")}
    given = mounted(catalog, folder, name, role, worker_port=worker_port, **driven)
    variables = {**environment(given, folder, name), "REFIT_RUN_ID": "run-1", "OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, f"{name}.py", *map(str, arguments)]
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def listening(port: int) -> None:
    for _ in range(2400):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 5):
            return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on port {port}")


def test_the_reward_rises(start: Start) -> None:
    assert list(PROGRAMS) == ["policy.py", "generator.py", "trainer.py", "loop.py"]
    assert all(len(text.splitlines()) < 100 for text in PROGRAMS.values())
    trainer, generator, *workers = free_ports(5)
    start("generator", Role.GENERATOR, workers[0], generator)
    start("trainer", Role.TRAINER, workers[1], trainer)
    for port in (trainer, generator):
        listening(port)
    loop = start("loop", Role.TRAINER, workers[2], trainer, generator, STEPS)
    said, _ = loop.communicate(timeout=180)
    assert loop.returncode == 0
    rewards = [float(line.split()[-1]) for line in said.splitlines()]
    assert len(rewards) == STEPS
    assert rewards[0] < 0.3, rewards
    assert min(rewards[-5:]) > 0.5, rewards

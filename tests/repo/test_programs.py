"""The programs of the examples say in one line what their environment lacks; a traceback would hide it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "environment", "said"),
    [
        ("e2e.workloads.trainer", {}, ["RANK", "WORLD_SIZE", "torchrun"]),
        ("e2e.workloads.module_trainer", {"TRAINER_VERSIONS": "some"}, ["TRAINER_VERSIONS", "integer"]),
        ("bench", {}, ["python -m bench NAME"]),
    ],
    ids=["a trainer outside torchrun", "a wrong setting", "usage of the benches"],
)
def test_one_line(module: str, environment: dict[str, str], said: list[str]) -> None:
    words = [sys.executable, "-m", module, *(["--help"] if module == "bench" else [])]
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(words, cwd=ROOT, env={**outside, **environment}, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert [part for part in said if part not in done.stdout + done.stderr] == []
    assert done.returncode == (0 if module == "bench" else 1)

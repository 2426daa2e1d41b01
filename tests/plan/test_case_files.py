"""Every case file of this folder gives exactly what it expects, on the wire, in the parameters and in the ranks' memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from refit_runtime.plan.cases.answer import plan_case, run_case

from tests.plan.answers import answer

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))
CODES = {"ok": 0, "invalid": 2, "refused": 3}


def _expected(path: Path) -> dict[str, Any]:
    expect: dict[str, Any] = yaml.load(path.read_bytes(), yaml.CSafeLoader)["expect"]
    assert set(expect) <= {"verdict", "error", "bytes", "sources", "params", "hex", "memory"}
    return expect


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_case(path: Path) -> None:
    expect = _expected(path)
    code, found = answer(path.read_bytes())
    assert (found["verdict"], code) == (expect["verdict"], CODES[expect["verdict"]]), found.get("error")
    for name, value in expect.get("error", {}).items():
        assert found["error"][name] == value
    for id_, nbytes in expect.get("bytes", {}).items():
        assert found["coordinates"][id_]["bytes"] == nbytes
        assert sum(run["bytes"] for run in found["coordinates"][id_]["runs"]) == nbytes
    for id_, sources in expect.get("sources", {}).items():
        served: Counter[int] = Counter()
        for run in found["coordinates"][id_]["runs"]:
            served[run["source"]] += run["bytes"]
        assert served == sources
    for id_, params in expect.get("params", {}).items():
        assert found["params"][id_] == found["params"][id_] | params
    for rank, digest in expect.get("memory", {}).items():
        assert found["memory"][str(rank)] == digest
    if "hex" in expect:
        moved = run_case(plan_case(path.read_bytes()), 1 << 34).params
        assert {id_: {name: moved[id_][name].tobytes() for name in params} for id_, params in expect["hex"].items()} == {
            id_: {name: bytes.fromhex(content) for name, content in params.items()} for id_, params in expect["hex"].items()
        }


def test_the_same_file_gives_the_same_answer() -> None:
    content = (CASES[0].parent / "m11-llama-dp2-tp2-to-tp1.yaml").read_bytes()
    assert answer(content) == answer(content)

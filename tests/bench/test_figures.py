"""Result files can be read by whoever compares them: one format, whatever bench wrote them, and a ratio never without its terms."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.__main__ import BENCHES
from bench.figures import FOLDER, Result, metric

FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_committed_figures_follow_the_format(file: Path) -> None:
    result = Result.model_validate_json(file.read_text())
    assert result.bench == file.stem
    assert result.bench in BENCHES
    assert result.command.startswith("python -m bench")
    assert "refit" in result.software
    assert result.metrics


@pytest.mark.parametrize(
    ("value", "target", "met", "text"),
    [
        (3, {"most": 3}, True, "<= 3"),
        (4, {"most": 3}, False, "<= 3"),
        (86, {"least": 85}, True, ">= 85"),
        (84, {"least": 85}, False, ">= 85"),
        (1, {}, None, ""),
    ],
    ids=["at the limit", "above", "enough", "too little", "no target"],
)
def test_a_target_goes_one_way(value: float, target: dict[str, float], met: bool | None, text: str) -> None:
    made = metric("rate", value, "%", **target)
    assert (made.met, made.target_text) == (met, text)


@pytest.mark.parametrize("change", [{"target": 1.0}, {"met": True}, {"note": "fast"}, {"name": ""}], ids=["not judged", "no target", "unknown key", "no name"])
def test_a_metric_that_says_half_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        type(metric("rate", 1)).model_validate({"name": "rate", "value": 1, "unit": "", **change})

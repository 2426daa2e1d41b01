"""Cases nobody thought of: the product and an oracle of nested loops give the same verdict, the same type of error, the same boxes and the same bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.examples import SOAK
from tests.plan.answers import answer, written
from tests.plan.random_cases import random_case
from tests.plan.slow_oracle import judge

SEEDS, SOAK_SEEDS, PART = 240, 2400, 20
FIRST = [pytest.param(first, marks=pytest.mark.soak if first >= SEEDS else ()) for first in range(0, SOAK_SEEDS if SOAK else SEEDS, PART)]


def _comparable(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What the product says, in the oracle's words."""
    if found["verdict"] == "refused":
        error = found["error"]
        return {"verdict": "refused", "type": error["type"]} | {name: error[name] for name in ("missing", "doubled") if name in error}
    facts = {name: found[name] for name in ("verdict", "params", "memory")}
    return facts | {"bytes": {id_: entry["bytes"] for id_, entry in found["coordinates"].items()}}


@pytest.mark.parametrize("first", FIRST)
def test_product_and_oracle_agree(first: int) -> None:
    for seed in range(first, first + PART):
        case = random_case(seed)
        expected = judge(case)
        code, found = answer(written(case))
        if expected["verdict"] == "ok":
            expected["params"] = {entry["id"]: expected["params"].get(entry["id"], {}) for entry in case["generator"]["coordinates"]}
            for entry in found["coordinates"].values():
                assert sum(run["bytes"] for run in entry["runs"]) == entry["bytes"], f"seed {seed}"
        assert _comparable(expected, found) == expected, f"seed {seed}"
        assert code == {"ok": 0, "refused": 3}[expected["verdict"]], f"seed {seed}"


def test_every_type_of_refusal_occurs() -> None:
    """Else the comparison above would prove less than it says."""
    types = {judge(random_case(seed)).get("type", "ok") for seed in range(160)}
    assert types == {"ok", "UnsupportedLayout", "UnknownTensor", "DtypeMismatch", "ShapeMismatch", "OverlappingPlan", "IncompletePlan"}

"""Runs cases through the product, in memory."""

from __future__ import annotations

from typing import Any

import yaml
from refit_runtime.plan.cases.answer import as_json, plan_case, run_case


def answer(content: bytes) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `refit plan --json --run`."""
    planned = plan_case(content)
    return as_json(planned, run_case(planned, 1 << 34) if planned.plan is not None else None)


def written(case: dict[str, Any]) -> bytes:
    return yaml.dump(case, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False).encode()

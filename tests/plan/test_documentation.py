"""The examples of the reference page run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from refit_runtime.plan.cases.file import ROLES

from tests.plan.answers import answer

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "case-files.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["ranks", "roles", "options"])
def test_example(example: str) -> None:
    code, found = answer(example.encode())
    assert (code, found["verdict"]) == (0, "ok"), found.get("error")


def test_every_role_is_on_the_page() -> None:
    assert [role for role in ROLES if f"`{role}`" not in PAGE] == []

"""What a generator says about itself over HTTP, as plain JSON values; keys as in the kinds."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from pydantic.alias_generators import to_camel

from refit_runtime.agent import View


def document(view: View) -> dict[str, Any]:
    """`version` 0: nothing is served. Nothing in it is secret."""
    return {"version": view.version, "fenced": view.fenced, "target": view.target, "ranks": [plain(rank) for rank in view.ranks]}


def plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return {to_camel(field.name): plain(getattr(value, field.name)) for field in fields(value)}
    return value

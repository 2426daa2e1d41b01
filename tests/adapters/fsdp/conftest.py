"""Trainers and an engine of one process, over the memory transport."""

from __future__ import annotations

from tests.runtime.conftest import orders, terms, world

__all__ = ["orders", "terms", "world"]

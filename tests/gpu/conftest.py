"""The group in one process of tests/runtime, with weights on the device: its memory follows them. `python -m pytest -m gpu` runs all that needs a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.runtime.conftest import Net, orders, terms, world

__all__ = ["net", "orders", "terms", "world"]


@pytest.fixture
def net() -> Callable[[int], torch.nn.Module]:
    return lambda seed: Net(seed).cuda()

"""An engine whose weights do not come as others' do is refused by name, before it serves anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from refit_api.errors import EngineMismatch


def test_an_engine_that_does_not_load_dummy_weights_is_refused_with_what_to_use() -> None:
    from refit_runtime.adapters.vllm.worker import RefitWorker

    worker: Any = object.__new__(RefitWorker)
    worker.model_config, worker.load_config = SimpleNamespace(model="example/m"), SimpleNamespace(load_format="tensorizer")
    inner = RefitWorker.__mro__[2]  # vLLM's own
    with (
        mock.patch.object(inner, "load_model"),
        mock.patch.object(inner, "get_model", return_value=torch.nn.Linear(1, 1)),
        pytest.raises(EngineMismatch, match=r"example/m: load format tensorizer .* use --load-format dummy") as refused,
    ):
        worker.load_model()
    assert (refused.value.facts["seen"], refused.value.facts["expected"]) == ("tensorizer", "dummy")

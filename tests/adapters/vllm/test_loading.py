"""What the engine does to a model after loading is seen, and refused where copies would not reach what it computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from refit_api.errors import EngineMismatch, InstallError
from refit_runtime.adapters.vllm.loading import keep_plain_linears, observed
from refit_runtime.adapters.vllm.recorder import live_tensors
from refit_runtime.adapters.vllm.remade import Filled, tensors

from tests.adapters.vllm.models import Rank, built, directory, engine_config, faked

ALONE = Rank(0, 1)


def loaded(tmp_path: Path, family: str) -> Any:
    """As the engine's loader does it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import base_loader

    config = engine_config(directory(tmp_path, family), ALONE)
    model = built(config, ALONE, "cpu")
    for tensor in live_tensors(model).values():
        tensor.normal_(generator=torch.Generator().manual_seed(1))
    with faked(ALONE), set_current_vllm_config(config), observed() as models:
        watched = base_loader.process_weights_after_loading
        watched(model, config.model_config, torch.device("cpu"))
    assert base_loader.process_weights_after_loading is not watched
    return models[0]


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)


def test_a_dense_model_with_plain_linears_stays_as_it_was_loaded(linears: None, tmp_path: Path) -> None:
    keep_plain_linears()
    model = loaded(tmp_path, "llama")
    model.require()
    for name, tensor in live_tensors(model.module).items():
        assert tensor.data_ptr() == model.tensors[name].data_ptr()


def drops(layer: torch.nn.Module, remove_weight: bool) -> None:
    """vLLM's CPU build where the processor has such kernels."""
    packed = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    if remove_weight:
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def shuffles(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Same place, same shape, rows in another order."""
    layer.weight.data.copy_(layer.weight.data.flip(0).clone())


@pytest.mark.parametrize("repack", [drops, shuffles])
def test_modules_that_repack_their_weights_are_named(linears: None, repack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the remedy every copy would go nowhere, or to the wrong rows."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", repack)
    with pytest.raises(EngineMismatch, match="qkv_proj"):
        loaded(tmp_path, "llama").require()


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("deepseek v3 (mla, shared expert)", {"MLAAttention", "RoutedExperts"}), ("mixtral", {"RoutedExperts"})],
    ids=["latent attention multiplies its projections out", "experts are packed"],
)
def test_what_the_engine_rearranges_is_made_again(linears: None, family: str, kinds: set[str], tmp_path: Path) -> None:
    """From the memory that loaders fill, which survives; addresses stay. That it equals a fresh engine is in tests/proof."""
    keep_plain_linears()
    model = loaded(tmp_path, family)
    model.require()
    assert {type(one.module).__name__ for one in model.remade} == kinds
    for one in model.remade:
        before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in tensors(one.module).items()}
        filled = {name: spare.tensor.clone() for name, spare in one.spare.items()}
        with faked(ALONE):
            one.make()
        assert all(tensor.data_ptr() == before[name][0] for name, tensor in tensors(one.module).items())
        assert all(torch.equal(tensor, before[name][1]) for name, tensor in tensors(one.module).items()), "from the same weights the same is made"
        assert all(torch.equal(spare.tensor, filled[name]) for name, spare in one.spare.items())


def test_processing_that_fails_or_makes_something_else_is_an_install_error(linears: None, tmp_path: Path) -> None:
    """The rank is fenced then, not half made."""
    keep_plain_linears()
    experts = loaded(tmp_path, "mixtral").remade[0]
    name, spare = next(iter(experts.spare.items()))
    experts.spare[name] = Filled(spare.tensor[:2], spare.kind, spare.facts)
    with faked(ALONE), pytest.raises(InstallError, match="experts"):
        experts.make()

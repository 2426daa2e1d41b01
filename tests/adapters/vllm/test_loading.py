"""What the engine does to a model after loading is seen, and refused where copies would not reach what it computes with."""

from __future__ import annotations

from collections.abc import Callable
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


def loaded(tmp_path: Path, family: str, prepare: Callable[[Any], Any] = lambda model: None) -> Any:
    """As the engine's loader does it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import base_loader

    config = engine_config(directory(tmp_path, family), ALONE)
    with faked(ALONE), set_current_vllm_config(config), observed() as models:
        model = built(config, ALONE, "cpu")
        for tensor in live_tensors(model).values():
            tensor.normal_(generator=torch.Generator().manual_seed(1))
        prepare(model)
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


def closes_over(layer: torch.nn.Module, remove_weight: bool) -> None:
    """The weight stays as it was loaded, and is not what the module computes with."""
    turned = layer.weight.t().contiguous()
    layer.cpu_linear = lambda x, weight, bias: x @ turned


TABLE: dict[str, torch.Tensor] = {}


def notes_in_a_table(layer: torch.nn.Module, remove_weight: bool) -> None:
    TABLE[layer.prefix if hasattr(layer, "prefix") else "words"] = layer.weight * 2


def notes_a_number(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.largest = float(layer.weight.max())


DONE: set[str] = set()


def shuffles_once(layer: torch.nn.Module, remove_weight: bool) -> None:
    """What says that it was done lies where nobody finds it."""
    name = f"{type(layer).__name__} {getattr(layer, 'prefix', '')}"
    if name not in DONE:
        DONE.add(name)
        shuffles(layer, remove_weight)


def adds_noise(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.weight.data.add_(torch.rand_like(layer.weight))


def depends_on_the_weights_before(layer: torch.nn.Module, remove_weight: bool) -> None:
    """A scale that is kept from the first time on, in an object of its own."""
    kept = vars(layer.quant_method).setdefault("scale_tensor", [])
    if not kept:
        kept.append(layer.weight.float().mean())
    layer.weight.data.mul_(kept[0].to(layer.weight.dtype))


def shuffles(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Same place, same shape, rows in another order."""
    layer.weight.data.copy_(layer.weight.data.flip(0).clone())


@pytest.mark.parametrize(
    ("repack", "reason"),
    [
        (drops, "1 tensors made of its weights are kept outside of it"),
        (closes_over, "1 tensors made of its weights are kept outside of it"),
        (notes_in_a_table, "1 tensors made of its weights are kept outside of it"),
        (notes_a_number, "it keeps numbers that follow from its weights .QKVParallelLinear.largest"),
        (shuffles_once, "processing the same weights again comes to something else .weight"),
        (adds_noise, "processing the same weights again comes to something else .weight"),
        (depends_on_the_weights_before, "1 tensors made of its weights are kept outside of it"),
    ],
)
def test_modules_that_copies_would_not_reach_are_named(linears: None, repack: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the remedy every copy would go nowhere, or what follows from weights would stay that of the version before."""
    from vllm.model_executor.layers import utils

    TABLE.clear()
    DONE.clear()
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", repack)
    with pytest.raises(EngineMismatch, match=rf"qkv_proj: .*{reason}"):
        loaded(tmp_path, "llama").require()


def turns_aside(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Packed beside the weight, which goes."""
    layer.packed = torch.nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
    layer.weight = torch.nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)


@pytest.mark.parametrize(("repack", "packed"), [(shuffles, lambda x: x.flip(0)), (turns_aside, lambda x: x.t())], ids=["in place", "beside"])
def test_what_is_done_again_alike_is_made_again(linears: None, repack: Any, packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kind of module it is; the engine is left as its own processing left it."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", repack)
    model = loaded(tmp_path, "llama")
    model.require()
    again = {one.name: one for one in model.remade}
    assert len(again) == 10, "four linear layers in each of two, words in, words out"
    assert not any("process_weights_after_loading" in vars(module.quant_method) for module in model.module.modules() if hasattr(module, "quant_method"))
    one = again["model.layers.1.self_attn.qkv_proj"]
    live = one.module.packed if hasattr(one.module, "packed") else one.module.weight
    where, spare = live.data_ptr(), model.tensors[f"{one.name}.weight"]
    assert torch.equal(live, packed(spare)), "as it was loaded, though other weights were tried"
    spare.normal_()
    with faked(ALONE):
        one.make()
    assert torch.equal(live, packed(spare))
    assert live.data_ptr() == where


def test_what_another_module_rearranges_is_named(linears: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would do it again."""
    from vllm.model_executor.layers.attention import Attention

    keep_plain_linears()
    monkeypatch.setattr(Attention, "process_weights_after_loading", lambda attention, _: attention.stranger.weight.data.mul_(0.5))
    with pytest.raises(EngineMismatch, match=r"model\.norm: something else than its own processing rearranges it"):
        loaded(
            tmp_path, "llama", prepare=lambda model: [vars(layer.self_attn.attn).update(stranger=model.model.norm) for layer in model.model.layers]
        ).require()


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

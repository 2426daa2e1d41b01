"""Engines with block FP8 weights: weights and scales of an FP8 trainer arrive in place, bf16 weights are quantised by an engine that quantises what it
loads, and refused by one that does not.

vLLM has no FP8 kernel for this processor, so the kernel is left out: parameters, loaders and processing around it are vLLM's own, a forward pass is not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from refit_api.errors import PlanError
from refit_api.mounted import Trainer
from refit_api.wire import GroupRef
from refit_operator.catalog.local import TERMS, local_catalog
from refit_runtime.adapters.vllm.checkpoint import checkpoint_tensors
from refit_runtime.adapters.vllm.loading import keep_plain_linears, observed
from refit_runtime.adapters.vllm.target import VllmTarget
from safetensors.torch import save_file

from tests.adapters.vllm import models
from tests.adapters.vllm.test_recorder import checkpoint
from tests.proof.pairs import NixlWorld, assert_same
from tests.runtime.conftest import Orders, World
from tests.runtime.steps import refit


def tree(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters have these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def processed(module: torch.nn.Module, config: object, rank: models.Rank) -> torch.nn.Module:
    from vllm.model_executor.model_loader import base_loader

    with models.loading(config, rank):
        base_loader.process_weights_after_loading(module, config.model_config, torch.device("cpu"))
    return module


@pytest.fixture(params=[World, NixlWorld], ids=["memory", "nixl"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with local_catalog(GroupRef("default", "demo"), TERMS) as catalog, ExitStack() as stack:
        yield request.param(catalog, tmp_path, stack, TERMS.lease_seconds, TERMS.publish_deadline_seconds)


@pytest.mark.parametrize("published", ["weights and scales", "bfloat16 weights"])
def test_an_fp8_engine_gets_weights_and_scales_or_nothing(group: World, published: str, tmp_path: Path) -> None:
    """Gate and up are cut each by itself, scales with their blocks."""
    ranks = [models.Rank(number, 2) for number in (0, 1)]
    configs = [models.engine_config(models.directory(tmp_path / "bare", "llama, block FP8"), rank) for rank in ranks]
    specs = checkpoint_tensors("", configs[0].model_config.hf_config, torch.bfloat16)
    weights = checkpoint(specs)
    engines = []
    for rank, config in zip(ranks, configs, strict=True):
        with observed() as found:
            module = models.built(config, rank, "cpu")
            for parameter in module.parameters():
                parameter.data.copy_(torch.ones(parameter.shape))
            processed(module, config, rank)
        found[0].require()
        target = VllmTarget(f"tp{rank.rank}", found[0])
        engines.append((group.rank(None, "engine", coordinate=f"tp{rank.rank}", rank=rank.rank, world=2, target=target), module, rank, config))
    if published == "bfloat16 weights":
        plain = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items() if not name.endswith("_scale_inv")}
        with pytest.raises(PlanError, match="weight_scale_inv"):
            group.trainer(tree(plain), options=Trainer(redundancy=1)).publish(0)
        return
    number = group.trainer(tree(weights), options=Trainer(redundancy=1)).publish(0).number
    for rank, module, place, config in engines:
        refit(rank, Orders(), number)
        reference = models.built(config, place, "cpu")
        models.load(reference, config, place, weights)
        assert_same(module, processed(reference, config, place))


def loaded(folder: Path, rank: models.Rank, load_format: str) -> tuple[torch.nn.Module, object]:
    """By vLLM's own model loader, quantised block by block on the way."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.model_loader import get_model_loader

    config = models.engine_config(folder, rank, quantization="fp8_per_block")
    config.load_config.load_format = load_format
    with (
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(fp8, "init_fp8_linear_kernel", return_value=models.WithoutKernel()),
        mock.patch.object(utils, "dispatch_cpu_unquantized_gemm"),
        models.loading(config, rank),
    ):
        keep_plain_linears()
        return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config), config


def test_bfloat16_weights_are_quantised_by_the_engine_that_gets_them(group: World, tmp_path: Path) -> None:
    """As it quantises them when it loads the checkpoint, so scales are equal too."""
    bare, full = (models.directory(tmp_path / name, "llama, wide") for name in ("bare", "full"))
    ranks = [models.Rank(number, 2) for number in (0, 1)]
    engines = []
    for rank in ranks:
        with observed() as found:
            module, config = loaded(bare, rank, "dummy")
        found[0].require()
        assert len(found[0].remade) == 8, "four linear layers in each of two"
        target = VllmTarget(f"tp{rank.rank}", found[0])
        engines.append((group.rank(None, "engine", coordinate=f"tp{rank.rank}", rank=rank.rank, world=2, target=target), module, rank))
    weights = checkpoint(checkpoint_tensors("", config.model_config.hf_config, torch.bfloat16))
    save_file(weights, full / "model.safetensors")
    number = group.trainer(tree(weights), options=Trainer(redundancy=1)).publish(0).number
    for rank, module, place in engines:
        with torch.compiler.set_stance("force_eager"):
            refit(rank, Orders(), number)
        assert_same(module, loaded(full, place, "safetensors")[0])

"""Modules that every rank holds whole: the names of checkpoints, live memory wherever it is now, and refusals of those that only look whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from refit_api.errors import PlanError, ShapeMismatch, UnsupportedLayout
from refit_api.tensors import Dtype
from refit_runtime.adapters.fsdp.source import FsdpSource
from refit_runtime.adapters.torch_module import TorchSource
from refit_runtime.wiring import source_of
from safetensors.torch import load_file

from tests.adapters.fsdp.models import Tiny, truth
from tests.runtime.steps import refit


def offered(source: Any) -> dict[str, torch.Tensor]:
    return {shard.tensor.name: source.view(index) for index, shard in enumerate(source.shards().shards)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class DistributedDataParallel(torch.nn.Module):
    """As DDP wraps: by its class name and its attribute."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def _compiled(model: Tiny) -> torch.nn.Module:
    model.blocks[0] = torch.compile(model.blocks[0])
    return torch.compile(model)  # type: ignore[return-value]


def _checkpointed(model: Tiny) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel, _compiled, _checkpointed], ids=["bare", "DDP", "compiled", "checkpointed"])
def test_names_are_those_of_the_bare_model(wrap: Callable[[Tiny], torch.nn.Module]) -> None:
    source = source_of(wrap(Tiny()), 2)
    assert isinstance(source, TorchSource)
    assert (source.shards().rank, source.shards().replica) == (2, 2)
    assert same(offered(source), truth(Tiny()))


SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = SIZES | {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 4, "q_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 1, "topk_group": 1}
MODELS = {
    "Llama": ("LlamaConfig", SIZES),
    "Qwen2, tied": ("Qwen2Config", SIZES | {"tie_word_embeddings": True}),
    "Qwen2, untied": ("Qwen2Config", SIZES | {"tie_word_embeddings": False}),
    "Qwen3-MoE": ("Qwen3MoeConfig", MOE | {"num_experts": 4, "head_dim": 4}),
    "Mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3": ("DeepseekV3Config", MOE | LATENT | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "GPT-OSS": ("GptOssConfig", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}),
}


@pytest.mark.parametrize(("config", "sizes"), MODELS.values(), ids=MODELS)
def test_a_hugging_face_model_is_what_it_is_saved_as(config: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Also where the library fuses the experts of a layer: names, shapes and values of the checkpoint that it would write."""
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    model.save_pretrained(tmp_path)
    assert same(offered(source_of(model, 0)), load_file(tmp_path / "model.safetensors"))


def test_what_the_library_computes_when_it_saves_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors added up are no part of either."""
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", lambda _, held: {"sum.weight": held["lm_head.weight"] + 1})
    with pytest.raises(UnsupportedLayout, match=r"^sum\.weight: transformers computes it"):
        source_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), 0)


@pytest.mark.parametrize("kind", [TorchSource, FsdpSource])
def test_buffers_keep_their_dtype(kind: Any) -> None:
    dtypes = {shard.tensor.name: shard.tensor.dtype for shard in kind(Tiny(), 0, dtype=Dtype.BFLOAT16).shards().shards}
    assert dtypes.pop("bias_of_router") is Dtype.FLOAT32
    assert set(dtypes.values()) == {Dtype.BFLOAT16}


class Column(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


STRIDED = {
    "C15 (a) columns of a wider buffer": lambda: torch.randn(12, 8).bfloat16()[:, 0:4],
    "C15 (b) a transposed buffer": lambda: torch.randn(4, 8).bfloat16().t(),
    "every second row": lambda: torch.randn(16, 3)[::2],
}


@pytest.mark.parametrize("made", STRIDED.values(), ids=STRIDED)
def test_strided_memory_is_published_as_its_values(made: Callable[[], torch.Tensor], world: Any, orders: Any) -> None:
    weight = made()
    engine = Column(torch.zeros(weight.shape, dtype=weight.dtype))
    trainer, rank = world.trainer(Column(weight)), world.rank(engine)
    refit(rank, orders, trainer.publish(0).number)
    assert torch.equal(engine.weight, weight)


def test_c104_other_memory_under_the_same_name_is_published_from_where_it_is(world: Any, orders: Any) -> None:
    model, engine = Column(torch.randn(2, 4)), Column(torch.zeros(2, 4))
    trainer, rank = world.trainer(model), world.rank(engine)
    refit(rank, orders, trainer.publish(0).number)
    moves = (lambda: setattr(model, "weight", torch.nn.Parameter(torch.randn(2, 4))), lambda: setattr(model.weight, "data", torch.randn(2, 4)))
    for step, move in enumerate(moves):
        move()
        refit(rank, orders, trainer.publish(step + 1).number)
        assert torch.equal(engine.weight, model.weight)


CHANGED = {
    "another shape": (lambda model: setattr(model, "weight", torch.nn.Parameter(torch.randn(4, 4))), ShapeMismatch),
    "gone": (lambda model: delattr(model, "weight"), UnsupportedLayout),
    "without memory": (lambda model: setattr(model, "weight", torch.nn.Parameter(torch.empty(2, 4, device="meta"))), UnsupportedLayout),
}


@pytest.mark.parametrize(("change", "error"), CHANGED.values(), ids=CHANGED)
def test_c104_what_is_not_what_was_bound_is_refused_by_name(change: Callable[[Column], None], error: type[PlanError]) -> None:
    model = Column(torch.randn(2, 4))
    source = TorchSource(model)
    change(model)
    with pytest.raises(error, match=r"^weight: "):
        source.view(0)


def test_c104_float32_is_published_as_float32() -> None:
    (shard,) = TorchSource(Column(torch.randn(2, 4))).shards().shards
    assert shard.tensor.dtype is Dtype.FLOAT32


class FullyShardedDataParallel(Column):
    """FSDP1 by its name: its flat parameters say nothing of shapes."""


class MegatronModule(Column):
    """The base of all of Megatron's modules, by its name."""


def _deepspeed() -> Column:
    model = Column(torch.randn(2, 4))
    model.weight.ds_tensor = torch.empty(0)  # type: ignore[attr-defined]
    return model


def _sparse() -> Column:
    model = Column(torch.randn(2, 4))
    model.weight = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    return model


LOOKS_WHOLE = {
    "FSDP1": (lambda: FullyShardedDataParallel(torch.randn(4)), "fully_shard"),
    "a block under FSDP1": (lambda: torch.nn.Sequential(FullyShardedDataParallel(torch.randn(4))), "module 0 is a FullyShardedDataParallel"),
    "Megatron": (lambda: torch.nn.Sequential(MegatronModule(torch.randn(4))), "MegatronSource"),
    "DeepSpeed": (_deepspeed, "DeepSpeed"),
    "sparse": (_sparse, "^weight: a tensor of type"),
    "complex": (lambda: Column(torch.zeros(2, dtype=torch.complex64)), "weight: dtype torch.complex64"),
}


@pytest.mark.parametrize(("made", "why"), LOOKS_WHOLE.values(), ids=LOOKS_WHOLE)
def test_what_only_looks_whole_is_refused(made: Callable[[], torch.nn.Module], why: str) -> None:
    with pytest.raises(UnsupportedLayout, match=why):
        source_of(made(), 0)


def test_a_source_is_bound_as_it_is() -> None:
    source = TorchSource(Tiny())
    assert source_of(source, 3) is source


def test_an_empty_parameter_is_no_tensor() -> None:
    model = Column(torch.randn(2, 4))
    model.none = torch.nn.Parameter(torch.empty(0, 4))
    assert list(offered(TorchSource(model))) == ["weight"]

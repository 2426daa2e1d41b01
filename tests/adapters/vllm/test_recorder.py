"""Needs from the engine's own loaders: what a loader does with a checkpoint, done from the needs alone, gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Dtype, Need, TensorSpec
from refit_runtime.adapters.vllm.checkpoint import checkpoint_tensors
from refit_runtime.adapters.vllm.recorder import Recording, live_tensors, record
from refit_runtime.adapters.vllm.rehearsal import rehearsed

from tests.adapters.vllm.models import EXPERT_FAMILIES, FAMILIES, NOT_FOLLOWED, Rank, built, directory, engine_config, load, loading

ALONE = Rank(0, 1)
TP = [Rank(0, 1), Rank(0, 2), Rank(3, 4)]
ROWS = [(family, rank) for family in FAMILIES for rank in (TP[:2] if "block FP8" in family else TP)] + [
    (family, Rank(size - 1, size, experts=True)) for family in EXPERT_FAMILIES for size in (2, 4) if size == 2 or "block FP8" not in family
]
ROWS += [(family, Rank(0, 1, stage=stage, stages=2)) for family in ("llama, tied", "deepseek v3 (mla, shared expert)") for stage in (0, 1)]


def checkpoint(specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
    """Random bytes under every name."""
    random = torch.Generator().manual_seed(7)
    return {spec.name: torch.randn(spec.shape, generator=random).to(getattr(torch, spec.dtype.value)) for spec in specs}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assemble(needs: tuple[Need, ...], tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    """The needs, moved by the dumbest means."""
    for need in needs:
        data = tensors[need.tensor][tuple(slice(lo, hi) for lo, hi in need.box)]
        data = data.permute(need.perm) if need.perm is not None else data
        into[need.parameter.name][tuple(slice(lo, hi) for lo, hi in need.at)].copy_(data)


@pytest.mark.parametrize(
    ("family", "rank"),
    ROWS,
    ids=lambda value: (
        value if isinstance(value, str) else f"{value.rank} of {value.size}{', experts' * value.experts}{f', stage {value.stage}' * (value.stages > 1)}"
    ),
)
def test_needs_equal_the_loader(family: str, rank: Rank, tmp_path: Path) -> None:
    """Every family and rank: each parameter, byte for byte; what stays unwritten is declared."""
    config = engine_config(directory(tmp_path, family), rank)
    model = built(config, rank, "cpu")
    with loading(config, rank):
        specs = checkpoint_tensors(str(tmp_path), config.model_config.hf_config, config.model_config.dtype)
        recording = record(model, specs, model.load_weights)
    recording.require(family)
    tensors = checkpoint(specs)
    ours = {name: tensor.clone() for name, tensor in live_tensors(model).items()}
    assemble(recording.needs, tensors, ours)
    load(model, config, rank, tensors)
    different = [
        name for name, tensor in live_tensors(model).items() if tensor.dtype != ours[name].dtype or not torch.equal(as_bytes(tensor), as_bytes(ours[name]))
    ]
    assert different == []
    with loading(config, rank):
        assert rehearsed(recording, model, specs, model.load_weights) == recording, "the start-up self-test says the same"
    known = {need.parameter.name for need in recording.needs} | {parameter.name for parameter in recording.unwritten}
    assert {name for name, _ in model.named_parameters()} <= known


REFUSED = {
    "granite hybrid (mamba 2)": ("model.layers.0.mamba.A_log", "computes with what lies in model.layers.0.mamba.A (aten.exp"),
    "jamba (mamba)": ("model.layers.0.mamba.A_log", "needs the values (aten.exp"),
    "ernie 4.5 moe": ("model.layers.1.mlp.moe_statics.e_score_correction_bias", "2 dims, the parameter only 1"),
    "glm4, a padding word beyond the vocabulary": ("Glm4ForCausalLM", "config.json", "Padding_idx must be within num_embeddings"),
}


@pytest.mark.parametrize("family", NOT_FOLLOWED)
def test_a_family_whose_loader_computes_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """What was copied is not what the engine computes with: no plan may say so."""
    config = engine_config(directory(tmp_path, family), ALONE)
    model = built(config, ALONE, "cpu")
    computed = {name: (tensor, tensor.clone()) for name, tensor in live_tensors(model).items() if name.endswith((".A", "correction_bias"))}

    def required() -> None:
        specs = checkpoint_tensors(str(tmp_path), config.model_config.hf_config, config.model_config.dtype)
        record(model, specs, model.load_weights).require(family)

    with loading(config, ALONE), pytest.raises(UnsupportedLayout) as refusal:
        required()
    for word in REFUSED[family]:
        assert word in refusal.value.message
    assert all(torch.equal(as_bytes(tensor), as_bytes(before)) for tensor, before in computed.values()), "live memory is not touched"


class Loader(torch.nn.Module):
    """A model whose loader does to each tensor what its row says."""

    def __init__(self, act) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.second = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.act = act

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "odd":
                self.act(self, tensor)
            else:
                getattr(self, name).copy_(tensor)


def recorded(act) -> Recording:
    model = Loader(act)
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("first", "odd", "second")], model.load_weights)
    assert not any(parameter.any() for parameter in model.parameters()), "live memory is not touched"
    return recording


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (lambda model, tensor: model.first.copy_(tensor + 1), "needs the values"),
        (lambda model, tensor: tensor.fill_(0), "needs the values"),
        (lambda model, tensor: float(tensor[0, 0]), "needs the values"),
        (lambda model, tensor: model.first.fill_(tensor[:2].abs().max() / 448), "needs the values (aten.abs"),
        (lambda model, tensor: torch.empty(4, 2).copy_(tensor), "that is no parameter"),
        (lambda model, tensor: model.first.copy_(tensor.to(torch.float16)), "casts it to torch.float16"),
        (lambda model, tensor: model.first.view(-1)[:3].copy_(tensor.flatten()[1:4]), "first"),
        (lambda model, tensor: tensor.view(torch.int32), "needs the values"),
        (lambda model, tensor: model.missing, "missing"),
        (lambda model, tensor: (tensor[:2].zero_(), model.first.copy_(tensor)), "writes into a part of it"),
        (lambda model, tensor: model.first[:3].copy_(tensor[torch.tensor([0, 1, 3])]), "not at equal steps"),
        (lambda model, tensor: (model.first.copy_(tensor), model.first.copy_(-model.first.exp())), "computes with what lies in first"),
        (lambda model, tensor: (model.first.copy_(tensor), model.first[1:].mul_(2)), "computes with what lies in first"),
        (lambda model, tensor: (model.first.copy_(tensor), setattr(model, "derived", model.first.T.sum())), "computes with what lies in first"),
        (lambda model, tensor: (model.first.copy_(tensor), model.first.copy_(torch.ones(4, 2))), "computes with what lies in first"),
    ],
    ids=[
        "arithmetic", "writes into it", "reads a value", "a scale from a statistic", "copies elsewhere", "casts twice", "cuts inside rows",
        "reinterprets bytes", "fails by itself",
        "zeroes a part", "picks unevenly", "transforms afterwards", "scales in place", "derives a tensor", "overwrites",
    ],
)  # fmt: skip
def test_a_loader_that_does_anything_else_is_named_and_the_others_are_recorded(does, reason) -> None:
    recording = recorded(does)
    assert [failure.name for failure in recording.failures] == ["odd"]
    assert reason in recording.failures[0].reason
    assert [need.tensor for need in recording.needs] == ["first", "second"]
    with pytest.raises(UnsupportedLayout, match="odd"):
        recording.require("model")


def test_a_loader_that_puts_other_memory_into_a_parameter_is_named() -> None:
    model = Loader(lambda model, tensor: setattr(model.second, "data", torch.zeros(4, 2)))
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("first", "second", "odd")], model.load_weights)
    assert [(failure.name, failure.reason) for failure in recording.failures] == [("second", "its loader puts other memory in its place")]


def doubling(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data[:2].copy_(loaded[:2] * 2)


def test_a_failure_names_tensor_module_and_loader() -> None:
    """Somebody has to find the line."""
    model = torch.nn.Module()
    model.inner = Loader(lambda inner, tensor: doubling(inner.first, tensor))
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("first", "odd", "second")], model.inner.load_weights)
    assert str(recording.failures[0]).startswith(f"odd of module inner in {__name__}.doubling: its loader needs the values (aten.mul")


@pytest.mark.parametrize(
    ("does", "where"),
    [(lambda model, tensor: None, "it"), (lambda model, tensor: model.second[1:].copy_(tensor[1:]), "[[0, 1], [0, 2]] of it")],
    ids=["wholly", "in part"],
)
def test_a_parameter_that_nothing_is_written_into_is_named(does, where) -> None:
    model = Loader(does)
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("first", "odd")], model.load_weights)
    assert [(failure.name, failure.reason) for failure in recording.failures] == [("second", f"no tensor of the checkpoint is written into {where}")]


def test_a_tensor_that_its_loader_sets_to_zero_is_no_need() -> None:
    """Biases that one rank alone adds: on the others they are zero from the start and stay so."""
    model = Loader(lambda model, tensor: model.second.copy_(tensor.zero_().view(2, 4).view(4, 2)))
    model.second.data.fill_(7)
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("first", "odd")], model.load_weights)
    recording.require("model")
    assert [need.tensor for need in recording.needs] == ["first"]
    assert [parameter.name for parameter in recording.unwritten] == ["second"]
    assert not model.second.any()


def test_rows_at_equal_steps_are_a_need() -> None:
    """Experts that a rank has, picked by a list of their numbers."""
    model = Loader(lambda model, tensor: model.second[:2].copy_(tensor[torch.tensor([1, 3])]))
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("second", "odd")], model.load_weights)
    assert [need.box for need in recording.needs if need.tensor == "odd"] == [((1, 2), (0, 2)), ((3, 4), (0, 2))]


def test_a_loader_may_ask_a_parameter_for_its_shape() -> None:
    model = Loader(lambda model, tensor: (torch.zeros_like(model.second), model.second[1:].new_empty(3), model.second.copy_(tensor)))
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("first", "odd")], model.load_weights)
    recording.require("model")
    assert [need.parameter.name for need in recording.needs] == ["first", "second"]


def test_a_loader_that_collects_first_does_not_hide_who_fails() -> None:
    class Collecting(Loader):
        def load_weights(self, weights) -> None:
            super().load_weights(list(weights))

    model = Collecting(lambda model, tensor: tensor + 1)
    recording = record(model, [TensorSpec(name, Dtype.FLOAT32, (4, 2)) for name in ("first", "odd", "second")], model.load_weights)
    assert [failure.name for failure in recording.failures] == ["odd"]
    assert [need.tensor for need in recording.needs] == ["first", "second"]


def test_names_come_from_the_safetensors_headers_where_there_are_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a.weight": torch.zeros(3, 2, dtype=torch.bfloat16), "b.scale": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    specs = checkpoint_tensors(str(tmp_path), None, torch.float32)
    assert set(specs) == {TensorSpec("a.weight", Dtype.BFLOAT16, (3, 2)), TensorSpec("b.scale", Dtype.FLOAT32, ())}


def test_what_is_quantised_is_named_with_its_scales(tmp_path: Path) -> None:
    """As released FP8 checkpoints have it; routers and heads stay as they are."""
    config = engine_config(directory(tmp_path, "qwen3 moe, block FP8"), Rank(0, 1)).model_config.hf_config
    found = {spec.name: spec for spec in checkpoint_tensors(str(tmp_path), config, torch.bfloat16)}
    expert = "model.layers.1.mlp.experts.3.up_proj"
    assert found[f"{expert}.weight"] == TensorSpec(f"{expert}.weight", Dtype.FLOAT8_E4M3FN, (256, 256))
    assert found[f"{expert}.weight_scale_inv"] == TensorSpec(f"{expert}.weight_scale_inv", Dtype.FLOAT32, (2, 2))
    assert {found[name].dtype for name in ("lm_head.weight", "model.layers.1.mlp.gate.weight", "model.norm.weight")} == {Dtype.BFLOAT16}
    config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(UnsupportedLayout, match="mxfp4"):
        checkpoint_tensors(str(tmp_path), config, torch.bfloat16)


def test_a_model_without_known_names_is_refused() -> None:
    class Config:
        architectures = ("NobodysForCausalLM",)

    with pytest.raises(UnsupportedLayout, match="NobodysForCausalLM"):
        checkpoint_tensors("no/such/directory", Config(), torch.float32)

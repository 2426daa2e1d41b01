"""Needs from the engine's own loaders: what a loader does with a checkpoint, done from the needs alone, gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Dtype, Need, TensorSpec
from refit_runtime.adapters.vllm.checkpoint import checkpoint_tensors
from refit_runtime.adapters.vllm.recorder import Recording, live_tensors, record

from tests.adapters.vllm.models import FAMILIES, Rank, built, directory, engine_config, faked

TP = [Rank(0, 1), Rank(1, 2), Rank(3, 4)]
EXPERTS = ("qwen3 moe", "mixtral", "deepseek v3 (mla, shared expert)")
ROWS = [(family, rank) for family in FAMILIES for rank in TP] + [(family, Rank(1, 2, experts=True)) for family in EXPERTS]


def checkpoint(specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
    """Random bytes under every name."""
    random = torch.Generator().manual_seed(7)
    return {spec.name: torch.randn(spec.shape, generator=random).to(getattr(torch, spec.dtype.value)) for spec in specs}


def assemble(needs: tuple[Need, ...], tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    """The needs, moved by the dumbest means."""
    for need in needs:
        data = tensors[need.tensor][tuple(slice(lo, hi) for lo, hi in need.box)]
        data = data.permute(need.perm) if need.perm is not None else data
        into[need.parameter.name][tuple(slice(lo, hi) for lo, hi in need.at)].copy_(data)


@pytest.mark.parametrize(
    ("family", "rank"), ROWS, ids=lambda value: value if isinstance(value, str) else f"{value.rank} of {value.size}{', experts' * value.experts}"
)
def test_needs_equal_the_loader(family: str, rank: Rank, tmp_path: Path) -> None:
    """Every family and rank: each parameter, byte for byte; what stays unwritten is declared."""
    config = engine_config(directory(tmp_path, family), rank)
    specs = checkpoint_tensors(str(tmp_path), config.model_config.hf_config, config.model_config.dtype)
    model, tensors = built(config, rank, "cpu"), checkpoint(specs)
    with faked(rank):
        recording = record(model, specs, model.load_weights)
    recording.require(family)
    ours = {name: tensor.clone() for name, tensor in live_tensors(model).items()}
    assemble(recording.needs, tensors, ours)
    with faked(rank), torch.no_grad():
        model.load_weights(iter(tensors.items()))
    different = [name for name, tensor in live_tensors(model).items() if not torch.equal(tensor, ours[name])]
    assert different == []
    known = {need.parameter.name for need in recording.needs} | {parameter.name for parameter in recording.unwritten}
    assert {name for name, _ in model.named_parameters()} <= known


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
        (lambda model, tensor: torch.empty(4, 2).copy_(tensor), "that is no parameter"),
        (lambda model, tensor: model.first.copy_(tensor.to(torch.float16)), "casts it to torch.float16"),
        (lambda model, tensor: model.first.view(-1)[:3].copy_(tensor.flatten()[1:4]), "first"),
        (lambda model, tensor: tensor.view(torch.int32), "needs the values"),
        (lambda model, tensor: model.missing, "missing"),
    ],
    ids=["arithmetic", "writes into it", "reads a value", "copies elsewhere", "casts twice", "cuts inside rows", "reinterprets bytes", "fails by itself"],
)  # fmt: skip
def test_a_loader_that_does_anything_else_is_named_and_the_others_are_recorded(does, reason) -> None:
    recording = recorded(does)
    assert [failure.name for failure in recording.failures] == ["odd"]
    assert reason in recording.failures[0].reason
    assert [need.tensor for need in recording.needs] == ["first", "second"]
    with pytest.raises(UnsupportedLayout, match="odd"):
        recording.require("model")


def test_a_parameter_that_nothing_is_written_into_is_named() -> None:
    model = Loader(lambda model, tensor: None)
    recording = record(model, [TensorSpec("first", Dtype.FLOAT32, (4, 2))], model.load_weights)
    assert [failure.name for failure in recording.failures] == ["second"]


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


def test_a_model_without_known_names_is_refused() -> None:
    class Config:
        architectures = ("NobodysForCausalLM",)

    with pytest.raises(UnsupportedLayout, match="NobodysForCausalLM"):
        checkpoint_tensors("no/such/directory", Config(), torch.float32)

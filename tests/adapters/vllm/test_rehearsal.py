"""The engine's own loader, run on made-up tensors, must leave what the recorded needs say: anything else is found before a weight is moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Dtype, Need, TensorSpec
from refit_runtime.adapters.vllm.recorder import Recording, record
from refit_runtime.adapters.vllm.rehearsal import MadeUp, rehearsed

SPECS = [TensorSpec("gate", Dtype.BFLOAT16, (6, 4)), TensorSpec("up", Dtype.BFLOAT16, (6, 4)), TensorSpec("down", Dtype.BFLOAT16, (6, 4))]


class Layer(torch.nn.Module):
    """Two tensors one above the other, one turned and cast; the loader may be told to do otherwise from the second time on."""

    def __init__(self, later: Callable[[Layer], Any] = lambda layer: None) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(12, 4, dtype=torch.bfloat16))
        self.down = torch.nn.Parameter(torch.zeros(5, 6))
        self.later, self.calls = later, 0

    def load_weights(self, weights) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                if name == "down":
                    self.down[:4].copy_(tensor.t())
                    self.down[4:].zero_()
                else:
                    self.gate_up[slice(0, 6) if name == "gate" else slice(6, 12)].copy_(tensor)
            self.calls += 1
            if self.calls > 1:
                self.later(self)


def followed(layer: Layer) -> Recording:
    recording = record(layer, SPECS, layer.load_weights)
    recording.require("layer")
    return recording


def swapped(needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """The halves of one parameter change places."""
    places = {"gate": ((6, 12), (0, 4)), "up": ((0, 6), (0, 4))}
    return tuple(replace(need, at=places.get(need.tensor, need.at)) for need in needs)


def unturned(needs: tuple[Need, ...]) -> tuple[Need, ...]:
    return tuple(replace(need, perm=None) if need.tensor == "down" else need for need in needs)


def test_a_loader_that_does_as_it_was_followed_passes() -> None:
    layer = Layer()
    recording = followed(layer)
    assert rehearsed(recording, layer, SPECS, layer.load_weights) == recording


@pytest.mark.parametrize(("wrong", "names"), [(swapped, ["gate", "up"]), (unturned, ["down"])], ids=["halves swapped", "not transposed"])
def test_a_wrong_recording_is_found(wrong: Callable[[tuple[Need, ...]], tuple[Need, ...]], names: list[str]) -> None:
    layer = Layer()
    recording = followed(layer)
    found = rehearsed(replace(recording, needs=wrong(recording.needs)), layer, SPECS, layer.load_weights)
    assert [failure.name for failure in found.failures] == names
    with pytest.raises(UnsupportedLayout, match="puts something else into"):
        found.require("layer")


def fails(layer: Layer) -> None:
    raise RuntimeError("loaded already")


@pytest.mark.parametrize(
    ("later", "name", "reason"),
    [
        (lambda layer: layer.gate_up[6:].mul_(-1), "up", r"puts something else into \[\[6, 12\], \[0, 4\]\] of gate_up"),
        (lambda layer: layer.gate_up.copy_(layer.gate_up.roll(1, 0)), "gate", "puts something else into"),
        (lambda layer: layer.down[4:].fill_(1), "load_weights", "does not fill with 0"),
        (fails, "load_weights", "loaded already"),
    ],
    ids=["scales", "moves rows on", "fills otherwise", "loads once only"],
)
def test_a_loader_that_does_otherwise_with_values_is_found(later: Callable[[Layer], Any], name: str, reason: str) -> None:
    """What a loader without values cannot show."""
    layer = Layer(later)
    found = rehearsed(followed(layer), layer, SPECS, layer.load_weights)
    assert found.failures[0].name == name
    with pytest.raises(UnsupportedLayout, match=reason):
        found.require("layer")


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT8_E4M3FN, Dtype.INT32])
def test_made_up_tensors_tell_rows_and_tensors_apart(dtype: Dtype) -> None:
    """The same name has the same contents, whoever asks."""
    made_up, spec = MadeUp.on(torch.device("cpu")), TensorSpec("a", dtype, (4096, 512))
    tensor = made_up.tensor(spec).float()
    assert torch.equal(tensor, MadeUp.on(torch.device("cpu")).tensor(spec).float())
    assert not torch.equal(tensor, made_up.tensor(replace(spec, name="b")).float())
    assert len({row.numpy().tobytes() for row in tensor}) == 4096
    assert tensor.isfinite().all()


@pytest.mark.parametrize("rows", [8, 4096], ids=["within the table", "longer than it"])
def test_what_a_loader_writes_into_a_made_up_tensor_reaches_no_other(rows: int) -> None:
    made_up, spec = MadeUp.on(torch.device("cpu")), TensorSpec("a", Dtype.BFLOAT16, (rows, 512))
    before = made_up.tensor(spec).clone()
    made_up.tensor(spec).zero_()
    assert torch.equal(made_up.tensor(spec), before)

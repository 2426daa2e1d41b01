"""The start-up self-test of the copy list: the engine's own loader, run once on made-up tensors, must leave what the recorded needs say.

Recording follows a loader that gets tensors without values; one that decides by values, or by how often it was called, would do something else with
real ones. So it loads once before anything else does, and every place that a need or a constant names is compared bit for bit.

Invariants: contents follow from a tensor's name alone, so that one tensor at a time is alive here, made again to compare; whatever the engine loads
afterwards, or the first version, overwrites them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
from refit_api.tensors import Need, TensorSpec

from refit_runtime.adapters.vllm.recorder import MAX_FAILURES, Failure, Recording, Weights, live_tensors
from refit_runtime.adapters.vllm.remade import same

PERIOD = 1_048_573  # a prime: rows or blocks that are taken from elsewhere never fall on equal contents
COARSE = 1e5  # for types of 8 bits, to which small weights are all zero


def rehearsed(recording: Recording, module: torch.nn.Module, specs: Sequence[TensorSpec], load: Callable[[Weights], Any]) -> Recording:
    """The recording, with what the loader did otherwise among its failures."""
    if recording.failures:
        return recording
    live = live_tensors(module)
    made_up = MadeUp.on(next((tensor.device for tensor in live.values() if not tensor.is_meta), torch.device("cpu")))
    with torch.no_grad():
        try:
            load((spec.name, made_up.tensor(spec)) for spec in specs)
        except Exception as error:  # noqa: BLE001  loaders are foreign code: what they raise is a finding
            return replace(recording, failures=(Failure("load_weights", f"loading made-up tensors fails ({type(error).__name__}: {error})"),))
        found = tuple(failure for failure, _ in zip(_otherwise(recording, specs, live, made_up), range(MAX_FAILURES), strict=False))
    return replace(recording, failures=found)


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Tensors whose contents follow from their names: small weights, or whole numbers that are indices of anything."""

    numbers: torch.Tensor
    bits: torch.Tensor
    tables: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def on(cls, device: torch.device) -> MadeUp:
        random = torch.Generator().manual_seed(PERIOD)
        numbers = torch.empty(PERIOD, dtype=torch.float32, device="cpu").uniform_(-1e-3, 1e-3, generator=random)
        return cls(numbers.to(device), torch.randint(2, (PERIOD,), generator=random, device="cpu").to(device))

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype.value)
        count, first = torch.Size(spec.shape).numel(), crc32(spec.name.encode()) % PERIOD
        table = self._table(dtype)
        if first + count > PERIOD:
            return table.repeat((first + count) // PERIOD + 1)[first : first + count].view(spec.shape)
        return table[first : first + count].clone().view(spec.shape)  # a loader may write into what it gets

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self.tables:
            some = self.bits if not dtype.is_floating_point else self.numbers if dtype.itemsize > 1 else self.numbers * COARSE
            self.tables[dtype] = some.to(dtype)
        return self.tables[dtype]


def _otherwise(recording: Recording, specs: Sequence[TensorSpec], live: Mapping[str, torch.Tensor], made_up: MadeUp) -> Iterator[Failure]:
    needs: dict[str, list[Need]] = defaultdict(list)
    for need in recording.needs:
        if not live[need.parameter.name].is_meta:
            needs[need.tensor].append(need)
    for spec in specs:
        tensor = made_up.tensor(spec) if needs[spec.name] else None
        for need in needs[spec.name]:
            assert tensor is not None, "made for its needs"
            box = tensor[_slices(need.box)]
            wanted = box if need.perm is None else box.permute(need.perm)
            place = live[need.parameter.name][_slices(need.at)]
            if not same(wanted.to(place.dtype).reshape(place.shape), place):
                module = need.parameter.name.rpartition(".")[0]
                yield Failure(need.tensor, f"its loader puts something else into {[list(side) for side in need.at]} of {need.parameter.name}", module)
                break
    for place, value in recording.constants:
        if not place.is_meta and not bool((place == value).all()):
            yield Failure("load_weights", f"its loader does not fill with {value} what it filled while it was followed")


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)

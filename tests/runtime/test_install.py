"""The copy list against plain indexing, both ways: permuted, extra dims, casts, tensors needed twice; and what is found after an install."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refit_api.errors import DigestMismatch
from refit_api.tensors import CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec
from refit_runtime.adapters.host_memory import HostMemory
from refit_runtime.arena import Holding
from refit_runtime.digest import Digests
from refit_runtime.install import CopyList
from refit_runtime.plan.plan import plan
from refit_runtime.snapshot import Snapshot

UID = "00000000-0000-0000-0000-000000000001"


class Tensors:
    """Source and target in one: arrays by name."""

    def __init__(self, needs: CoordinateNeeds, live: dict[str, torch.Tensor], shards: tuple[Shard, ...] = ()) -> None:
        self._needs, self._live, self._shards = needs, live, RankShards(0, 0, shards)

    def shards(self) -> RankShards:
        return self._shards

    def needs(self) -> CoordinateNeeds:
        return self._needs

    def view(self, parameter: Any) -> torch.Tensor:
        return self._live[parameter] if isinstance(parameter, str) else list(self._live.values())[parameter]

    def remake(self) -> None:
        """Nothing is derived."""


def moved(source: dict[str, torch.Tensor], needs: list[Need], live: dict[str, torch.Tensor]) -> tuple[CopyList, Holding, Digests, torch.Tensor]:
    """Published by one rank and in the arena of one coordinate, without a wire."""
    shards = tuple(
        Shard(TensorSpec(name, Dtype(str(t.dtype).removeprefix("torch.")), tuple(t.shape)), tuple((0, n) for n in t.shape)) for name, t in source.items()
    )
    made = plan([RankShards(0, 0, shards)], {"c": [CoordinateNeeds("tp0", tuple(needs))]})
    give, take = made.source(0), made.coordinate("c", "tp0")
    memory = HostMemory()
    out, arena = (memory.allocate(size, torch.device("cpu")) for size in (give.arena_bytes, take.arena_bytes))
    Snapshot(give, range(len(shards)), Tensors(CoordinateNeeds("", ()), source, shards), out, memory).take()
    digests = Digests(UID, 1)
    holding = Holding(1, "k", 0, tuple(made.runs[run] for run in take.offsets), dict(take.offsets))
    for run in holding.runs:
        a, b = give.offsets[run.index], take.offsets[run.index]
        arena[b : b + run.bytes] = out[a : a + run.bytes]
        holding.digests[run.index] = digests.of(arena[b : b + run.bytes].numpy())
    copies = CopyList(take.copies, Tensors(CoordinateNeeds("tp0", tuple(needs)), live), arena, memory)
    return copies, holding, digests, arena


def one(name: str, tensor: str, source: torch.Tensor, live: torch.Tensor, perm: tuple[int, ...] | None = None, at: Any = None) -> Need:
    whole = tuple((0, n) for n in source.shape)
    parameter = Parameter(name, Dtype(str(live.dtype).removeprefix("torch.")), tuple(live.shape))
    return Need(tensor, whole, parameter, at or tuple((0, n) for n in live.shape), perm)


def never() -> bool:
    return False


def test_permuted_and_with_extra_dims() -> None:
    w = torch.randn(3, 4, 5)
    turned, inside = torch.zeros(5, 3, 4), torch.zeros(2, 3, 4, 5)
    needs = [one("turned", "w", w, turned, (2, 0, 1)), one("inside", "w", w, inside, at=((1, 2), (0, 3), (0, 4), (0, 5)))]
    needs.append(Need("v", ((0, 7),), Parameter("inside2", Dtype.FLOAT32, (7,)), ((0, 7),)))
    v, flat = torch.randn(7), torch.zeros(7)
    copies, holding, digests, arena = moved({"w": w, "v": v}, _fill(needs), {"turned": turned, "inside": inside, "inside2": flat, "rest": torch.zeros(1)})
    copies.install()
    assert torch.equal(turned, w.permute(2, 0, 1))
    assert torch.equal(inside[1], w)
    copies.check(holding, digests, never)
    before = arena.clone()
    arena.zero_()
    copies.gather()
    for run in holding.runs:
        lo = holding.offsets[run.index]
        assert torch.equal(arena[lo : lo + run.bytes], before[lo : lo + run.bytes])


def _fill(needs: list[Need]) -> list[Need]:
    """The other half of `inside`, so that all of it is written."""
    w = needs[1]
    return [*needs, Need(w.tensor, w.box, w.parameter, ((0, 1), *w.at[1:]))]


def test_a_list_that_casts_installs_and_cannot_be_checked() -> None:
    w, live = torch.randn(64, 8), torch.zeros(64, 8, dtype=torch.bfloat16)
    other = torch.zeros(64, 8)
    needs = [one("low", "w", w, live), one("high", "w", w, other)]
    copies, *_ = moved({"w": w}, needs, {"low": live, "high": other})
    copies.install()
    assert torch.equal(live, w.to(torch.bfloat16))
    assert torch.equal(other, w)
    assert not copies.exact


@pytest.mark.parametrize("at", [0, 1_500_000, 2_999_999])
def test_a_damaged_byte_is_found_and_named(at: int) -> None:
    w = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 1_000_000), dtype=np.uint8))
    live = torch.zeros_like(w)
    copies, holding, digests, _ = moved({"w": w}, [one("p", "w", w, live)], {"p": live})
    copies.install()
    copies.check(holding, digests, never)
    live.view(-1)[at] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        copies.check(holding, digests, never)
    assert (caught.value.facts["block"], caught.value.facts["tensor"]) == (str(at >> 20), "w")

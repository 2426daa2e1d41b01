"""What a snapshot puts into the arena: live values, plus what checkpoints have more, cast once."""

from __future__ import annotations

import torch
from refit_api.tensors import CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard, TensorSpec, whole
from refit_runtime.adapters.host_memory import HostMemory
from refit_runtime.plan.plan import plan
from refit_runtime.snapshot import Snapshot, typed


class Norms:
    """A trainer that keeps `shifted` around zero."""

    def __init__(self) -> None:
        self.live = {"shifted": torch.randn(4096) * 1e-3, "plain": torch.randn(4096)}

    def shards(self) -> RankShards:
        return RankShards(0, 0, tuple(Shard(TensorSpec(name, Dtype.BFLOAT16, (4096,)), whole((4096,)), float(name == "shifted")) for name in self.live))

    def view(self, index: int) -> torch.Tensor:
        return list(self.live.values())[index]


def test_what_is_added_is_added_before_the_cast_and_to_memory_that_moved() -> None:
    source = Norms()
    needs = [Need(name, whole((4096,)), Parameter(name, Dtype.BFLOAT16, (4096,)), whole((4096,))) for name in source.live]
    made = plan([source.shards()], {"c": [CoordinateNeeds("tp0", tuple(needs))]}).source(0)
    memory = HostMemory()
    arena = memory.allocate(made.arena_bytes, torch.device("cpu"))
    snapshot = Snapshot(made, range(2), source, arena, memory)
    for move in (False, False, True):
        source.live = {name: tensor * 3 if move else tensor.mul_(2) for name, tensor in source.live.items()}
        before = {name: tensor.clone() for name, tensor in source.live.items()}
        snapshot.take()
        names = [source.shards().shards[copy.shard].tensor.name for copy in made.copies]
        found = {name: typed(arena[copy.offset : copy.offset + copy.nbytes], "bfloat16", (4096,)) for name, copy in zip(names, made.copies, strict=True)}
        assert torch.equal(found["plain"], source.live["plain"].bfloat16())
        assert torch.equal(found["shifted"], (1 + source.live["shifted"]).bfloat16())
        assert not torch.equal(found["shifted"], 1 + source.live["shifted"].bfloat16()), "rounded twice"
        assert all(torch.equal(source.live[name], tensor) for name, tensor in before.items()), "live memory is only read"

"""What the data plane costs on a CUDA device: `python -m bench device`. Prints a table and writes bench/results/device.json.

Llama-3.1-8B, bf16, 16.06 GB, from Megatron TP2 to vLLM TP1, all on one device: live memory as Megatron fuses it, parameters as vLLM fuses them, arenas and
copy lists as trainers and generators have them. Times are medians of wall time around a call that returns when the bytes are there: what a trainer or an
engine stands still for. "A copy" is torch's `copy_` of one block of the same number of bytes, timed alike; bytes read and written are both moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from refit_api.tensors import CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec, whole
from refit_runtime.adapters.cuda_memory import CudaMemory
from refit_runtime.arena import Holding
from refit_runtime.digest import Digests
from refit_runtime.install import CopyList
from refit_runtime.plan import roles
from refit_runtime.plan.plan import CoordinatePlan, Plan, SourcePlan, plan
from refit_runtime.snapshot import Snapshot

from bench.figures import Metric, metric, record

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, FFN, WORDS, TP = 32, 4096, 32, 8, 128, 14336, 128256, 2
DIGESTS = Digests("00000000-0000-0000-0000-000000000001", 1)
DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


class MegatronRank:
    """A `WeightSource` of a tensor-parallel rank."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self._memory: list[torch.Tensor] = []
        self._parts: list[tuple[int, roles.Piece]] = []
        torch.manual_seed(rank)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self._hold((WORDS // TP, HIDDEN), roles.vocabulary(name, WORDS, WORDS, HIDDEN, rank, TP), dtype)
        self._hold((HIDDEN,), (roles.replicated("model.norm.weight", (HIDDEN,)),), dtype)
        for i in range(LAYERS):
            at = f"model.layers.{i}"
            fused = tuple(f"{at}.self_attn.{name}_proj.weight" for name in "qkv")
            self._hold(((HEADS + 2 * KV_HEADS) * WIDTH // TP, HIDDEN), roles.qkv(fused, HEADS, KV_HEADS, WIDTH, HIDDEN, rank, TP), dtype)
            self._hold((HIDDEN, HIDDEN // TP), (roles.row(f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), rank, TP),), dtype)
            gated = tuple(f"{at}.mlp.{name}_proj.weight" for name in ("gate", "up"))
            self._hold((2 * FFN // TP, HIDDEN), roles.gated(gated, (FFN, HIDDEN), rank, TP), dtype)
            self._hold((HIDDEN, FFN // TP), (roles.row(f"{at}.mlp.down_proj.weight", (HIDDEN, FFN), rank, TP),), dtype)
            for norm in ("input", "post_attention"):
                self._hold((HIDDEN,), (roles.replicated(f"{at}.{norm}_layernorm.weight", (HIDDEN,)),), dtype)
        self._shards = RankShards(rank, 0, tuple(Shard(TensorSpec(part.tensor, Dtype.BFLOAT16, part.shape), part.box) for _, part in self._parts))

    def _hold(self, shape: Shape, parts: tuple[roles.Piece, ...], dtype: torch.dtype) -> None:
        self._parts += [(len(self._memory), part) for part in parts]
        alike = torch.linspace(0.5, 1.5, shape[0], device=DEVICE)  # what ranks share is equal
        self._memory.append(alike.to(dtype) if len(shape) == 1 else torch.randn(shape, device=DEVICE, dtype=dtype))

    def shards(self) -> RankShards:
        return self._shards

    def view(self, index: int) -> torch.Tensor:
        memory, part = self._parts[index]
        return self._memory[memory][tuple(slice(lo, hi) for lo, hi in part.local)]


class VllmEngine:
    """A `WeightTarget` without tensor parallelism."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        needs: list[Need] = []
        for name, shape in (("model.embed_tokens.weight", (WORDS, HIDDEN)), ("lm_head.weight", (WORDS, HIDDEN)), ("model.norm.weight", (HIDDEN,))):
            needs += self._stack(name, [(name, shape)])
        for i in range(LAYERS):
            at = f"model.layers.{i}"
            fused = [(f"{at}.self_attn.{name}_proj.weight", (heads * WIDTH, HIDDEN)) for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))]
            gated = [(f"{at}.mlp.{name}_proj.weight", (FFN, HIDDEN)) for name in ("gate", "up")]
            needs += self._stack(f"{at}.self_attn.qkv_proj.weight", fused) + self._stack(f"{at}.mlp.gate_up_proj.weight", gated)
            for name, shape in ((f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)), (f"{at}.mlp.down_proj.weight", (HIDDEN, FFN))):
                needs += self._stack(name, [(name, shape)])
            for norm in ("input", "post_attention"):
                needs += self._stack(f"{at}.{norm}_layernorm.weight", [(f"{at}.{norm}_layernorm.weight", (HIDDEN,))])
        self._needs = CoordinateNeeds("tp0", tuple(needs))

    def _stack(self, name: str, tensors: list[tuple[str, Any]]) -> list[Need]:
        parameter = Parameter(name, Dtype.BFLOAT16, (sum(shape[0] for _, shape in tensors), *tensors[0][1][1:]))
        self._memory[name] = torch.zeros(parameter.shape, device=DEVICE, dtype=torch.bfloat16)
        needs, row = [], 0
        for tensor, shape in tensors:
            needs.append(Need(tensor, whole(shape), parameter, ((row, row + shape[0]), *whole(shape[1:])), shape=shape))
            row += shape[0]
        return needs

    def needs(self) -> CoordinateNeeds:
        return self._needs

    def view(self, parameter: str) -> torch.Tensor:
        return self._memory[parameter]

    def remake(self) -> None:
        """Nothing is derived."""

    def holds(self, rank: MegatronRank) -> bool:
        """Whether all that the rank publishes is in the parameters."""
        places = {need.tensor: need for need in self._needs.needs}
        for index, shard in enumerate(rank.shards().shards):
            need = places[shard.tensor.name]
            box = [slice(at + lo, at + hi) for (at, _), (lo, hi) in zip(need.at, shard.box, strict=True)]
            if not torch.equal(self._memory[need.parameter.name][tuple(box)], rank.view(index).to(torch.bfloat16)):
                return False
        return True


def milliseconds(work: Callable[[], object], times: int = 15) -> float:
    work()
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)


class Path8B:
    """Arenas, lists and parameters of the whole path; what is published is what is installed, or nothing is reported."""

    def __init__(self) -> None:
        self.memory, self.engine = CudaMemory(), VllmEngine()
        self.ranks = [MegatronRank(rank, torch.bfloat16) for rank in range(TP)]
        self.plan: Plan = plan([rank.shards() for rank in self.ranks], {"tp1": [self.engine.needs()]})
        self.mine: CoordinatePlan = self.plan.coordinate("tp1", "tp0")
        self.sources: list[SourcePlan] = [self.plan.source(rank) for rank in range(TP)]
        self.arenas = [self.memory.allocate(source.arena_bytes, DEVICE) for source in self.sources]
        self.arena = self.memory.allocate(self.mine.arena_bytes, DEVICE)

    def snapshots(self) -> list[Snapshot]:
        each = zip(self.sources, self.ranks, self.arenas, strict=True)
        return [Snapshot(source, range(len(rank.shards().shards)), rank, arena, self.memory) for source, rank, arena in each]

    def pull(self) -> None:
        """Every run from its first owner."""
        for run in self.plan.runs:
            owner = run.owners[0]
            there, here = self.sources[owner].offsets[run.index], self.mine.offsets[run.index]
            self.arena[here : here + run.bytes].copy_(self.arenas[owner][there : there + run.bytes])

    def holding(self) -> Holding:
        runs = tuple(self.plan.runs[run] for run in self.mine.offsets)
        holding = Holding(1, "", 0, runs, dict(self.mine.offsets))
        for run in runs:
            at = self.mine.offsets[run.index]
            holding.digests[run.index] = self.memory.digests(self.arena[at : at + run.bytes], DIGESTS)
        return holding


def plain_copy(arena: torch.Tensor) -> float:
    other = torch.empty_like(arena)
    return milliseconds(lambda: other.copy_(arena))


def measure_path(path: Path8B) -> list[Metric]:
    size = path.mine.bytes
    copy = plain_copy(path.arena)
    snapshots = path.snapshots()
    taken = sum(milliseconds(snapshot.take) for snapshot in snapshots)
    path.pull()
    torch.cuda.synchronize()
    start = time.perf_counter()
    copies = CopyList(path.mine.copies, path.engine, path.arena, path.memory)
    made = time.perf_counter() - start
    copies.prepare_check()
    installed = milliseconds(copies.install)
    assert all(path.engine.holds(rank) for rank in path.ranks), "what was installed is not what was published"
    holding = path.holding()
    checked = milliseconds(lambda: copies.check(holding, DIGESTS, lambda: False), 5)
    gathered = milliseconds(copies.gather, 3)
    name = f"8B TP2 -> TP1, {size / 1e9:.2f} GB"
    return [
        metric(f"{name}: a copy", copy, "ms"),
        metric(f"{name}: a copy, bytes read and written", 2 * size / copy / 1e9, "TB/s"),
        metric(f"{name}: snapshots of both ranks ({sum(len(source.copies) for source in path.sources)} copies)", taken, "ms", most=10),
        metric(f"{name}: snapshots over a copy", taken / copy, "ratio", most=1.3),
        metric(f"{name}: install ({len(path.mine.copies)} copies)", installed, "ms", most=10),
        metric(f"{name}: install over a copy", installed / copy, "ratio", most=1.3),
        metric(f"{name}: live parameters read back and verified", checked, "ms"),
        metric(f"{name}: live parameters gathered into the arena, list made", gathered, "ms"),
        metric(f"{name}: copy list made", 1e3 * made, "ms"),
    ]


def measure_masters(path: Path8B) -> list[Metric]:
    """The cast at the snapshot reads twice the bytes that it writes."""
    path.ranks = []
    moved, taken = 0, 0.0
    for rank in range(TP):
        path.ranks = [MegatronRank(rank, torch.float32)]
        source, arena = path.sources[rank], path.arenas[rank]
        snapshot = Snapshot(source, range(len(path.ranks[0].shards().shards)), path.ranks[0], arena, path.memory)
        taken += milliseconds(snapshot.take)
        moved += 3 * sum(copy.nbytes for copy in source.copies)
    return [
        metric("8B TP2 from float32 masters: snapshots of both ranks", taken, "ms"),
        metric("8B TP2 from float32 masters: bytes read and written", moved / taken / 1e9, "TB/s"),
    ]


def measure_digests(path: Path8B) -> list[Metric]:
    metrics = []
    for size, name, least in ((path.mine.bytes, "the whole arena", 3.5), (256 * MIB, "256 MiB", None), (64 * MIB, "64 MiB", None)):
        parts = [path.arena[at : at + size] for at in range(0, min(path.mine.bytes // size, 16) * size, size)]  # more than a cache holds
        taken = milliseconds(lambda parts=parts: [path.memory.digests(part, DIGESTS) for part in parts])
        metrics.append(metric(f"digests, {name} at a time", len(parts) * size / taken / 1e9, "TB/s", least=least))
    return metrics


def main() -> None:
    path = Path8B()
    metrics = [*measure_path(path), *measure_digests(path), *measure_masters(path)]
    record("device", metrics, torch.cuda.get_device_name(DEVICE), ("torch", "triton"), cuda=str(torch.version.cuda))


if __name__ == "__main__":
    main()

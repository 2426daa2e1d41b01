"""What planning costs: `python -m bench plan`. Prints a table and writes bench/results/plan.json.

Times are CPU seconds of one process each, so that peak memory is the plan's own; facts are made before the clock starts. "Cold" plans from layout blobs,
as every rank does, or from facts, as tests and case files do; "warm" is what a rank does when nothing changed.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec, box_shape, whole
from refit_runtime.digest import Digests
from refit_runtime.plan import roles
from refit_runtime.plan.key import PlanDocument, encode_needs, encode_shards, layout_hash, plan_document, plan_key
from refit_runtime.plan.plan import Plan, plan, plan_tables
from refit_runtime.plan.table import Names, NeedKind, NeedTable, ShardKind, ShardTable

from bench.figures import Metric, machine, metric, record

BF16 = Dtype.BFLOAT16
Facts = tuple[list[RankShards], dict[str, list[CoordinateNeeds]]]
METRICS = TypeAdapter(list[Metric])


# ---------------------------------------------------------------- models: (name, shape, dim that tensor parallelism cuts)

Weights = Iterator[tuple[str, Shape, int | None]]


def _llama_8b() -> Weights:
    hidden, ffn = 4096, 14336
    yield from (("model.embed_tokens.weight", (128256, hidden), 0), ("lm_head.weight", (128256, hidden), 0), ("model.norm.weight", (hidden,), None))
    for i in range(32):
        at = f"model.layers.{i}"
        yield from ((f"{at}.self_attn.{name}_proj.weight", (rows, hidden), 0) for name, rows in (("q", 4096), ("k", 1024), ("v", 1024)))
        yield from ((f"{at}.mlp.{name}_proj.weight", (ffn, hidden), 0) for name in ("gate", "up"))
        yield from ((f"{at}.self_attn.o_proj.weight", (hidden, hidden), 1), (f"{at}.mlp.down_proj.weight", (hidden, ffn), 1))
        yield from ((f"{at}.{name}_layernorm.weight", (hidden,), None) for name in ("input", "post_attention"))


LAYERS, DENSE, EXPERTS, HIDDEN, MOE = 62, 3, 256, 7168, 2048


def _deepseek_dense() -> Weights:
    """All but the routed experts of a DeepSeek-V3-like model with one multi-token layer."""
    yield from (("model.embed_tokens.weight", (129280, HIDDEN), 0), ("lm_head.weight", (129280, HIDDEN), 0), ("model.norm.weight", (HIDDEN,), None))
    attention: list[tuple[str, Shape, int | None]] = [
        ("q_a_proj", (1536, HIDDEN), None), ("q_a_layernorm", (1536,), None), ("q_b_proj", (24576, 1536), 0), ("kv_a_proj_with_mqa", (576, HIDDEN), None),
        ("kv_a_layernorm", (512,), None), ("kv_b_proj", (32768, 512), 0), ("o_proj", (HIDDEN, 16384), 1),
    ]  # fmt: skip
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        yield from ((f"{at}.self_attn.{name}.weight", shape, dim) for name, shape, dim in attention)
        yield from ((f"{at}.{name}_layernorm.weight", (HIDDEN,), None) for name in ("input", "post_attention"))
        mlp, ffn = ("mlp", 18432) if i < DENSE else ("mlp.shared_experts", MOE)
        yield from ((f"{at}.{mlp}.{name}_proj.weight", (ffn, HIDDEN), 0) for name in ("gate", "up"))
        yield f"{at}.{mlp}.down_proj.weight", (HIDDEN, ffn), 1
        if i >= DENSE:
            yield from ((f"{at}.mlp.gate.weight", (EXPERTS, HIDDEN), None), (f"{at}.mlp.gate.e_score_correction_bias", (EXPERTS,), None))


def _routed(layer: int, expert: int) -> Iterator[tuple[str, Shape]]:
    at = f"model.layers.{layer}.mlp.experts.{expert}"
    yield from ((f"{at}.gate_proj.weight", (MOE, HIDDEN)), (f"{at}.up_proj.weight", (MOE, HIDDEN)), (f"{at}.down_proj.weight", (HIDDEN, MOE)))


def _part(shape: Shape, dim: int | None, rank: int, ranks: int) -> Box:
    return whole(shape) if dim is None else roles.sliced("", shape, dim, rank, ranks).box


def _need(name: str, box: Box) -> Need:
    shape = box_shape(box)
    return Need(name, box, Parameter(name, BF16, shape), whole(shape))


def llama_tp2_to_tp1() -> Facts:
    trainer = [RankShards(r, 0, tuple(Shard(TensorSpec(n, BF16, s), _part(s, d, r, 2)) for n, s, d in _llama_8b())) for r in range(2)]
    return trainer, {"tp1": [CoordinateNeeds("tp0", tuple(_need(n, whole(s)) for n, s, _ in _llama_8b()))]}


def deepseek_ep64_to_four_classes() -> Facts:
    """Two classes place experts linearly, two round robin."""
    trainer = []
    for r in range(64):
        local = [weight for i in range(DENSE, LAYERS) for e in range(4 * r, 4 * r + 4) for weight in _routed(i, e)]
        trainer.append(RankShards(r, 0, tuple(Shard(TensorSpec(n, BF16, s), whole(s)) for n, s in [*((n, s) for n, s, _ in _deepseek_dense()), *local])))
    placements: dict[str, Callable[[int], int]] = {"a": lambda e: e // 32, "b": lambda e: e // 32, "c": lambda e: e % 8, "d": lambda e: e % 8}
    return trainer, {name: [_deepseek_needs(r, place) for r in range(8)] for name, place in placements.items()}


def _deepseek_needs(rank: int, place: Callable[[int], int]) -> CoordinateNeeds:
    needs = [_need(n, _part(s, d, rank, 8)) for n, s, d in _deepseek_dense()]
    local = [expert for expert in range(EXPERTS) if place(expert) == rank]
    for layer in range(DENSE, LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        w13, w2 = Parameter(f"{at}.w13", BF16, (len(local), 2 * MOE, HIDDEN)), Parameter(f"{at}.w2", BF16, (len(local), HIDDEN, MOE))
        for i, expert in enumerate(local):
            (gate, up, down) = (name for name, _ in _routed(layer, expert))
            needs.append(Need(gate, ((0, MOE), (0, HIDDEN)), w13, ((i, i + 1), (0, MOE), (0, HIDDEN))))
            needs.append(Need(up, ((0, MOE), (0, HIDDEN)), w13, ((i, i + 1), (MOE, 2 * MOE), (0, HIDDEN))))
            needs.append(Need(down, ((0, HIDDEN), (0, MOE)), w2, ((i, i + 1), (0, HIDDEN), (0, MOE))))
    return CoordinateNeeds(f"tp{rank}", tuple(needs))


def grid(tensors: int, ranks: int, coordinates: int) -> tuple[Names, list[ShardTable], list[tuple[str, NeedTable]]]:
    """Every tensor cut into rows over all ranks and over all coordinates: as many atoms as tensors times ranks."""
    names = Names()
    column = np.array([names.number(f"model.layers.{i // 8}.w{i % 8}.weight") for i in range(tensors)], np.int32)
    kinds, params = np.zeros(tensors, np.int32), tuple(names.all())
    shape = (4096, 1024)
    trainer = [ShardTable(r, 0, (ShardKind(BF16, shape, _part(shape, 0, r, ranks)),), column, kinds) for r in range(ranks)]
    places = []
    for c in range(coordinates):
        box = _part(shape, 0, c, coordinates)
        kind = NeedKind(box, whole(box_shape(box)), BF16, box_shape(box), None, None)
        places.append(("class", NeedTable(f"tp{c}", params, (kind,), column, np.arange(tensors, dtype=np.int32), kinds, ())))
    return names, trainer, places


# ---------------------------------------------------------------- measurements: each in a process of its own


def _clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def _peak(name: str, target: float) -> Metric:
    return metric(f"{name}: peak memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB", most=target)


def measure_llama() -> list[Metric]:
    facts = llama_tp2_to_tp1()
    cold, found = _clocked(lambda: plan(*facts))
    copies, _ = _clocked(lambda: (found.source(0), found.source(1), found.coordinate("tp1", "tp0")))
    name = "8B TP2 -> TP1"
    return [metric(f"{name}: cold plan", 1e3 * cold, "ms", most=50), metric(f"{name}: copy lists of all ranks", 1e3 * copies, "ms")]


def measure_deepseek() -> list[Metric]:
    trainer, classes = deepseek_ep64_to_four_classes()
    from_facts, found = _clocked(lambda: plan(trainer, classes))
    copies, _ = _clocked(lambda: (found.source(0), found.coordinate("a", "tp0")))
    ranks = {rank.rank: encode_shards(rank) for rank in trainer}
    encode, _ = _clocked(lambda: encode_needs(classes["a"][0]))
    needs = {class_: {one.id: encode_needs(one) for one in each} for class_, each in classes.items()}
    document = PlanDocument({r: layout_hash(b) for r, b in ranks.items()}, {c: {i: layout_hash(b) for i, b in each.items()} for c, each in needs.items()})
    blobs = {layout_hash(blob): blob for blob in [*ranks.values(), *(blob for each in needs.values() for blob in each.values())]}
    shards, wanted = sum(len(rank.shards) for rank in trainer), sum(len(one.needs) for each in classes.values() for one in each)
    tensors = len({shard.tensor.name for rank in trainer for shard in rank.shards})
    from_blobs, again = _clocked(lambda: plan_document(document, blobs.__getitem__))
    assert again.runs == found.runs
    warm, _ = _clocked(lambda: (plan_key(PlanDocument.decode(document.encode())), layout_hash(needs["a"]["tp0"])))
    name = "DeepSeek-like EP64 -> TP8+EP8 x 4"
    return [
        metric(f"{name}: tensors", tensors),
        metric(f"{name}: shards", shards),
        metric(f"{name}: needs", wanted),
        metric(f"{name}: cold plan from layout blobs", from_blobs, "s", most=2),
        metric(f"{name}: cold plan from facts", from_facts, "s", most=2),
        _peak(name, 1024),
        metric(f"{name}: copy lists of rank and coordinate", 1e3 * copies, "ms"),
        metric(f"{name}: layout blob of a coordinate", 1e3 * encode, "ms"),
        metric(f"{name}: most runs of a coordinate", max(len(found.coordinate_runs(*place)) for place in found.coordinates), "runs"),
        metric(f"{name}: most served over least served", _imbalance(found), "ratio", most=1.05),
        metric(f"{name}: warm key", 1e3 * warm, "ms", most=20),
    ]


def _imbalance(found: Plan) -> float:
    loads = dict.fromkeys(found.ranks, 0)
    for run in found.runs:
        loads[run.owners[0]] += run.bytes
    return max(loads.values()) / min(loads.values())


def measure_grid() -> list[Metric]:
    facts = grid(40_000, 64, 64)
    cold, _ = _clocked(lambda: plan_tables(*facts))
    name = "40,000 tensors x 64 x 64 ranks"
    return [metric(f"{name}: cold plan", cold, "s", most=2), _peak(name, 1024)]


def measure_sweep() -> list[Metric]:
    """The slope of log time over log (tensors x ranks)."""
    sizes = [(tensors, ranks) for ranks in (8, 32) for tensors in (1_250, 5_000, 20_000)]
    found = []
    for tensors, ranks in sizes:
        facts = grid(tensors, ranks, ranks)
        found.append((tensors * ranks, min(_clocked(partial(plan_tables, *facts))[0] for _ in range(3))))
    slope = float(np.polyfit([math.log(size) for size, _ in found], [math.log(seconds) for _, seconds in found], 1)[0])
    points = [
        metric(f"sweep: {tensors} tensors x {ranks} x {ranks} ranks", 1e3 * seconds, "ms") for (tensors, ranks), (_, seconds) in zip(sizes, found, strict=True)
    ]
    return [*points, metric("sweep: exponent of time over tensors x ranks", slope)]


def measure_digest() -> list[Metric]:
    """One core, memory that no cache holds, best of a few: also of what one core reads of it when it only adds it up."""
    data = np.random.default_rng(1).integers(0, 256, 512 << 20, dtype=np.uint8)
    digests = Digests("00000000-0000-0000-0000-000000000001", 7)

    def rate(work: Callable[[], Any]) -> float:
        return data.nbytes / min(_clocked(work)[0] for _ in range(4)) / 1e9

    reads = rate(lambda: np.add.reduce(data.view(np.uint64)))
    name = "digest on one core"
    return [
        metric(f"{name}: memory that it adds up", reads, "GB/s"),
        metric(f"{name}: rate", rate(lambda: digests.of(data)), "GB/s", least=min(3.0, 0.6 * reads)),
    ]


MEASUREMENTS = {"digest": measure_digest, "llama": measure_llama, "deepseek": measure_deepseek, "grid": measure_grid, "sweep": measure_sweep}


# ---------------------------------------------------------------- the result


def main() -> None:
    metrics: list[Metric] = []
    for name in MEASUREMENTS:
        child = subprocess.run([sys.executable, "-m", "bench.plan", name], check=True, capture_output=True, text=True, timeout=300)
        metrics += METRICS.validate_json(child.stdout)
    record("plan", metrics, machine(), ("numpy",))


if __name__ == "__main__":
    sys.stdout.buffer.write(METRICS.dump_json(MEASUREMENTS[sys.argv[1]]()))

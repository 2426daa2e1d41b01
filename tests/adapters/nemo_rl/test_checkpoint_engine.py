"""NeMo-RL's refit over a group, driven as NeMo-RL drives it.

The contract is that of the public sources of NVIDIA-NeMo/RL, version 0.6.0, main of 2026-08-22 (commit 7ea279abfbeb), where `refit_transport:
"module:ClassName"` names a checkpoint engine: `nemo_rl/utils/checkpoint_engines/base.py` (the methods, and how the name becomes an object),
`nemo_rl/weight_sync/checkpoint_engine_weight_synchronizer.py` (their order, and what of it is for all workers), and the two worker mixins
`nemo_rl/models/{policy/workers,generation/vllm}/checkpoint_engine.py` (who calls them, with what). `Synchronizer` below makes those calls, in that order,
from as many threads as NeMo-RL has workers; engines are torch modules whose loader takes tensors by name.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from refit_api.errors import PeerUnavailable, ShapeMismatch, SpecError, UnsupportedLayout
from refit_api.mounted import Engine, Rollout, Trainer
from refit_api.tensors import Dtype, TensorSpec, box_elements, whole
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.memory import Fabric, MemoryManifests, MemoryTransport
from refit_runtime.adapters.nemo_rl import Portions, RefitCheckpointEngine, batches, portion
from refit_runtime.ports import Seams
from refit_runtime.settings import RuntimeSettings
from refit_runtime.wiring import DeviceMemory, catalog_of

from e2e.cluster.apiserver import free_ports
from tests.pods import environment, mounted

OURS = "refit_runtime.adapters.nemo_rl:RefitCheckpointEngine"
MIB = 1 << 20


class OverMemory(RefitCheckpointEngine):
    """Within one process."""

    fabric: ClassVar[Fabric]

    def seams(self, settings: RuntimeSettings, local_rank: int) -> Seams:
        return Seams(catalog_of(settings), MemoryTransport(self.fabric), MemoryManifests(self.fabric), DeviceMemory(), SystemClock(), Random(local_rank))


@dataclass
class Worker:
    """One of NeMo-RL's, of either side, with what its pod has. `model`: what a policy trains, or an engine computes with."""

    rank: int
    model: dict[str, torch.Tensor]
    pod: Callable[[], None]
    engine: Any = None
    batches: list[int] = field(default_factory=list)

    def init_checkpoint_engine(self, transport: str, bucket_size: int, **kwargs: Any) -> None:
        if self.engine is None:
            self.pod()
            module, name = transport.split(":", 1)
            self.engine = getattr(importlib.import_module(module), name)(bucket_size=bucket_size, **kwargs)

    def prepare(self) -> Any:
        return {**self.engine.prepare(), "rank": self.rank}

    def send(self) -> None:
        assert self.engine.get_target_weight_layout() is None
        asyncio.run(self.engine.send_weights((name, tensor.clone()) for name, tensor in self.model.items()))

    def update(self) -> bool:
        async def loaded() -> bool:
            async for batch in self.engine.receive_weight_batches():
                self.batches.append(sum(tensor.nbytes for _, tensor in batch))
                for name, tensor in batch:
                    self.model[name].copy_(tensor)
                    tensor.zero_()  # a loader may write into what it gets
            return True

        return asyncio.run(loaded())


class Synchronizer:
    """As NeMo-RL's: all workers are asked at once, and what any of them raises is raised."""

    def __init__(self, transport: str, policy: list[Worker], rollout: list[Worker], release_after_refit: bool) -> None:
        self.transport, self.policy, self.rollout, self.release_after_refit = transport, policy, rollout, release_after_refit
        self.ready = False

    def all(self, *calls: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(calls)) as pool:
            return [done.result() for done in [pool.submit(call) for call in calls]]

    def init_communicator(self) -> None:
        if self.ready:
            return
        workers = self.policy + self.rollout
        for worker in workers:  # one after another: they take their pod's environment from one process
            worker.init_checkpoint_engine(self.transport, 2 * MIB, release_after_refit=self.release_after_refit)
        metadata = self.all(*(worker.prepare for worker in workers))
        topology = {"train_world_size": len(self.policy), "rollout_world_size": len(self.rollout), "metadata": metadata}
        self.all(
            *(partial(worker.engine.init_policy_process_group, worker_rank=worker.rank, **topology) for worker in self.policy),
            *(partial(worker.engine.init_rollout_process_group, rollout_rank=worker.rank, **topology) for worker in self.rollout),
        )
        self.ready = True

    def sync_weights(self) -> None:
        self.init_communicator()
        try:
            results = self.all(*(worker.send for worker in self.policy), *(worker.update for worker in self.rollout))
            assert all(results[len(self.policy) :])
        finally:
            if self.release_after_refit:
                self.shutdown()

    def shutdown(self) -> None:
        if self.ready:
            self.all(*(worker.engine.finalize for worker in self.policy + self.rollout))
        self.ready = False


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Large tensors that ranks share, small ones that they do not, a scalar."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(1201, 512, generator=draw),
        "model.layers.0.mlp.up_proj.weight": torch.randn(1024, 2048, generator=draw).to(torch.bfloat16),
        "model.layers.0.mlp.up_proj.bias": torch.randn(1024, generator=draw).to(torch.bfloat16),
        "model.norm.weight": torch.randn(512, generator=draw),
        "model.layers.0.self_attn.k_scale": torch.randn((), generator=draw),
    }


@pytest.fixture
def staging() -> str:
    return "Full"


@pytest.fixture
def worker(catalog_server: LocalCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: Any) -> Callable[[Role, int], Worker]:
    """In a pod of the group, of which the framework drives the generators."""
    ports = iter(free_ports(8))

    def made(role: Role, rank: int) -> Worker:
        name = f"{role.value.lower()}-{rank}"
        given = mounted(
            catalog_server, tmp_path, name, role,
            worker_port=next(ports) - (rank if role is Role.GENERATOR else 0),
            trainer=Trainer(redundancy=1, snapshot="InPlace"), engine=Engine(kind="Custom", staging=staging),
            rollout=Rollout(policy="Manual", progress_deadline_seconds=60),
        )  # fmt: skip
        variables = environment(given, tmp_path, name)

        def pod() -> None:
            for variable in ("POD_NAME", "POD_UID", "POD_NAMESPACE", "POD_IP", "REFIT_SETTINGS"):
                monkeypatch.setenv(variable, variables[variable])

        return Worker(rank, weights(100 + rank) if role is Role.GENERATOR else weights(1), pod)

    return made


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("transport", "release", "staging"),
    [(f"{__name__}:OverMemory", False, "Full"), (f"{__name__}:OverMemory", True, "Full"), (OURS, False, "Full"), (OURS, False, "Windowed")],
    ids=["memory", "released each time", "nixl", "nixl, windowed"],
)
def test_every_refit_brings_what_the_policy_sent_to_every_rollout_rank(
    transport: str, release: bool, worker: Callable[[Role, int], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OverMemory, "fabric", Fabric(), raising=False)
    policy, rollout = [worker(Role.TRAINER, rank) for rank in range(2)], [worker(Role.GENERATOR, rank) for rank in range(2)]
    synchronizer = Synchronizer(transport, policy, rollout, release)
    synchronizer.init_communicator()
    for step in range(3):
        for rank in policy:
            rank.model = weights(step)
        synchronizer.sync_weights()
        assert all(same(weights(step), rank.model) for rank in rollout)
    assert all(max(rank.batches) <= 4 * MIB for rank in rollout)
    synchronizer.shutdown()
    synchronizer.shutdown()


def test_the_methods_are_those_that_are_called() -> None:
    """A class of NeMo-RL's registry is made by keyword; one side is a coroutine, the other an asynchronous generator."""
    assert next(iter(inspect.signature(RefitCheckpointEngine).parameters)) == "bucket_size"
    assert inspect.iscoroutinefunction(RefitCheckpointEngine.send_weights)
    assert inspect.isasyncgenfunction(RefitCheckpointEngine.receive_weight_batches)
    with pytest.raises(TypeError, match="compression"):
        RefitCheckpointEngine(bucket_size=MIB, compression="zstd")  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="device 'tpu'; expected cpu or cuda"):
        RefitCheckpointEngine(MIB, "tpu")


def test_a_rollout_rank_that_nobody_sends_to_says_so(worker: Callable[[Role, int], Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives nothing to the engine."""
    monkeypatch.setattr(OverMemory, "fabric", Fabric(), raising=False)
    policy, rollout = worker(Role.TRAINER, 0), worker(Role.GENERATOR, 0)
    before = {name: tensor.clone() for name, tensor in rollout.model.items()}
    synchronizer = Synchronizer(f"{__name__}:OverMemory", [policy], [rollout], False)
    rollout.pod()
    monkeypatch.setattr(RuntimeSettings, "load", lambda load=RuntimeSettings.load: hasty(load()))
    synchronizer.init_communicator()
    with pytest.raises(PeerUnavailable, match=r"not heard in 3 s: the first policy rank"):
        rollout.update()
    assert same(before, rollout.model)
    synchronizer.shutdown()


def hasty(settings: RuntimeSettings) -> RuntimeSettings:
    return settings.model_copy(update={"rollout": Rollout(policy="Manual", progress_deadline_seconds=3.0)})


CHANGED: dict[str, tuple[list[tuple[str, torch.Tensor]], type[Exception], str]] = {
    "another shape": ([("a", torch.zeros(3)), ("b", torch.zeros(2))], ShapeMismatch, r"a: float32 \(3,\), in the first refit float32 \(2,\)"),
    "another type": ([("a", torch.zeros(2).half()), ("b", torch.zeros(2))], ShapeMismatch, r"a: float16 \(2,\)"),
    "one more": ([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(2))], ShapeMismatch, "c: .* not there"),
    "one less": ([("a", torch.zeros(2))], ShapeMismatch, r"1 tensors of the first refit are not in this one \(b\)"),
    "one twice": ([("a", torch.zeros(2)), ("a", torch.zeros(2))], UnsupportedLayout, "a: sent twice"),
    "no type of a checkpoint": ([("a", torch.zeros(2, dtype=torch.complex64))], UnsupportedLayout, "complex64"),
}


@pytest.mark.parametrize(("sent", "kind", "said"), CHANGED.values(), ids=CHANGED.keys())
def test_a_refit_of_other_tensors_is_refused_on_every_rank(sent: list[tuple[str, torch.Tensor]], kind: type[Exception], said: str) -> None:
    """Even by one that publishes none of them."""
    for rank in range(3):
        portions = Portions(rank, 3)
        portions.take(iter([("a", torch.zeros(2)), ("b", torch.zeros(2))]))
        with pytest.raises(kind, match=said):
            portions.take(iter(sent))


def test_each_byte_is_published_by_one_rank_and_the_load_is_even() -> None:
    world = 5
    specs = [TensorSpec(str(rows), Dtype.BFLOAT16, (rows, 1000)) for rows in (3, 700, 9001, 1, 50_000)] + [TensorSpec("scalar", Dtype.FLOAT32, ())]
    loads, first = [0] * world, 0
    for spec in specs:
        found = [portion(spec, first, rank, world) for rank in range(world)]
        boxes = [box for box, _ in found if box is not None]
        assert sum(map(box_elements, boxes)) == box_elements(whole(spec.shape))
        assert len({box[0] for box in boxes if box}) == len([box for box in boxes if box])
        loads = [load + (box_elements(box) if box is not None else 0) for load, (box, _) in zip(loads, found, strict=True)]
        ((first),) = {following for _, following in found}
    assert max(loads) < 1.1 * min(loads)


@pytest.mark.parametrize(("sizes", "expected"), [([3, 3, 3], [6, 3]), ([9, 1, 1], [9, 2]), ([], []), ([9], [9])])
def test_loaders_get_batches_of_a_bucket_or_of_one_tensor(sizes: list[int], expected: list[int]) -> None:
    tensors: Iterator[tuple[str, torch.Tensor]] = ((str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes)
    assert [sum(tensor.nbytes for _, tensor in batch) for batch in batches(tensors, 6)] == expected

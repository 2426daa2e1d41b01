"""A group in one process: the real catalog on loopback, trainers and engine ranks over the memory transport, faults by the pod that is read from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from refit_api.mounted import Engine, Group, Model, Rollout, Trainer, TransportSettings, Verification, Versions
from refit_api.tensors import Dtype
from refit_api.wire import GroupRef, Order, Report, Role, Source, Version, VersionPhase
from refit_operator.catalog.local import TERMS, LocalCatalog, local_catalog
from refit_runtime.adapters.catalog import GrpcCatalog
from refit_runtime.adapters.clock import SystemClock
from refit_runtime.adapters.memory import Fabric, Fault, FaultyTransport, MemoryManifests, MemoryTransport
from refit_runtime.adapters.torch_module import TorchSource, TorchTarget
from refit_runtime.ports import CommitOrder, Seams, StageOrder, Transport, WeightSource
from refit_runtime.rank import GeneratorRank
from refit_runtime.settings import Pod, Run, RuntimeSettings
from refit_runtime.trainer import TrainerClient
from refit_runtime.wiring import DeviceMemory

MIB = 1 << 20


class Net(torch.nn.Module):
    """5 MiB in float32: a run has several chunks of 1 MiB, and a last one that is short."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Parameter(torch.randn(700, 512))
        self.layer = torch.nn.Linear(512, 1800)
        self.norm = torch.nn.Parameter(torch.randn(512))


class World:
    """`faults` by the UID of the pod that is read from; set before the reader connects."""

    def __init__(self, catalog: LocalCatalog, folder: Path, stack: ExitStack, lease_seconds: float, publish_seconds: float = 20.0) -> None:
        self.catalog, self.folder, self.stack = catalog, folder, stack
        self.fabric, self.faults = Fabric(), dict[str, Fault]()
        self.lease_seconds, self.publish_seconds = lease_seconds, publish_seconds
        (folder / "ca").write_bytes(catalog.ca)

    def settings(self, uid: str, role: Role, **changes: Any) -> RuntimeSettings:
        token = self.folder / uid
        token.write_text(self.catalog.admit(role, uid))
        group = self.catalog.group
        return RuntimeSettings(
            group=Group(namespace=group.namespace, name=group.name),
            model=Model(name="tiny"),
            catalog=self.catalog.address,
            ca_file=str(self.folder / "ca"),
            token_file=str(token),
            pod=Pod(name=uid, uid=uid, namespace=group.namespace, ip="127.0.0.1"),
            run=Run(refit_run_id="run-1"),
            versions=Versions(lease_seconds=self.lease_seconds, drain_seconds=2, publish_deadline_seconds=self.publish_seconds),
            transport=TransportSettings(chunk_bytes=MIB),
            **changes,
        )

    def transport(self) -> Transport:
        return MemoryTransport(self.fabric)

    def seams(self, settings: RuntimeSettings) -> Seams:
        catalog = GrpcCatalog(settings.catalog, settings.ca_file, settings.token_file)
        self.stack.callback(catalog.close)
        transport = FaultyTransport(self.transport(), self.faults, SystemClock())
        return Seams(catalog, transport, MemoryManifests(self.fabric), DeviceMemory(), SystemClock(), Random(settings.pod.uid))

    def trainer(
        self, module: torch.nn.Module, rank: int = 0, world: int = 1, *, uid: str = "", replica: int = 0, run_id: str = "run-1", parts: Any = None,
        dtype: Dtype | None = None, options: Trainer | None = None, wrap: Callable[[Seams], Seams] = lambda seams: seams,
    ) -> TrainerClient:  # fmt: skip
        return self.publisher(TorchSource(module, rank, replica, parts, dtype), rank, world, uid, run_id, options, wrap)

    def publisher(
        self, source: WeightSource, rank: int = 0, world: int = 1, uid: str = "", run_id: str = "run-1", options: Trainer | None = None,
        wrap: Callable[[Seams], Seams] = lambda seams: seams,
    ) -> TrainerClient:  # fmt: skip
        settings = self.settings(uid or f"trainer-{rank}", Role.TRAINER, trainer=options or Trainer(redundancy=TERMS.redundancy))
        client = TrainerClient(settings, rank, world, wrap(self.seams(settings)), run_id)
        client.bind(source)
        self.stack.callback(client.close)
        return client

    def rank(
        self, module: torch.nn.Module, uid: str = "generator-0", *, coordinate: str = "tp0", rank: int = 0, world: int = 1, target: Any = None,
        engine: Engine | None = None, installed: Any = "Blocking", wrap: Callable[[Seams], Seams] = lambda seams: seams, close: bool = True,
        rollout: Rollout | None = None,
    ) -> GeneratorRank:  # fmt: skip
        settings = self.settings(
            uid,
            Role.GENERATOR,
            engine=engine or Engine(kind="Custom"),
            verification=Verification(installed=installed),
            rollout=rollout or Rollout(policy="Manual"),
        )
        made = GeneratorRank(settings, wrap(self.seams(settings)), coordinate, rank, world)
        made.bind(target if target is not None else TorchTarget(module, coordinate))
        if close:
            self.stack.callback(made.close)
        return made

    def version(self, number: int, seconds: float = 10.0) -> Version:
        """Once it left Publishing."""
        deadline = time.monotonic() + seconds
        while True:
            facts = self.catalog.run(self.catalog.store.facts(self.catalog.group))
            found = next((state.version for state in facts.versions if state.version.number == number), None)
            if found is not None and found.phase is not VersionPhase.PUBLISHING:
                return found
            assert time.monotonic() < deadline, f"version {number}: {found}"
            time.sleep(0.02)

    def report(self, rank: GeneratorRank) -> Report:
        """What an agent would say."""
        said = Report(rank.worker.group, rank.worker.ref, 0, 0, (rank.report(),))
        rank._seams.catalog.report(said)
        return said

    def source(self, rank: GeneratorRank) -> Source:
        """The rank as a relay."""
        request = rank.worker._request
        assert request is not None
        assert request.endpoint is not None
        return Source(rank.worker.ref, request.endpoint, coordinate=request.coordinate)


class Orders:
    """Orders with rising numbers."""

    def __init__(self) -> None:
        self.seq = 0

    def stage(self, number: int, sources: tuple[Source, ...] = (), seconds: float = 60.0, coordinate: str = "tp0") -> StageOrder:
        self.seq += 1
        return StageOrder(1, self.seq, number, {coordinate: sources} if sources else {}, seconds)

    def commit(self, number: int, seconds: float = 5.0) -> CommitOrder:
        self.seq += 1
        return CommitOrder(1, self.seq, number, Order.COMMIT, seconds)


@pytest.fixture
def orders() -> Orders:
    return Orders()


@pytest.fixture
def net() -> type[Net]:
    return Net


@pytest.fixture
def terms() -> dict[str, Any]:
    """Changes to the group's terms: overridden by tests."""
    return {}


@pytest.fixture
def world(tmp_path: Path, terms: dict[str, Any]) -> Iterator[World]:
    changed = replace(TERMS, **{"lease_seconds": 15.0, "drain_seconds": 2.0, "publish_deadline_seconds": 20.0, **terms})
    with local_catalog(GroupRef("default", "demo"), changed) as catalog, ExitStack() as stack:
        yield World(catalog, tmp_path, stack, changed.lease_seconds)

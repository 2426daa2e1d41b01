"""Two processes on one device, over NIXL from device memory into device memory; the catalog and all settings are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_api.errors import DigestMismatch
from refit_api.mounted import Engine, Rollout, Trainer, Verification
from refit_api.wire import Role
from refit_runtime import GeneratorClient
from refit_runtime.adapters.torch_module import TorchTarget
from refit_runtime.settings import RuntimeSettings

from tests.gpu.publisher import sums

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).parents[2]
PORTS = {Role.TRAINER: 27471, Role.GENERATOR: 27481}


class Publisher:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        assert said, "the publisher ended: its errors are above"
        return json.loads(said)


@contextmanager
def publisher(settings: RuntimeSettings, folder: Path) -> Iterator[Publisher]:
    mounted = folder / "settings.json"
    mounted.write_text(settings.model_dump_json(by_alias=True, exclude={"pod", "run", "ucx"}))
    pod = {f"POD_{name.upper()}": value for name, value in settings.pod.model_dump().items()}
    environment = {**os.environ, **pod, "REFIT_SETTINGS": str(mounted)}
    command = [sys.executable, "-m", "tests.gpu.publisher"]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Publisher(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.mark.parametrize("snapshot", ["Device", "InPlace"])
def test_versions_go_from_device_to_device(world: Any, net: Any, tmp_path: Path, snapshot: Any) -> None:
    """Also in a warm round nothing is registered or connected, and a byte that changed in the trainer's memory is found and never installed."""
    settings = world.settings(
        "generator-0", Role.GENERATOR, engine=Engine(kind="Custom"), verification=Verification(installed="Blocking"), rollout=Rollout(policy="Manual"),
        worker_port=PORTS[Role.GENERATOR],
    )  # fmt: skip
    trainer = world.settings("trainer-0", Role.TRAINER, trainer=Trainer(snapshot=snapshot, redundancy=1), worker_port=PORTS[Role.TRAINER])
    target = net(2)
    with closing(GeneratorClient(settings, "tp0")) as client:
        client.bind(TorchTarget(target))
        rank = client._rank
        assert rank._seams.transport.registration().memory == "VRAM"
        with publisher(trainer, tmp_path) as source:
            counters = []
            for _ in range(3):
                said = source.tell("publish")
                client.install(client.stage(said["number"], timeout=30))
                torch.cuda.synchronize()
                assert sums(target) == said["sums"]
                counters.append({name: rank._seams.transport.counters()[name] for name in ("registrations", "connections")})
            assert counters[1:] == counters[:-1] == [{"registrations": 1, "connections": 1}] * 2
            before = sums(target)
            said = source.tell("damage")
            with pytest.raises(DigestMismatch) as caught:
                client.stage(said["number"], timeout=30)
            assert caught.value.facts["source"] == "trainer-0"
            if snapshot == "Device":
                assert caught.value.facts["block"] == "1"
            assert sums(target) == before
            client.release()

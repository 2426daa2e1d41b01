"""The real thing once: processes sharded by FSDP2, bound as they are, pulled over NIXL by an engine that has the model whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_api.mounted import Mounted, Rollout
from refit_api.wire import Role
from refit_runtime import GeneratorClient
from refit_runtime.adapters.torch_module import TorchTarget

from tests.adapters.fsdp.models import Tiny

ROOT = Path(__file__).parents[3]


def test_a_sharded_module_is_bound_and_pulled(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    port = 30_000 + os.getpid() % 1000 * 10
    engine = Tiny(seed=8)
    engine.head = torch.nn.Identity()  # type: ignore[assignment]  # the checkpoint's name is embed.weight
    reader = GeneratorClient(world.settings("engine", Role.GENERATOR, rollout=Rollout(policy="Manual"), worker_port=port + 5), "tp0")
    world.stack.callback(reader.close)
    reader.bind(TorchTarget(engine))
    settings = world.settings("trainer", Role.TRAINER, worker_port=port)
    (tmp_path / "settings.json").write_text(Mounted(**{name: getattr(settings, name) for name in Mounted.model_fields}).model_dump_json(by_alias=True))
    pod = {"POD_NAME": "trainer", "POD_UID": "trainer", "POD_NAMESPACE": settings.pod.namespace, "POD_IP": "127.0.0.1"}
    more = {"REFIT_SETTINGS": str(tmp_path / "settings.json"), "REFIT_RUN_ID": "run-1", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("nixl_trainer.py")), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | pod | more, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            number = next(int(line.removeprefix("said: ")) for line in trainer.stdout if line.startswith("said: "))
            reader.install(reader.stage(number, 60))
        finally:
            assert trainer.stdin is not None
            trainer.stdin.close()
            assert trainer.wait(60) == 0
    whole = torch.load(tmp_path / "whole.pt")
    for name, parameter in engine.named_parameters():
        assert torch.equal(parameter, whole[name]), name
    assert reader.held() == (number,)

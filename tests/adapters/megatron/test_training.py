"""The example trainer as it runs in a pod: two ranks under torchrun, a real catalog, NIXL. An engine gets what an independent export wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from refit_api.mounted import Engine, Group, Model, Rollout, Trainer, Versions
from refit_api.wire import GroupRef, Role
from refit_operator.catalog.local import TERMS, LocalCatalog, local_catalog
from refit_runtime import GeneratorClient
from refit_runtime.adapters.torch_module import TorchTarget
from refit_runtime.settings import Pod, Run, RuntimeSettings
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from e2e.workloads.text import text
from e2e.workloads.tiny_llama import TinyLlama

REPOSITORY = Path(__file__).parents[3]
PORTS = {Role.TRAINER: 27451, Role.GENERATOR: 27461}  # of the first process; others count up
SECONDS = 240.0  # for the slowest machine; importing torch and Megatron is most of it


def test_an_engine_serves_what_the_trainer_exported_version_after_version(tmp_path: Path) -> None:
    terms = replace(TERMS, lease_seconds=15.0, drain_seconds=2.0)
    engine = LlamaForCausalLM(LlamaConfig(**TinyLlama().huggingface())).bfloat16()
    with local_catalog(GroupRef("default", "demo"), terms) as catalog, ExitStack() as stack:
        client = stack.enter_context(closing(GeneratorClient(pod(catalog, tmp_path, "generator-0", Role.GENERATOR), "tp0")))
        client.bind(TorchTarget(engine))
        trainer = stack.enter_context(training(pod(catalog, tmp_path, "trainer-0", Role.TRAINER), tmp_path))
        seen: list[dict[str, torch.Tensor]] = []
        losses = []
        for version in (1, 2):
            (tmp_path / "allowed").write_text(str(version))
            checkpoint = appeared(tmp_path / "export", version, trainer)
            client.install(client.stage(int(checkpoint.name), timeout=60))
            expected = load_file(checkpoint / "model.safetensors")
            found = dict(engine.named_parameters())
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), f"version {checkpoint.name}"
            seen.append(expected)
            losses.append(loss_of(engine))
        assert all(not torch.equal(seen[0][name], seen[1][name]) for name in seen[0]), "training changed every tensor"
        assert losses[1] < losses[0] - 0.2, "the engine computes what the trainer trained"
        client.release()
        trainer.send_signal(signal.SIGTERM)
        trainer.wait(SECONDS)
        assert catalog.run(catalog.store.facts(catalog.group)).trainers == (), "the ranks left by themselves"


def pod(catalog: LocalCatalog, folder: Path, uid: str, role: Role) -> RuntimeSettings:
    token, ca = folder / f"{uid}-token", folder / "ca.crt"
    token.write_text(catalog.admit(role, uid))
    ca.write_bytes(catalog.ca)
    return RuntimeSettings(
        group=Group(namespace=catalog.group.namespace, name=catalog.group.name),
        model=Model(name="tiny"),
        catalog=catalog.address,
        trainer=Trainer(redundancy=TERMS.redundancy),
        engine=Engine(kind="Custom"),
        rollout=Rollout(policy="Manual"),
        versions=Versions(lease_seconds=15.0, drain_seconds=2.0),
        worker_port=PORTS[role],
        ca_file=str(ca),
        token_file=str(token),
        pod=Pod(name=uid, uid=uid, namespace=catalog.group.namespace, ip="127.0.0.1"),
        run=Run(refit_run_id="unused"),
    )


@contextmanager
def training(settings: RuntimeSettings, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The pod: its command, its environment, its mounted settings."""
    mounted = folder / "settings.json"
    mounted.write_text(settings.model_dump_json(by_alias=True, exclude={"pod", "run", "ucx"}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("REFIT_", "TRAINER_", "POD_"))} | {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "REFIT_SETTINGS": str(mounted),
        **{f"POD_{name.upper()}": value for name, value in settings.pod.model_dump().items()},
        "TRAINER_VERSIONS": "2",
        "TRAINER_STEPS": "20",
        "TRAINER_INTERVAL_SECONDS": "0",
        "TRAINER_LEARNING_RATE": "0.01",
        "TRAINER_EXPORT": str(folder / "export"),
        "TRAINER_ALLOWED": str(folder / "allowed"),
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m", "e2e.workloads.trainer"]
    with (folder / "trainer.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *launch], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    except BaseException:
        sys.stderr.write((folder / "trainer.log").read_text()[-8000:])
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def appeared(export: Path, count: int, trainer: subprocess.Popen[bytes]) -> Path:
    """The newest checkpoint, once there are `count`."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert trainer.poll() is None, "the trainer ended"
        found = sorted(export.glob("[0-9]*"), key=lambda path: int(path.name)) if export.exists() else []
        if len(found) == count:
            return found[-1]
        time.sleep(0.2)
    raise AssertionError(f"no checkpoint number {count} within {SECONDS} s")


def loss_of(engine: torch.nn.Module) -> float:
    tokens = next(text(TinyLlama().words, seed=7))
    with torch.no_grad():
        return float(engine(input_ids=tokens, labels=tokens).loss)

"""A trainer without a framework: a plain torch module of one process that changes its weights and publishes them. An example to copy, and what is measured.

client.bind(TorchSource(module))
client.publish(step)
"""

from __future__ import annotations

import json
import signal
from contextlib import closing
from uuid import uuid4

import structlog
import torch
from refit_runtime import TrainerClient
from refit_runtime.adapters.torch_module import TorchSource
from refit_runtime.settings import RuntimeSettings

from e2e.workloads.custom_engine import engine
from e2e.workloads.publishing import leave, publish, wait_until_allowed
from e2e.workloads.settings import TrainerProgram, read
from e2e.workloads.tiny_llama import TinyLlama

log = structlog.get_logger(__name__)


def main() -> None:
    program = read(TrainerProgram)
    signal.signal(signal.SIGTERM, leave)
    torch.set_num_threads(1)
    torch.manual_seed(program.seed)
    module, _ = engine(TinyLlama().scaled(program.scale), fused=False)
    with closing(TrainerClient(RuntimeSettings.load(), 0, 1, run_id=uuid4().hex)) as client, torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-1.0, 1.0)
        client.bind(TorchSource(module))
        train(client, module, program)


def train(client: TrainerClient, module: torch.nn.Module, program: TrainerProgram) -> None:
    for step in range(program.versions):
        wait_until_allowed(program, step)
        version = publish(client, step, program.publish_patience_seconds)
        log.info("published", version=None if version is None else version.number, step=step)
        if program.counters is not None:
            program.counters.write_text(json.dumps(client.counters()))
        for parameter in module.parameters():
            parameter.mul_(-0.5)
    signal.pause()


if __name__ == "__main__":
    main()

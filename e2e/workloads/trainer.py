"""A trainer that publishes its weights: Megatron-core, tensor-parallel over the ranks that torchrun starts. An example to copy.

    python -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m e2e.workloads.trainer

What a framework has to do is in `main` and `train`: make the client before the process group, bind the model once it exists, publish before the first
optimiser step and after each stretch of training, close at the end. A restarted pod is a new run: it trains from the start and its steps are new versions.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing

import structlog
import torch
from refit_runtime import TrainerClient
from refit_runtime.adapters.megatron.mesh import Mesh
from refit_runtime.adapters.megatron.source import MegatronSource
from refit_runtime.settings import RuntimeSettings

from e2e.workloads.checkpoint import export
from e2e.workloads.megatron_cpu import cpu, parallel_state
from e2e.workloads.megatron_llama import Training, build, groups
from e2e.workloads.publishing import leave, publish, wait_until_allowed
from e2e.workloads.settings import Launched, TrainerProgram, read
from e2e.workloads.tiny_llama import TinyLlama

log = structlog.get_logger(__name__)


def main() -> None:
    program, place = read(TrainerProgram), read(Launched)
    signal.signal(signal.SIGTERM, leave)
    torch.set_num_threads(1)
    client = TrainerClient(RuntimeSettings.load(), place.rank, place.world_size)
    with closing(client), groups(place.world_size, program.publish_patience_seconds + 60), cpu():
        train(client, program, place)


def train(client: TrainerClient, program: TrainerProgram, place: Launched) -> None:
    sizes = TinyLlama().scaled(program.scale)
    model = build(sizes, place.world_size, program.seed)
    client.bind(MegatronSource([model], Mesh.of(parallel_state, place.rank), "llama", sizes.words))
    training = Training(model, sizes, program.learning_rate, program.seed)
    for count in range(program.versions):
        wait_until_allowed(program, count)
        step, began = count * program.steps, time.monotonic()
        version = publish(client, step, program.publish_patience_seconds)
        if version is not None and program.export is not None:
            export(model, sizes, program.export / str(version.number))
        log.info("published", version=None if version is None else version.number, step=step, rank=place.rank)
        if count + 1 < program.versions:
            losses = [training.step() for _ in range(program.steps)]
            log.info("trained", steps=program.steps, rank=place.rank, loss=round(losses[-1], 3))
            time.sleep(max(0.0, began + program.interval_seconds - time.monotonic()))
    log.info("all versions are published and stay on offer until this pod ends", rank=place.rank)
    signal.pause()


if __name__ == "__main__":
    main()

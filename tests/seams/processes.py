"""Programs of the tests that need processes of their own: a plain trainer, and the example engine, over NIXL on the loopback."""

from __future__ import annotations

import asyncio
import sys

import torch
from refit_runtime import TrainerClient
from refit_runtime.adapters.torch_module import TorchSource
from refit_runtime.settings import RuntimeSettings

from e2e.workloads.settings import EngineProgram
from e2e.workloads.tiny_llama import TinyLlama


def say(*words: object) -> None:
    """To the test; logs go the same way, without this prefix."""
    sys.stdout.write(" ".join(map(str, ("said:", *words))) + "\n")
    sys.stdout.flush()


def trainer() -> None:
    """Publishes one version for each line on standard input; says `number sha256`. An empty line ends it."""
    from e2e.workloads.custom_engine import checksum, engine

    module, _ = engine(TinyLlama(), fused=False)
    client = TrainerClient(RuntimeSettings.load(), 0, 1, run_id="run-1")
    client.bind(TorchSource(module))
    for step, line in enumerate(sys.stdin):
        if not line.strip():
            break
        torch.manual_seed(step)
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        version = client.publish(step)
        assert version is not None
        say(version.number, checksum(module))
    client.close()


def generator() -> None:
    """Says its port."""
    from e2e.workloads.custom_engine import serve

    torch.set_num_threads(1)
    asyncio.run(serve(EngineProgram(host="127.0.0.1", port=0), RuntimeSettings.load(), say))


if __name__ == "__main__":
    {"trainer": trainer, "generator": generator}[sys.argv[1]]()

"""A trainer in a process of its own, with weights on the device: publishes a version for each line it reads, and says what is in it.

`publish`: as training does. `damage`: a byte of the sealed arena changes afterwards, as broken memory would.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch
from refit_runtime import TrainerClient
from refit_runtime.adapters.torch_module import TorchSource
from refit_runtime.settings import RuntimeSettings

from tests.runtime.conftest import Net


def sums(module: torch.nn.Module) -> dict[str, str]:
    return {name: hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest() for name, parameter in module.named_parameters()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write their own lines to stdout
    settings = RuntimeSettings.load()
    client = TrainerClient(settings, 0, 1, run_id="run-1")
    module = Net(1).cuda()
    client.bind(TorchSource(module))
    version = None
    for step, line in enumerate(sys.stdin):
        if version is not None and settings.trainer.snapshot == "InPlace":
            client.release(version.number, 30)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5).add_(0.25)
        version = client.publish(step)
        assert version is not None
        assert client._sealing is not None
        client._sealing.result(30)
        if line.strip() == "damage":
            live = module.layer.weight.data.view(-1) if client.arena.allocations == 0 else client.arena.part(0)
            live[1_234_567 // live.element_size()] += 1
            torch.cuda.synchronize()
        answers.write(json.dumps({"number": version.number, "sums": sums(module)}) + "\n")
        answers.flush()
    client.close()


if __name__ == "__main__":
    main()

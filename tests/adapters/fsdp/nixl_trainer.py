"""Two trainer ranks in one pod: Tiny, sharded by `fully_shard`, published over NIXL after a step of training.

    python nixl_trainer.py FOLDER        settings as a pod has them; says the version's number, leaves FOLDER/whole.pt, ends with its standard input

The order is the one that every trainer keeps: client, process group, model, bind (O1, O2).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from refit_runtime import TrainerClient
from refit_runtime.settings import RuntimeSettings
from torch.distributed.fsdp import fully_shard

from e2e.workloads.publishing import publish
from tests.adapters.fsdp.models import Tiny, gathered

WORLD = 2


def train(rank: int, folder: Path) -> None:
    client = TrainerClient(RuntimeSettings.load(), rank, WORLD)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    model = Tiny()
    fully_shard(model)
    client.bind(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(torch.arange(4)).square().sum().backward()
    optimizer.step()
    whole = gathered(model)
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    version = publish(client, 0, 120)
    assert version is not None
    if rank == 0:
        sys.stdout.write(f"said: {version.number}\n")
        sys.stdout.flush()
    sys.stdin.read()
    client.close()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    child = os.fork()
    rank = int(child == 0)
    os.environ["LOCAL_RANK"] = str(rank)
    train(rank, folder)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

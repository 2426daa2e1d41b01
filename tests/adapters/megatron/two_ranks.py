"""Run by torchrun: a rank of the example trainer without a cluster. It trains, and leaves what it would publish and the exported checkpoint in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from refit_runtime.adapters.megatron.mesh import Mesh
from refit_runtime.adapters.megatron.source import MegatronSource

from e2e.workloads.checkpoint import export
from e2e.workloads.megatron_cpu import cpu, parallel_state
from e2e.workloads.megatron_llama import Training, build, groups
from e2e.workloads.settings import Launched
from e2e.workloads.tiny_llama import TinyLlama


def main(folder: Path) -> None:
    place, sizes = Launched(), TinyLlama(hidden=64, head=16, ffn=96)  # type: ignore[call-arg]
    torch.set_num_threads(1)
    with groups(place.world_size, 60), cpu():
        model = build(sizes, place.world_size, seed=1)
        source = MegatronSource([model], Mesh.of(parallel_state, place.rank), "llama", sizes.words)
        training = Training(model, sizes, rate=1e-2, seed=1)
        losses = []
        for version in range(2):
            losses += [training.step() for _ in range(10)]
            shards = source.shards().shards
            torch.save(
                [(shard.tensor.name, shard.box, source.view(index).clone()) for index, shard in enumerate(shards)], folder / f"{version}-{place.rank}.pt"
            )
            export(model, sizes, folder / str(version))
        torch.save(losses, folder / f"losses-{place.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

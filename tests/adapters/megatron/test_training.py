"""The example trainer's ranks as real processes: what they publish after training is what an independent export writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[3]


def test_two_ranks_train_and_offer_what_the_exported_checkpoints_hold(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    program = ["-m", "tests.adapters.megatron.two_ranks", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*launch, *program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    first, second = (load_file(tmp_path / version / "model.safetensors") for version in ("0", "1"))
    for version, expected in (("0", first), ("1", second)):
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        for rank in (0, 1):
            for name, box, view in torch.load(tmp_path / f"{version}-{rank}.pt"):
                found[name][tuple(slice(lo, hi) for lo, hi in box)] = view
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert expected["lm_head.weight"].dtype == torch.bfloat16
    assert all(not torch.equal(first[name], second[name]) for name in first), "a version that nothing changed would hide errors"

    losses = torch.load(tmp_path / "losses-0.pt")
    assert losses == torch.load(tmp_path / "losses-1.pt")
    assert losses[-1] < losses[0]
    assert json.loads((tmp_path / "1" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]

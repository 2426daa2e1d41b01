"""A worker extension of vLLM: one plain copy in the process that installs, for `bench.engine` to compare with."""

from __future__ import annotations

import time
from statistics import median

import torch


class PlainCopy:
    def plain_copy(self, size: int, times: int) -> float:
        """Seconds of torch's `copy_` of one block of so many bytes; memory is touched before."""
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        return median([_copy(source, target) for _ in range(times)])


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began

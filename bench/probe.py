"""What the bench of a real engine asks of its workers, as an extension of their class: the state of the rank, and what really lies in the live parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

WORDS = 1 << 24  # at a time
PHI = -7046029254386353131


def fingerprint(parts: Iterable[torch.Tensor]) -> int:
    """Of the 16-bit words of all parts, one after the other; each place counts differently, sums wrap at 64 bits."""
    total, at = torch.zeros((), dtype=torch.int64), 1
    for part in parts:
        words = part.detach().contiguous().view(-1).view(torch.int16)
        total = total.to(words.device)
        for start in range(0, len(words), WORDS):
            piece = words[start : start + WORDS].to(torch.int64)
            total += ((piece + 40_000) * (torch.arange(at, at + len(piece), device=words.device) * PHI)).sum()
            at += len(piece)
    return int(total)


class Probe:
    """Called through `collective_rpc`."""

    refit: Any
    get_model: Any

    def probe_rank(self) -> dict[str, Any]:
        """`resting`: no stage and no check is under way."""
        rank = self.refit._rank
        report, job = rank.report(), rank._job
        return {
            "resting": job is None or job.done(),
            "phase": report.phase.value,
            "serving": report.serving,
            "error": report.error.message if report.error is not None else "",
            "milliseconds": {timing.stage: 1e3 * timing.seconds for timing in report.timings},
        }

    def probe_live(self) -> dict[str, int]:
        return {name: fingerprint([parameter]) for name, parameter in self.get_model().named_parameters()}

    def probe_memory(self) -> int:
        """Bytes of the device that are taken."""
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

"""Arenas in host memory, and the digests of what lies there.

One plain page-aligned allocation each, so that a transport registers it as one region; what does not fit into the machine or into
the container's limit is refused with both numbers before anything is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from refit_api.errors import SpecError

from refit_runtime.digest import Digests

PAGE = 4096
_LIMITS = (  # cgroup v2, then v1: limit, used, and the page cache within it that the kernel gives back
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"),
)


class HostMemory:
    """The `Memory` of ranks whose weights are on the CPU."""

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        free = free_bytes()
        if size > free:
            raise SpecError(
                f"the arena needs {size} bytes of host memory and {free} are free: raise the container's memory limit, or use fewer arenas",
                needed=size,
                free=free,
            )
        memory = torch.empty(size + PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE
        return memory[start : start + size]

    def copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostCopies:
        return HostCopies([to for to, _ in pairs], [source for _, source in pairs])

    def digests(self, data: torch.Tensor, digests: Digests) -> bytes:
        return digests.of(data.numpy())


class HostCopies:
    """Done when they return from `start`; what is read may be on a device."""

    def __init__(self, to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        self._to, self._source = to, source

    def start(self) -> None:
        if self._to:
            with torch.no_grad():
                torch._foreach_copy_(self._to, self._source)

    def wait(self) -> None:
        """Nothing is on its way."""


def free_bytes(meminfo: Path = Path("/proc/meminfo"), limits: tuple[tuple[str, str, str, str], ...] = _LIMITS) -> int:
    """What the machine has left, or the container's limit leaves, whichever is less."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used, stat, cache in limits:
        if Path(limit).exists() and (text := Path(limit).read_text().strip()) != "max":
            cached = dict(line.split() for line in Path(stat).read_text().splitlines()).get(cache, "0")
            free = min(free, max(0, int(text) - int(Path(used).read_text()) + int(cached)))
    return free

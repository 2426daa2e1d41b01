"""The machine's clocks, for everything that takes its time as an argument."""

from __future__ import annotations

import time


class SystemClock:
    """Monotonic for deadlines, Unix time for people."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

"""The parts of a refit, with their times: what a timeline is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from refit_api.wire import Timing

from refit_runtime.ports import Clock


class Stopwatch:
    """`timings` grows in the order in which parts end, also when they fail."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.timings: list[Timing] = []

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start, began = self._clock.time(), self._clock.monotonic()
        try:
            yield
        finally:
            self.timings.append(Timing(part, start, self._clock.monotonic() - began))

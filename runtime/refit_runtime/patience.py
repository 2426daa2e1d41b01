"""Waiting for the catalog and for readers, always until a deadline, always with jitter.

An answer with `retry_after` may be asked for again: the catalog is away or rebuilding, others still read, we are the last that hold a version.
Anything else is raised at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from refit_api.errors import CatalogUnavailable, PeerError, PeerUnavailable, StaleOrder
from refit_api.wire import CloseHolder

from refit_runtime.arena import Holding
from refit_runtime.ports import Seams
from refit_runtime.worker import Worker

WAIT_SECONDS = 15.0  # of one call that waits at the catalog
T = TypeVar("T")


def never() -> bool:
    return False


class Patience:
    """Of one worker."""

    def __init__(self, seams: Seams, worker: Worker) -> None:
        self._seams, self._worker = seams, worker

    def until(self, deadline: float, call: Callable[[], T], cancelled: Callable[[], bool] = never) -> T:
        while True:
            try:
                return call()
            except PeerError as error:  # noqa: PERF203  a wait, not a loop over data
                if isinstance(error, CatalogUnavailable):
                    self._worker.poke()
                left = deadline - self._seams.clock.monotonic()
                if error.retry_after is None or left <= 0:
                    raise
                if cancelled():
                    raise StaleOrder("the stage was superseded while it waited") from error
                self._seams.clock.sleep(min(left, error.retry_after * self._seams.random.uniform(0.5, 1.0)))

    def drained(self, holding: Holding, deadline: float, cancelled: Callable[[], bool] = never) -> None:
        """Closes a holding and returns when nobody reads it (O9). Raises PeerUnavailable with the readers that are left."""
        readers = self._closed(holding.number, 0.0, deadline, cancelled)
        holding.closed = True
        while readers:
            left = deadline - self._seams.clock.monotonic()
            if left <= 0:
                names = ", ".join(readers)
                raise PeerUnavailable(f"version {holding.number} is still read by {names}: its memory is kept", retry_after=5.0, readers=names)
            readers = self._closed(holding.number, min(left, WAIT_SECONDS), deadline, cancelled)

    def _closed(self, number: int, seconds: float, deadline: float, cancelled: Callable[[], bool]) -> tuple[str, ...]:
        ask = CloseHolder(self._worker.group, self._worker.ref, number, seconds)
        return self.until(deadline, lambda: self._seams.catalog.close_holder(ask), cancelled).readers

"""A lease: the promise, for a time, that what we read from stays unchanged.

Each acquisition or renewal gives a local deadline: monotonic time before the call + leaseSeconds - 5 s. Past it nothing is read any more,
whatever the catalog thinks: it may have answered late, or not at all. A refused renewal ends it at once.
"""

from __future__ import annotations

import threading
from types import TracebackType

from refit_api.errors import CatalogUnavailable, LeaseLost, RefitError
from refit_api.wire import AcquireLease, ReleaseLease, RenewLease, WorkerRef

from refit_runtime.ports import Catalog, Clock
from refit_runtime.worker import Worker

MARGIN_SECONDS = 5.0


class Lease:
    """Of one rank on one version; renewed by a thread until released. A context manager."""

    def __init__(self, worker: Worker, catalog: Catalog, clock: Clock, number: int, holders: tuple[WorkerRef, ...]) -> None:
        self._worker, self._catalog, self._clock, self._number = worker, catalog, clock, number
        self._holders: tuple[WorkerRef, ...] = ()
        self._deadline = 0.0
        self._interval = 0.0
        self._lost: RefitError | None = None
        self._stop = threading.Event()
        self.extend(holders)
        self._thread = threading.Thread(target=self._renew, name="refit-lease", daemon=True)
        self._thread.start()

    def extend(self, holders: tuple[WorkerRef, ...]) -> None:
        """Reads from these too. Raises VersionRetired, PeerUnavailable, CatalogUnavailable."""
        wanted = tuple(dict.fromkeys((*self._holders, *holders)))
        before = self._clock.monotonic()
        leased = self._catalog.acquire_lease(AcquireLease(self._worker.group, self._worker.ref, self._number, wanted))
        self._holders, self._lost = wanted, None
        self._granted(before, leased.lease_seconds)

    def drop(self, holder: WorkerRef) -> None:
        """Not read from any more; the catalog learns it with the next `extend`."""
        self._holders = tuple(each for each in self._holders if each != holder)

    def _granted(self, before: float, seconds: float) -> None:
        self._deadline = before + seconds - MARGIN_SECONDS
        self._interval = seconds / 3

    def lost(self) -> LeaseLost | None:
        """Why nothing may be read under it any more."""
        try:
            self.left()
        except LeaseLost as error:
            return error
        return None

    def left(self) -> float:
        """Seconds in which a read may still end. Raises LeaseLost."""
        if self._lost is not None:
            raise LeaseLost(f"the lease on version {self._number} was refused: {self._lost.message}", retry_after=1.0) from self._lost
        left = self._deadline - self._clock.monotonic()
        if left <= 0:
            raise LeaseLost(f"the lease on version {self._number} was not renewed in time: the catalog did not answer", retry_after=1.0)
        return left

    def _renew(self) -> None:
        while not self._stop.wait(self._interval):
            before = self._clock.monotonic()
            try:
                leased = self._catalog.renew_lease(RenewLease(self._worker.group, self._worker.ref, self._number))
                self._granted(before, leased.lease_seconds)
            except CatalogUnavailable:
                self._worker.poke()
                self._interval = 1.0
            except RefitError as error:
                self._lost = error
                return

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(15)
        try:
            self._catalog.release_lease(ReleaseLease(self._worker.group, self._worker.ref, self._number))
        except RefitError:
            self._worker.poke()  # it runs out by itself

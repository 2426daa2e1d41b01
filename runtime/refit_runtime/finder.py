"""Where to read a version from: what the order says, else who the catalog lists. Nobody is read from without a lease (O5)."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from refit_api.errors import CatalogUnavailable, PeerUnavailable
from refit_api.wire import ListShards, Role, Source, WorkerRef

from refit_runtime.lease import Lease
from refit_runtime.ports import Seams, StageOrder
from refit_runtime.worker import Worker

log = structlog.get_logger(__name__)


class Finder:
    """Of one stage. `found`: leased, in the order in which they are tried."""

    def __init__(self, seams: Seams, worker: Worker, order: StageOrder, class_: str, coordinate: str, slots: tuple[str, ...]) -> None:
        self._seams, self._worker, self._order = seams, worker, order
        self._ask = ListShards(worker.group, order.number, slots, class_, coordinate)
        self._slots = set(slots)
        self._given = tuple(order.sources.get(coordinate, ()))
        self.found: list[Source] = []

    def lease(self) -> Lease:
        """On the given relays; if they are gone, or none were given, on trainers; where trainers lack a slot, on complete relays too."""
        given, self._given = self._given, ()
        if given:
            try:
                return self._leased(given)
            except PeerUnavailable:
                log.info("the assigned sources are gone: others are asked for", version=self._order.number)
        listed = self._listed(set())
        trainers = [source for source in listed if source.worker.role is Role.TRAINER]
        covered = {slot for source in trainers if source.complete for slot in source.slots}
        return self._leased(trainers if self._slots <= covered else [*(s for s in listed if s.worker.role is Role.GENERATOR), *trainers])

    def _leased(self, sources: Sequence[Source]) -> Lease:
        if not sources:
            raise PeerUnavailable(f"nobody offers version {self._order.number} to this rank now", retry_after=1.0)
        self.found = list(sources)
        return Lease(self._worker, self._seams.catalog, self._seams.clock, self._order.number, tuple(source.worker for source in sources))

    def more(self, lease: Lease, out: set[WorkerRef]) -> Sequence[Source]:
        """Everybody else who has it."""
        found: list[Source] = []
        try:
            for source in self._listed(out):
                found += self._also(lease, source)
        except CatalogUnavailable:
            self._worker.poke()  # the caller asks again, a few times
        return found

    def _also(self, lease: Lease, source: Source) -> list[Source]:
        try:
            lease.extend((source.worker,))
        except PeerUnavailable:
            return []
        return [source]

    def _listed(self, out: set[WorkerRef]) -> list[Source]:
        sources = self._seams.catalog.list_shards(self._ask).sources
        return [source for source in sources if not source.closed and source.worker not in out and source.worker != self._worker.ref]

"""A process of the group as the catalog knows it: registered under an incarnation, alive by heartbeats, registered again after an outage.

- A start is an incarnation; a replaced transport agent is a new one, since what readers knew of the old one is void.
- A catalog that lost its memory raises its epoch: the worker registers again within leaseSeconds/6, with jitter, and repeats what it holds.
- Nothing here stops training or serving: while the catalog is away the thread asks every 1 to 2 seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

import structlog
from refit_api.errors import CatalogUnavailable, RefitError, StaleOrder
from refit_api.wire import PROTOCOL, Blob, Deregister, GroupRef, Heartbeat, Registered, RegisterWorker, Role, WorkerRef

from refit_runtime.plan.key import layout_hash
from refit_runtime.ports import ManifestAnswer, Seams
from refit_runtime.settings import RuntimeSettings

log = structlog.get_logger(__name__)

BEATS = 3  # heartbeats within a lease time
RETRY_SECONDS = (1.0, 2.0)


class Worker:
    """`ref` changes with `renew`; read it anew for each call."""

    def __init__(self, settings: RuntimeSettings, seams: Seams, role: Role, rank: int, world: int, instance: str = "0") -> None:
        self.group = GroupRef(settings.group.namespace, settings.group.name)
        self.ref = WorkerRef(settings.pod.uid, role, rank, str(uuid4()), instance)
        self._settings, self._seams, self._world = settings, seams, world
        self._request: RegisterWorker | None = None
        self._layout = b""
        self._rejoined: Callable[[], None] = lambda: None
        self._registered: Registered | None = None
        self._lock = threading.RLock()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.layout = ""
        self.failed: RefitError | None = None

    @property
    def registered(self) -> Registered:
        assert self._registered is not None, "join first"
        return self._registered

    def join(
        self,
        layout: bytes,
        answer: ManifestAnswer | None,
        rejoined: Callable[[], None],
        *,
        arena_bytes: int,
        coordinate: str = "",
        run_id: str = "",
    ) -> None:
        """Serves manifests (without `answer` it offers nothing), registers, starts the heartbeats. `rejoined` repeats to a new epoch what we hold."""
        endpoint = self._seams.manifests.serve(answer) if answer is not None else None
        self._layout, self.layout, self._rejoined = layout, layout_hash(layout), rejoined
        self._request = RegisterWorker(
            protocol=PROTOCOL,
            group=self.group,
            worker=self.ref,
            world=self._world,
            layout=self.layout,
            endpoint=endpoint,
            coordinate=coordinate,
            run_id=run_id,
            model=self._settings.model.text,
            arena_bytes=arena_bytes,
        )
        self._register_patiently()
        self._thread = threading.Thread(target=self._beat, name=f"refit-heartbeat-{self.ref.rank}", daemon=True)
        self._thread.start()

    def _register_patiently(self) -> None:
        """A pod may be so new that the catalog has not seen it, or start while the operator restarts; its model was loaded for minutes by then."""
        deadline = self._seams.clock.monotonic() + self._settings.versions.publish_deadline_seconds
        while True:
            try:
                return self._register()
            except RefitError as error:  # noqa: PERF203  a wait, not a loop over data
                if error.retry_after is None or self._seams.clock.monotonic() > deadline:
                    raise
                log.info("not registered yet", worker=self.ref, error=error.message)
                self._seams.clock.sleep(self._seams.random.uniform(*RETRY_SECONDS))

    def _register(self) -> None:
        with self._lock:
            assert self._request is not None, "join first"
            known = self._seams.catalog.register(self._request)
            if known.want_layout:
                self._seams.catalog.put_layout(Blob(self.group, self.layout, self._layout))
            self._seams.manifests.admit(known.group_key)
            self._registered = known

    def renew(self) -> None:
        """A new incarnation: whatever was known of the old one is void."""
        with self._lock:
            assert self._request is not None, "join first"
            self.ref = WorkerRef(self.ref.pod_uid, self.ref.role, self.ref.rank, str(uuid4()), self.ref.instance)
            self._request = replace(self._request, worker=self.ref)
            self._register()

    def poke(self) -> None:
        """Look at once whether the catalog still knows us."""
        self._wake.set()

    def _beat(self) -> None:
        wait = self.registered.lease_seconds / BEATS
        while not self._stopped.is_set():
            self._wake.wait(wait)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                self._look()
                wait = self.registered.lease_seconds / BEATS
            except StaleOrder as error:
                self.failed = error
                log.warning("replaced by a newer process: heartbeats end", worker=self.ref, error=error.message)
                return
            except RefitError as error:
                wait = self._seams.random.uniform(*RETRY_SECONDS)
                if not isinstance(error, CatalogUnavailable):
                    log.warning("heartbeat refused", worker=self.ref, error=error.message, facts=error.facts)

    def _look(self) -> None:
        with self._lock:
            beat = self._seams.catalog.heartbeat(Heartbeat(self.group, self.ref))
            if beat.known and beat.catalog_epoch == self.registered.catalog_epoch:
                return
        self._stopped.wait(self._seams.random.uniform(0, self.registered.lease_seconds / 6))
        if not self._stopped.is_set():
            self._register()
            self._rejoined()
            log.info("registered again", worker=self.ref, epoch=self.registered.catalog_epoch)

    def leave(self) -> None:
        """Ends the heartbeats; the catalog is told if it answers."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(15)
            self._thread = None
            try:
                self._seams.catalog.deregister(Deregister(self.group, self.ref))
            except RefitError as error:
                log.info("left without telling the catalog", worker=self.ref, error=error.message)
        self._seams.manifests.close()

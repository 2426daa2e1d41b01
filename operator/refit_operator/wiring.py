"""The operator put together: kopf's watches, the queue with its reconciler, and the catalog, in one event loop.

A part that ends is fatal for all: Kubernetes starts the whole anew. `run` returns when kopf was told to stop.
kopf looks for the kinds once: nothing starts before the API server has them, and when they go away the watches end, and all with them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

import kopf
import structlog
from refit_api import names
from refit_api.errors import PeerError, SpecError
from refit_api.v1alpha1 import KINDS
from refit_api.wire import GroupRef

from refit_operator import authority, handlers
from refit_operator.authority import Authority
from refit_operator.catalog.auth import Gate
from refit_operator.catalog.certificates import group_key, make_server, renew_after
from refit_operator.catalog.memory import MemoryCatalog
from refit_operator.catalog.service import CatalogService, serve
from refit_operator.decide.group import Site
from refit_operator.kube import KubeCluster
from refit_operator.ports import Clock
from refit_operator.reconcile import Reconciler
from refit_operator.settings import OperatorSettings
from refit_operator.workqueue import Pace, WorkQueue

log = structlog.get_logger(__name__)

LIVE_WITHIN_SECONDS = 120.0
"""A key that waits longer beyond its time says that the queue hangs."""
_WATCHER = "watcher for "
"""How kopf names the tasks of its watches."""
_CA_ATTEMPTS = 30
_LOOK_SECONDS = 0.5
_TELL_EVERY = 10  # looks


@dataclass(frozen=True, slots=True)
class Flags:
    """`stop` ends the operator; `ready` is set when it watches; `port` will be the catalog's."""

    stop: asyncio.Event
    ready: asyncio.Event
    port: asyncio.Future[int]


class _Everything(Collection[asyncio.Task[object]]):
    """kopf ends every task that it does not know: this loop is not its own, and its own tasks end with its watches."""

    def __contains__(self, task: object) -> bool:
        return True

    def __iter__(self) -> Iterator[asyncio.Task[object]]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the operator is made with. `login`: kopf's way to the same API server as `cluster`."""

    cluster: KubeCluster
    catalog: MemoryCatalog
    watch: handlers.Watch
    clock: Clock
    login: Callable[..., kopf.ConnectionInfo | None]


async def run(settings: OperatorSettings, parts: Parts, flags: Flags) -> None:
    """Until `flags.stop`, a signal, or the failure of a part."""
    cluster, catalog, watch, clock = parts.cluster, parts.catalog, parts.watch, parts.clock
    await _kinds(settings.kinds_seconds, cluster, clock)
    ca = await _authority(settings, cluster, clock)
    site = Site(settings.catalog_address, ca.bundle)
    reconciler = Reconciler(watch, cluster, catalog, clock, lambda: site)
    queue = WorkQueue(reconciler, clock, Random(), Pace(resync=settings.resync_seconds))
    catalog.subscribe(partial(_catalog_changed, queue, watch))
    registry = handlers.registry(handlers.Wiring(watch, queue.put), parts.login)
    kopf.on.probe(registry=registry, id="queue")(partial(_alive, queue))
    service = CatalogService(catalog, Gate(cluster, watch, clock), partial(group_key, ca.signing))
    tls = make_server(ca.signing, settings.catalog_names, _moment(clock))
    async with catalog.running(), serve(service, f"{settings.catalog_host}:{settings.catalog_port}", tls) as port:
        flags.port.set_result(port)
        log.info("operator started", catalog_port=port, namespaces=list(settings.namespaces) or "all")
        await _together(_watching(settings, cluster, registry, flags), queue.run(), _renewal(clock, renew_after(tls), flags))


async def _together(*parts: Coroutine[object, object, None]) -> None:
    """Ends when the first one ends: the watches when they are told to, the others only by failing."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in ended:
        if isinstance(failure, BaseException) and not isinstance(failure, asyncio.CancelledError):
            raise failure


async def _watching(settings: OperatorSettings, cluster: KubeCluster, registry: kopf.OperatorRegistry, flags: Flags) -> None:
    kopf_settings = kopf.OperatorSettings()
    handlers.configure(kopf_settings)
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=kopf_settings,
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        liveness_endpoint=f"http://0.0.0.0:{settings.health_port}/healthz" if settings.health_port else None,
        stop_flag=flags.stop,
        ready_flag=flags.ready,
    )
    try:
        await kopf.run_tasks(tasks, ignored=_Everything())
    except Exception as error:
        if missing := await _missing(cluster):
            raise SpecError(_without(missing)) from error
        raise
    finally:
        await _unwatch()


async def _unwatch() -> None:
    """After a failed watch kopf leaves the others to whoever ends all tasks, which each takes for a pause, and watches on, if it waits for an answer."""
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith(_WATCHER)]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _catalog_changed(queue: WorkQueue, watch: handlers.Watch, key: GroupRef) -> None:
    """Somebody may be waiting for an answer: sooner than after a burst of events, and only while the watch knows of it."""
    seen = watch.see(key)
    if seen.group is not None or seen.records:
        queue.put(key, 0.02)


async def _alive(queue: WorkQueue, **_: object) -> float:
    overdue = queue.oldest()
    if overdue > LIVE_WITHIN_SECONDS:
        raise RuntimeError(f"a group waits {overdue:.0f} s beyond its time")
    return overdue


async def _renewal(clock: Clock, when: dt.datetime, flags: Flags) -> None:
    """The server's certificate lives in this process: at two thirds of its life the operator starts anew, which takes seconds."""
    await asyncio.sleep(max(0.0, when.timestamp() - clock.time()))
    log.info("the certificate is old: starting anew")
    flags.stop.set()
    await asyncio.Event().wait()


async def _kinds(seconds: float, cluster: KubeCluster, clock: Clock) -> None:
    """Returns when the API server has both kinds. Raises SpecError, or PeerError when it does not answer."""
    deadline, looks = clock.monotonic() + seconds, 0
    while True:
        try:
            missing = await _missing(cluster)
            if not missing:
                return
            told = _without(missing)
        except PeerError as error:
            if clock.monotonic() > deadline:
                raise
            told = error.message
        if clock.monotonic() > deadline:
            raise SpecError(f"after {seconds:.0f} s: {told}")
        if looks % _TELL_EVERY == 0:
            log.info("waiting for the kinds", message=told)
        looks += 1
        await asyncio.sleep(_LOOK_SECONDS)


async def _missing(cluster: KubeCluster) -> list[str]:
    return sorted({kind.resource.plural for kind in KINDS} - await cluster.served())


def _without(kinds: list[str]) -> str:
    return f"the API server does not have {' and '.join(kinds)} of {names.API_VERSION}: apply the CRDs of crds/"


async def _authority(settings: OperatorSettings, cluster: KubeCluster, clock: Clock) -> Authority:
    """At start the API server may not answer yet, and another replica may be writing; in the end the failure is the process's."""
    for _ in range(_CA_ATTEMPTS):
        with suppress(PeerError):
            return await authority.ensure(cluster, settings.namespace, settings.ca_secret, _moment(clock))
        await asyncio.sleep(1.0)
    return await authority.ensure(cluster, settings.namespace, settings.ca_secret, _moment(clock))


def _moment(clock: Clock) -> dt.datetime:
    return dt.datetime.fromtimestamp(clock.time(), dt.timezone.utc)

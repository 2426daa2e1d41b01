"""Workers, layouts, engine classes and the plan document that follows from them.

Invariants:
- of one place only the newest incarnation is heard; those it replaced are refused for ever (StaleOrder), and what they held is void at once;
- a trainer run that was replaced never comes back;
- a layout counts once its content is here, so that everybody who is told a plan key can fetch all of it;
- the plan key is the hash of layouts, classes and redundancy: nothing else moves it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

from refit_api import wire
from refit_api.errors import CatalogUnavailable, Denied, EngineMismatch, NoClass, PeerUnavailable, RefitError, SpecError, StaleOrder, WireMismatch
from refit_api.names import Reason
from refit_api.wire import Role, VersionPhase

from refit_operator.catalog.facts import (
    ENDED,
    EngineClass,
    GeneratorKey,
    Group,
    Moment,
    Outcome,
    Worker,
    WorkerKey,
    canonical,
    content_hash,
    generator_of,
    key_of,
    without,
)
from refit_operator.catalog.phases import end

REMEMBERED = 16  # incarnations and runs that were replaced


def member(group: Group, ref: wire.WorkerRef) -> Worker:
    """The registered worker, or why it is not heard."""
    key = key_of(ref)
    worker = group.workers.get(key)
    if worker is not None and worker.ref.incarnation == ref.incarnation:
        return worker
    if worker is not None or ref.incarnation in group.replaced.get(key, ()):
        raise StaleOrder(f"{ref.role.value} rank {ref.rank} of pod {ref.pod_uid} started again: this process was replaced and must end", seen=ref.incarnation)
    raise CatalogUnavailable(f"{ref.role.value} rank {ref.rank} of pod {ref.pod_uid} is not registered: register again, then repeat", retry_after=1.0)


def register(group: Group, request: wire.RegisterWorker, at: Moment) -> Outcome:
    _check(group, request)
    ref, key = request.worker, key_of(request.worker)
    old = group.workers.get(key)
    if old is not None and old.ref.incarnation != ref.incarnation:
        group = _void(group, old)
    if ref.role is Role.TRAINER and request.run_id != group.run_id:
        group = _start_run(group, request.run_id, at.now)
    worker = Worker(
        ref=ref,
        world=request.world,
        layout=request.layout,
        endpoint=request.endpoint,
        coordinate=request.coordinate,
        run_id=request.run_id,
        arena_bytes=request.arena_bytes,
        expires=at.now + group.terms.lease_seconds,
    )
    group = _classify(group.put_worker(worker), worker)
    terms = group.terms
    want = request.layout not in group.blobs
    return group, wire.Registered(catalog_epoch=group.epoch, group_uid=terms.uid, group_key=b"", lease_seconds=terms.lease_seconds, want_layout=want)


def _check(group: Group, request: wire.RegisterWorker) -> None:
    ref = request.worker
    who = f"{ref.role.value} rank {ref.rank} of pod {ref.pod_uid}"
    if request.protocol != wire.PROTOCOL:
        raise WireMismatch(f"{who} speaks protocol {request.protocol}, the catalog {wire.PROTOCOL}: use one release of Refit in the whole group")
    if group.terms.model and request.model != group.terms.model:
        raise SpecError(f"{who} has the model {request.model!r}, spec.model says {group.terms.model!r}: change one of them", seen=request.model)
    if not 0 <= ref.rank < request.world:
        raise SpecError(f"{who}: rank must be from 0 to {request.world - 1}, since the world is {request.world}", seen=ref.rank)
    if ref.incarnation in group.replaced.get(key_of(ref), ()):
        raise StaleOrder(f"{who} started again: this process was replaced and must end", seen=ref.incarnation)
    if ref.role is Role.TRAINER:
        _check_trainer(group, request, who)
    else:
        _check_engine(group, request, who)


def _check_trainer(group: Group, request: wire.RegisterWorker, who: str) -> None:
    if request.run_id in group.runs[:-1]:
        raise StaleOrder(f"{who} belongs to run {request.run_id!r}, which run {group.run_id!r} replaced: end it", seen=request.run_id, expected=group.run_id)
    if request.run_id != group.run_id:
        return
    for rank, other in group.trainers().items():
        if rank == request.worker.rank and other.ref.pod_uid != request.worker.pod_uid:
            raise Denied(
                f"{who}: pod {other.ref.pod_uid} is rank {rank} of run {request.run_id!r}; two pods may not have one rank",
                retry_after=group.beat_seconds,
                seen=request.worker.pod_uid,
                expected=other.ref.pod_uid,
            )
        if rank != request.worker.rank and other.world != request.world:
            raise SpecError(f"{who} has a world of {request.world}, rank {rank} of the same run one of {other.world}", seen=request.world, expected=other.world)


def _check_engine(group: Group, request: wire.RegisterWorker, who: str) -> None:
    for other in group.ranks(generator_of(request.worker)):
        if other.ref.rank == request.worker.rank:
            continue
        if other.coordinate == request.coordinate and other.layout != request.layout:
            raise EngineMismatch(f"{who} and rank {other.ref.rank} are both at {request.coordinate!r}, but need different tensors", seen=request.layout)


def _start_run(group: Group, run_id: str, now: float) -> Group:
    """A trainer that starts again never finishes what the run before was publishing."""
    for number, entry in group.versions.items():
        if entry.version.phase is VersionPhase.PUBLISHING and entry.version.run_id != run_id:
            group = end(group, number, f"{Reason.RUN_REPLACED}: trainer run {run_id!r} replaced run {entry.version.run_id!r}", now)
    return replace(group, runs=(*group.runs, run_id)[-REMEMBERED:], skipped={})


def _void(group: Group, old: Worker) -> Group:
    """What a replaced process held is gone with it. Leases on it need no change: they name its incarnation."""
    key = key_of(old.ref)
    replaced = (*group.replaced.get(key, ()), old.ref.incarnation)[-REMEMBERED:]
    return _drop(replace(group, replaced={**group.replaced, key: replaced}), {key}, reads=True)


def _drop(group: Group, keys: set[WorkerKey], reads: bool) -> Group:
    """Workers and what they hold; `reads`: also their part of leases (the process is known to have ended)."""
    for number, leases in group.leases.items() if reads else ():
        for generator, lease in leases.items():
            if keys & set(lease.ranks):
                left = without(lease.ranks, keys)
                group = group.put_lease(number, generator, replace(lease, ranks=left) if left else None)
    return group.drop_workers(keys)


def heartbeat(group: Group, request: wire.Heartbeat, at: Moment) -> Outcome:
    try:
        worker = member(group, request.worker)
    except CatalogUnavailable:
        return group, wire.Beat(catalog_epoch=group.epoch, known=False)
    return beat(group, worker, at.now), wire.Beat(catalog_epoch=group.epoch, known=True)


def beat(group: Group, worker: Worker, now: float) -> Group:
    alive = replace(worker, expires=now + group.terms.lease_seconds)
    return group.put_worker(alive)


def deregister(group: Group, request: wire.Deregister, at: Moment) -> Outcome:
    key = key_of(request.worker)
    worker = group.workers.get(key)
    if worker is None or worker.ref.incarnation != request.worker.incarnation:
        return group, wire.Done()
    return _drop(group, {key}, reads=True), wire.Done()


def depart(group: Group, pod_uid: str) -> Group:
    """The pod is gone. Its leases run out by themselves: a node that is cut off may still be reading."""
    group = _drop(group, {key for key in group.workers if key.pod_uid == pod_uid}, reads=False)
    return replace(
        group,
        replaced={key: names for key, names in group.replaced.items() if key.pod_uid != pod_uid},
        assignments={key: order for key, order in group.assignments.items() if key.pod_uid != pod_uid},
    )


def expire(group: Group, now: float) -> Group:
    """Workers that missed their heartbeats, and classes whose template is gone: others have generators, this one has none for long."""
    silent = {key for key, worker in group.workers.items() if worker.expires <= now}
    if silent:
        group = _drop(group, silent, reads=False)
    populated = {class_of(group, generator) for generator in group.engines}
    patience = group.terms.lease_seconds + group.terms.drain_seconds
    classes: dict[str, EngineClass] = {}
    for name, known in group.classes.items():
        if name in populated:
            classes[name] = known if known.empty_since is None else replace(known, empty_since=None)
        elif known.empty_since is None:
            classes[name] = replace(known, empty_since=now)
        elif now < known.empty_since + patience or not populated & set(group.classes):
            classes[name] = known
    return replace(group, classes=classes) if classes != group.classes else group


def class_of(group: Group, generator: GeneratorKey) -> str:
    """The hash of a generator's needs; empty until all its ranks and their layouts are here."""
    ranks = group.ranks(generator)
    if not ranks or len(ranks) < ranks[0].world or any(rank.layout not in group.blobs for rank in ranks):
        return ""
    return _class_hash(tuple((rank.coordinate, rank.layout) for rank in ranks))


@lru_cache(maxsize=64)
def _class_hash(layouts: tuple[tuple[str, str], ...]) -> str:
    return content_hash(canonical(dict(layouts)))


def _classify(group: Group, worker: Worker) -> Group:
    if worker.ref.role is not Role.GENERATOR:
        return group
    name = class_of(group, generator_of(worker.ref))
    if not name or (name in group.classes and group.classes[name].empty_since is None):
        return group
    coordinates = {rank.coordinate: rank.layout for rank in group.ranks(generator_of(worker.ref))}
    return replace(group, classes={**group.classes, name: EngineClass(coordinates)})


def put_layout(group: Group, request: wire.Blob, at: Moment) -> Outcome:
    if content_hash(request.data) != request.hash:
        raise WireMismatch(f"layout {request.hash}: the content has another hash", seen=content_hash(request.data), expected=request.hash)
    if request.hash not in referenced(group):
        raise Denied(f"layout {request.hash} belongs to no registered worker and no version: register first, then send it")
    group = replace(group, blobs={**group.blobs, request.hash: request.data})
    for worker in [worker for worker in group.workers.values() if worker.layout == request.hash]:
        group = _classify(group, worker)
    return group, wire.Done()


def get_layout(group: Group, request: wire.GetLayout, at: Moment) -> Outcome:
    data = group.blobs.get(request.hash)
    if data is None and missing(group) is None:
        key, document = plan_document(group)
        data = document if key == request.hash else None
    if data is None:
        raise PeerUnavailable(f"layout {request.hash} is not in the catalog: its owner has to register and send it", retry_after=1.0)
    return group, wire.Blob(group=request.group, hash=request.hash, data=data)


def referenced(group: Group) -> set[str]:
    """Hashes of layouts and plan documents that somebody may still ask for."""
    found = {worker.layout for worker in group.workers.values()}
    found |= {layout for known in group.classes.values() for layout in known.coordinates.values()}
    plans = {entry.version.plan_key for entry in group.versions.values() if entry.version.phase not in ENDED}
    for plan_key in plans & set(group.blobs):
        document = json.loads(group.blobs[plan_key])
        found |= {layout for ranks in (document["trainer"], *document["classes"].values()) for layout in ranks.values()}
    return found | plans


def forget_layouts(group: Group) -> Group:
    """Content that nobody can ask for any more."""
    stale = set(group.blobs) - referenced(group)
    return replace(group, blobs=without(group.blobs, stale)) if stale else group


def missing(group: Group) -> RefitError | None:
    """What the plan still lacks: trainer ranks, or an engine class."""
    trainers = group.trainers()
    world = next((worker.world for worker in trainers.values()), 0)
    absent = [str(rank) for rank in range(world) if rank not in trainers or trainers[rank].layout not in group.blobs]
    if absent or not world:
        return PeerUnavailable(f"trainer ranks {', '.join(absent) or '(all)'} of {world} have not registered with their layout", retry_after=group.beat_seconds)
    if not group.classes:
        partial = [(key, group.ranks(key)) for key in list(group.engines)[:4]]
        seen = "; ".join(f"pod {key.pod_uid}: {len(ranks)} of {ranks[0].world} ranks" for key, ranks in partial) or "no generator"
        return NoClass(f"no engine class has registered all its coordinates, so nothing can be planned (seen: {seen})", retry_after=group.beat_seconds)
    return None


def plan_document(group: Group) -> tuple[str, bytes]:
    """The plan key and the document whose hash it is. Only when nothing is `missing`."""
    document = canonical(
        {
            "trainer": {str(rank): worker.layout for rank, worker in group.trainers().items()},
            "classes": {name: dict(known.coordinates) for name, known in group.classes.items()},
            "redundancy": group.terms.redundancy,
        }
    )
    return content_hash(document), document

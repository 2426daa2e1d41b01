"""A group's facts as the reconciler looks at them. Pure: equal facts give equal pictures, so that nothing moves by itself."""

from __future__ import annotations

from collections.abc import Mapping

from refit_api.wire import Role

from refit_operator.catalog.facts import Entry, GeneratorKey, Group, WorkerKey
from refit_operator.catalog.model import wanted_ceiling
from refit_operator.catalog.phases import trainers_hold
from refit_operator.catalog.workers import class_of
from refit_operator.decide.facts import CatalogFacts, Generator, GeneratorRank, TrainerRank, VersionState, Wants


def observe(group: Group, now: float) -> CatalogFacts:
    trainers = group.trainers()
    wants = Wants(
        epoch=0 if group.epoch_written else group.epoch,
        ceiling=wanted_ceiling(group),
        records=tuple(sorted(number for number, entry in group.versions.items() if entry.recorded and not entry.written)),
    )
    return CatalogFacts(
        epoch=group.epoch,
        settled=group.settled(now),
        wants=wants,
        world=next((worker.world for worker in trainers.values()), 0),
        trainers=tuple(TrainerRank(worker.ref, worker.run_id) for _, worker in sorted(trainers.items())),
        generators=tuple(_generator(group, key) for key in sorted(group.engines, key=lambda key: (key.pod_uid, key.instance))),
        versions=tuple(_version(group, entry) for _, entry in sorted(group.versions.items())),
        protected=group.protected,
    )


def _generator(group: Group, key: GeneratorKey) -> Generator:
    workers, report = group.ranks(key), group.reports.get(key)
    said = {rank.worker: rank for rank in report.ranks} if report is not None else {}
    ranks = tuple(GeneratorRank(worker.ref, worker.coordinate, worker.endpoint, said.get(worker.ref)) for worker in workers)
    return Generator(
        pod_uid=key.pod_uid,
        instance=key.instance,
        class_hash=class_of(group, key),
        whole=len(workers) == workers[0].world and all(rank.report is not None for rank in ranks),
        ranks=ranks,
        offers=_offers(group, group.engines[key]),
        heard=(report.catalog_epoch, report.seq) if report is not None else (0, 0),
        fenced=report.fenced if report is not None else False,
        error=report.error if report is not None else None,
        assignment=group.assignments.get(key),
        arena_bytes=sum(worker.arena_bytes for worker in workers),
    )


def _offers(group: Group, ranks: tuple[WorkerKey, ...]) -> Mapping[int, bool]:
    found = {}
    for number, held in group.holders.items():
        mine = [held[key] for key in ranks if key in held]
        if len(mine) == len(ranks) and all(holder.closed_at is None for holder in mine):
            found[number] = all(holder.complete for holder in mine)
    return found


def _version(group: Group, entry: Entry) -> VersionState:
    number = entry.version.number
    leases = len(group.leases.get(number, {}))
    complete = [holder.ref.role for holder in group.held(number) if holder.complete and holder.closed_at is None]
    drained_by = None if entry.closed_at is None or not leases else entry.closed_at + group.terms.drain_seconds + group.terms.lease_seconds
    return VersionState(
        version=entry.version,
        sealed=len(entry.roots),
        sealed_bytes=sum(entry.sizes.values()),
        created=entry.created,
        ready_at=entry.ready_at,
        leases=leases,
        drain_deadline=drained_by,
        trainers=complete.count(Role.TRAINER),
        generators=complete.count(Role.GENERATOR),
        offered=trainers_hold(group, number),
        classes=entry.classes,
    )

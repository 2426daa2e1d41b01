"""What generators are told and what they say.

Invariants:
- an order is `(epoch, seq)`; seq is one counter for the whole group, so the orders of one generator only ever grow, also when it was away;
- an engine rank is a holder by what its generator reports: open while it stages, complete once it has verified everything;
- a holder that was closed is not offered again until a report shows other contents: a late report cannot reopen memory that is being reused.
"""

from __future__ import annotations

from dataclasses import replace

from refit_api import wire
from refit_api.errors import StaleOrder

from refit_operator.catalog.facts import ENDED, GeneratorKey, Group, Holder, Moment, Outcome, Worker, generator_of, key_of
from refit_operator.catalog.workers import beat, member


def assign(
    group: Group, generator: GeneratorKey, target: int, order: wire.Order, sources: tuple[wire.CoordinateSources, ...], deadline_seconds: float
) -> Group:
    given = wire.Assignment(group.epoch, group.orders + 1, target, order, sources, deadline_seconds)
    return replace(group, orders=group.orders + 1, assignments={**group.assignments, generator: given})


def report(group: Group, request: wire.Report, at: Moment) -> Outcome:
    speaker = member(group, request.worker)
    generator = generator_of(speaker.ref)
    for rank in request.ranks:
        if generator_of(rank.worker) != generator:
            raise StaleOrder(f"rank {rank.worker.rank} belongs to pod {rank.worker.pod_uid}, not to the reporting one", seen=rank.worker.pod_uid)
        worker = group.workers.get(key_of(rank.worker))
        if worker is not None and worker.ref == rank.worker:
            group = beat(_hold(group, worker, rank), worker, at.now)
    return replace(group, reports={**group.reports, generator: _whole(group, generator, request)}), wire.Done()


def _whole(group: Group, generator: GeneratorKey, said: wire.Report) -> wire.Report:
    """With what its other ranks said of themselves: an agent speaks for all, ranks that a framework drives each for itself."""
    known, heard = group.reports.get(generator), {key_of(rank.worker) for rank in said.ranks}
    others = [rank for rank in (known.ranks if known is not None else ()) if key_of(rank.worker) not in heard]
    others = [rank for rank in others if (worker := group.workers.get(key_of(rank.worker))) is not None and worker.ref == rank.worker]
    return replace(
        said,
        ranks=(*said.ranks, *others),
        fenced=said.fenced or any(rank.phase is wire.RankPhase.FENCED for rank in others),
        error=said.error or next((rank.error for rank in others if rank.error is not None), None),
    )


def _hold(group: Group, worker: Worker, rank: wire.RankReport) -> Group:
    """The rank's holdings follow its report."""
    key = key_of(worker.ref)
    mentioned = {number for number in (rank.arena, rank.staging, rank.kept) if number}
    left = {number for number, held in group.holders.items() if key in held and number not in mentioned}
    if left:
        group = group.drop_holders({key}, left)
    for number in mentioned:
        entry = group.versions.get(number)
        foreign = entry is not None and number != rank.kept and entry.version.plan_key != rank.plan_key
        if entry is None or entry.version.phase in ENDED or foreign or worker.endpoint is None:
            continue
        holder = group.holder(number, worker.ref)
        if holder is None or holder.ref != worker.ref:
            holder = Holder(worker.ref, worker.endpoint, coordinate=worker.coordinate, closed_at=entry.closed_at)
        following = replace(holder, complete=number == rank.kept or (number == rank.arena and rank.arena_complete))
        if following != group.holder(number, worker.ref):
            group = group.put_holder(number, following)
    return group


def watch(group: Group, request: wire.WatchAssignment, at: Moment) -> tuple[Group, wire.Assignment | None]:
    """The present order of the caller's generator, None before the first."""
    return group, group.assignments.get(generator_of(member(group, request.worker).ref))

"""Who offers a version's bytes, who reads them, and when memory may be used again.

Invariants:
- a lease is taken only on holders that are registered, offer the version and are not closed;
- after a close a lease is renewed for drainSeconds more, so memory is free at most drainSeconds + leaseSeconds later, and never earlier;
- `Closed` without readers is only said when it is true: while the catalog rebuilds its memory, nobody is told that memory is free;
- the last engine rank of a coordinate that holds the current version keeps it, while the version it waits for could be had nowhere else.
"""

from __future__ import annotations

from dataclasses import replace

from refit_api import wire
from refit_api.errors import CatalogUnavailable, LeaseLost, PeerUnavailable, VersionRetired
from refit_api.wire import Role, VersionPhase

from refit_operator.catalog.facts import LEASABLE, Entry, Group, Holder, Lease, Moment, Outcome, Pending, Worker, generator_of, key_of, without
from refit_operator.catalog.phases import close_holder, trainers_hold
from refit_operator.catalog.versions import find
from refit_operator.catalog.workers import class_of, member


def list_shards(group: Group, request: wire.ListShards, at: Moment) -> Outcome:
    find(group, request.number, at.now)
    found = []
    for holder in group.held(request.number):
        if holder.ref.role is Role.TRAINER:
            wanted = not request.slots or any(slot in request.slots for slot in holder.shards)
        else:
            alike = not request.class_hash or class_of(group, generator_of(holder.ref)) == request.class_hash
            wanted = bool(request.coordinate) and holder.coordinate == request.coordinate and alike
        if wanted:
            found.append(source_of(holder))
    return group, wire.Sources(tuple(found))


def source_of(holder: Holder) -> wire.Source:
    return wire.Source(holder.ref, holder.endpoint, tuple(sorted(holder.shards)), holder.coordinate, holder.complete, holder.closed_at is not None)


def readers(group: Group, number: int, ref: wire.WorkerRef) -> tuple[str, ...]:
    """Pods with a lease on what this process holds of the version."""
    return tuple(sorted({generator.pod_uid for generator, lease in group.leases.get(number, {}).items() if ref in lease.holders()}))


def close(group: Group, request: wire.CloseHolder, at: Moment) -> Outcome:
    worker = member(group, request.worker)
    if not request.leaving and _is_last(group, worker, request.number):
        raise PeerUnavailable(
            f"rank {worker.ref.rank} of pod {worker.ref.pod_uid} is the last that holds version {request.number} at {worker.coordinate!r}: it keeps it until "
            "another rank has it, or until the version it waits for is held somewhere",
            retry_after=group.beat_seconds,
        )
    group = close_holder(group, request.number, worker.ref, at.now)
    left = readers(group, request.number, worker.ref)
    if not group.settled(at.now):
        text = f"version {request.number}: readers are not known yet, since the catalog is rebuilding its memory"
        return group, Pending(min(at.began + request.wait_seconds, group.settled_at), CatalogUnavailable(text, retry_after=group.settled_at - at.now))
    if left:
        return group, Pending(at.began + request.wait_seconds, wire.Closed(left))
    return group, wire.Closed(())


def _is_last(group: Group, worker: Worker, number: int) -> bool:
    """An engine rank that would take the current version's last bytes at its coordinate away, to stage what nobody could give it."""
    mine = group.holder(number, worker.ref)
    if worker.ref.role is not Role.GENERATOR or number != group.current or mine is None or not mine.complete or mine.closed_at is not None:
        return False
    order = group.assignments.get(generator_of(worker.ref))
    target = order.target if order is not None else max((n for n, entry in group.versions.items() if entry.version.phase is VersionPhase.READY), default=0)
    if target in (0, number) or trainers_hold(group, target):
        return False
    name = class_of(group, generator_of(worker.ref))
    peers = {generator for generator in group.engines if class_of(group, generator) == name} - {generator_of(worker.ref)}

    def held_by_others(version: int) -> bool:
        return any(
            holder.complete and holder.closed_at is None and holder.coordinate == worker.coordinate and holder.ref != worker.ref
            for holder in group.held(version, Role.GENERATOR)
            if generator_of(holder.ref) in peers or generator_of(holder.ref) == generator_of(worker.ref)
        )

    return bool(peers) and not held_by_others(number) and not held_by_others(target)


def acquire(group: Group, request: wire.AcquireLease, at: Moment) -> Outcome:
    """Also renews: what the rank reads from already is under the rules of a renewal, what it names anew must be open."""
    reader = member(group, request.worker)
    entry = find(group, request.number, at.now)
    _check_leasable(group, entry, at.now)
    generator, key = generator_of(reader.ref), key_of(reader.ref)
    present = group.leases.get(request.number, {}).get(generator)
    ranks = present.ranks if present is not None else {}
    for ref in request.holders:
        if ref not in ranks.get(key, ()):
            _check_holder(group, request.number, ref, at.now)
    lease = Lease(ranks={**ranks, key: frozenset(request.holders)}, expires=at.now + group.terms.lease_seconds)
    _check_drain(group, request.number, lease, at.now)
    return group.put_lease(request.number, generator, lease), wire.Leased(group.terms.lease_seconds)


def _check_leasable(group: Group, entry: Entry, now: float) -> None:
    """Readers of a draining version take their leases up again after lost memory, for one lease time."""
    phase = entry.version.phase
    if phase in LEASABLE or (phase is VersionPhase.RELEASING and not group.settled(now)):
        return
    raise VersionRetired(f"version {entry.version.number} takes no new leases: it is {phase.value} ({entry.version.reason})", seen=phase.value)


def _check_holder(group: Group, number: int, ref: wire.WorkerRef, now: float) -> None:
    holder = group.holder(number, ref)
    who = f"{ref.role.value} rank {ref.rank} of pod {ref.pod_uid}"
    if holder is None or holder.ref != ref:
        if group.settled(now):
            raise PeerUnavailable(f"{who} does not offer version {number}: take another holder", retry_after=1.0)
    elif holder.closed_at is not None:
        raise PeerUnavailable(f"{who} has closed version {number}: take another holder", seen="closed")


def renew(group: Group, request: wire.RenewLease, at: Moment) -> Outcome:
    reader = member(group, request.worker)
    generator = generator_of(reader.ref)
    lease = group.leases.get(request.number, {}).get(generator)
    if lease is None:
        raise LeaseLost(f"pod {generator.pod_uid} has no lease on version {request.number}: stop reading, then take a new one", seen="no lease")
    _check_drain(group, request.number, lease, at.now)
    lease = replace(lease, expires=at.now + group.terms.lease_seconds)
    return group.put_lease(request.number, generator, lease), wire.Leased(group.terms.lease_seconds)


def _check_drain(group: Group, number: int, lease: Lease, now: float) -> None:
    """Nothing that the lease reads from was closed longer than drainSeconds ago."""
    entry = group.versions.get(number)
    named = [(ref, group.holder(number, ref)) for ref in lease.holders()]
    times = [entry.closed_at if entry is not None else None]
    times += [holder.closed_at for ref, holder in named if holder is not None and holder.ref == ref]
    closed = min((time for time in times if time is not None), default=None)
    if closed is not None and now > closed + group.terms.drain_seconds:
        raise LeaseLost(
            f"version {number}: the {group.terms.drain_seconds:g} s in which readers may finish after a close are over: stop reading", seen="closed"
        )


def release(group: Group, request: wire.ReleaseLease, at: Moment) -> Outcome:
    """By one rank; also by one that is not registered any more: it only gives up. A replaced process does not speak for its successor."""
    generator, key = generator_of(request.worker), key_of(request.worker)
    lease = group.leases.get(request.number, {}).get(generator)
    present = group.workers.get(key)
    if lease is None or key not in lease.ranks or (present is not None and present.ref != request.worker):
        return group, wire.Done()
    left = without(lease.ranks, [key])
    return group.put_lease(request.number, generator, replace(lease, ranks=left) if left else None), wire.Done()


def expire(group: Group, now: float) -> Group:
    for number, leases in group.leases.items():
        for generator, lease in leases.items():
            if lease.expires <= now:
                group = group.put_lease(number, generator, None)
    return group

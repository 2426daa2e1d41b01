"""The catalog's state machine: facts + request + now -> new facts + answer. Pure; stores carry it out, one change at a time.

`HANDLERS` is the whole protocol: which call changes what, and who may make it. A handler either returns new facts with an answer, a `Pending`
or an error that is an answer, or raises and leaves the facts as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from refit_api import wire
from refit_api.errors import CatalogUnavailable
from refit_api.wire import Role

from refit_operator.catalog import generators, holders, phases, versions, workers
from refit_operator.catalog.facts import ENDED, NUMBER_BLOCK, Entry, Group, Moment, Outcome, Pending
from refit_operator.ports import Recorded, Terms


@dataclass(frozen=True, slots=True)
class Handler:
    """`roles` of pods that may call; `people`: who may read the RefitGroup may, too. `quiet`: nobody waits for what it changes."""

    run: Callable[[Group, Any, Moment], Outcome]
    roles: frozenset[Role]
    people: bool = False
    quiet: bool = False


_TRAINER = frozenset({Role.TRAINER})
_GENERATOR = frozenset({Role.GENERATOR})
_BOTH = _TRAINER | _GENERATOR

HANDLERS: Mapping[str, Handler] = {
    "RegisterWorker": Handler(workers.register, _BOTH),
    "Heartbeat": Handler(workers.heartbeat, _BOTH, quiet=True),
    "Deregister": Handler(workers.deregister, _BOTH),
    "PutLayout": Handler(workers.put_layout, _BOTH),
    "GetLayout": Handler(workers.get_layout, _BOTH, quiet=True),
    "CreateVersion": Handler(versions.create, _TRAINER),
    "GetVersion": Handler(versions.get, _BOTH, people=True, quiet=True),
    "ListVersions": Handler(versions.listed, _BOTH, people=True, quiet=True),
    "WatchVersions": Handler(versions.listed, _BOTH, people=True, quiet=True),
    "AbortVersion": Handler(versions.end_version, _BOTH, people=True),
    "RetireVersion": Handler(versions.end_version, _BOTH, people=True),
    "OpenShard": Handler(versions.open_shard, _TRAINER),
    "SealShard": Handler(versions.seal_shard, _TRAINER),
    "ListShards": Handler(holders.list_shards, _BOTH, people=True, quiet=True),
    "CloseHolder": Handler(holders.close, _BOTH),
    "AcquireLease": Handler(holders.acquire, _GENERATOR),
    "RenewLease": Handler(holders.renew, _GENERATOR, quiet=True),
    "ReleaseLease": Handler(holders.release, _GENERATOR),
    "WatchAssignment": Handler(generators.watch, _GENERATOR, quiet=True),
    "Report": Handler(generators.report, _GENERATOR),
}


def handle(group: Group, method: str, request: Any, at: Moment) -> Outcome:
    """Nobody is answered before the RefitGroup shows this epoch: a successor must be able to tell that it is newer."""
    if not group.epoch_written:
        text = f"epoch {group.epoch} of group {group.ref.name} is not written to its status yet"
        return group, Pending(at.began + versions.CONFIRM_SECONDS, CatalogUnavailable(text, retry_after=1.0))
    return HANDLERS[method].run(group, request, at)


def start(ref: wire.GroupRef, terms: Terms, recorded: Recorded, now: float) -> Group:
    """A group as a catalog without memory knows it: from Kubernetes alone. Of a group that never had a catalog there is nothing to wait for."""
    known = {
        item.number: Entry(
            version=wire.Version(
                number=item.number,
                key=item.key,
                run_id=item.run_id,
                step=item.step,
                plan_key=item.plan_key,
                slots=(),
                phase=item.phase,
                root=item.root,
                bytes=item.bytes,
                base=item.base,
                select=item.select,
            ),
            expected=item.slots,
            created=now,
            publish_by=now + terms.publish_deadline_seconds,
            ready_at=now if item.root else None,
            closed_at=None if item.phase in (wire.VersionPhase.PUBLISHING, wire.VersionPhase.READY) else now,
        )
        for item in recorded.versions
    }
    return Group(
        ref=ref,
        terms=terms,
        epoch=recorded.epoch + 1,
        settled_at=now if recorded.epoch == 0 else now + terms.lease_seconds,
        next_number=max([recorded.ceiling, *known], default=0) + 1,
        ceiling=recorded.ceiling,
        versions=known,
    )


def confirm(group: Group, epoch: int, ceiling: int, records: frozenset[int]) -> Group:
    """The operator has written these."""
    written = {number: replace(entry, written=True) for number, entry in group.versions.items() if number in records and not entry.written}
    following = replace(
        group,
        epoch_written=group.epoch_written or epoch >= group.epoch,
        ceiling=max(group.ceiling, ceiling),
        versions={**group.versions, **written} if written else group.versions,
    )
    return following if following != group else group


def retune(group: Group, terms: Terms) -> Group:
    """The spec changed. Deadlines that are running keep their end."""
    return replace(group, terms=terms)


def protect(group: Group, numbers: frozenset[int], current: int) -> Group:
    return group if (numbers, current) == (group.protected, group.current) else replace(group, protected=numbers, current=current)


def wanted_ceiling(group: Group) -> int:
    """The next block of numbers is asked for when half of one is used."""
    return group.ceiling + NUMBER_BLOCK if group.next_number > group.ceiling - NUMBER_BLOCK // 2 else 0


def remove(group: Group, number: int) -> Group:
    entry = group.versions.get(number)
    if entry is None or entry.version.phase not in ENDED:
        return group
    return replace(group, versions={other: kept for other, kept in group.versions.items() if other != number})


def tick(group: Group, now: float) -> Group:
    """What time does. Late is safe: a lease that ran out counts until the next tick."""
    group = holders.expire(workers.expire(group, now), now)
    return workers.forget_layouts(phases.advance(group, now))


def resume(group: Group, gap: float) -> Group:
    """After `gap` seconds without service: that time counts towards no expiry, and older orders are told apart by a new epoch."""
    return replace(
        group,
        epoch=group.epoch + 1,
        epoch_written=False,
        settled_at=group.settled_at + gap,
        workers={key: replace(worker, expires=worker.expires + gap) for key, worker in group.workers.items()},
        leases={number: {key: replace(lease, expires=lease.expires + gap) for key, lease in leases.items()} for number, leases in group.leases.items()},
        versions={
            number: replace(entry, publish_by=entry.publish_by + gap, closed_at=None if entry.closed_at is None else entry.closed_at + gap)
            for number, entry in group.versions.items()
        },
        holders={
            number: {key: holder if holder.closed_at is None else replace(holder, closed_at=holder.closed_at + gap) for key, holder in held.items()}
            for number, held in group.holders.items()
        },
    )

"""The life of a version: when it becomes Ready, ends, fails and is released.

Invariants:
- Ready exactly once: every slot has a sealed shard, and every member of it that lives has sealed, all with one root;
- what ends is closed at once: no new lease; renewals end drainSeconds later; Released only when no lease is left;
- while the catalog rebuilds its memory nothing fails and nothing is released, since absent then means unknown.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from refit_api import wire
from refit_api.names import Reason
from refit_api.wire import Role, VersionPhase

from refit_operator.catalog.facts import ENDED, Entry, Group, without

KEPT_UNRECORDED = 16  # ended versions without a WeightVersion, for replays of their publish


def end(group: Group, number: int, reason: str, now: float) -> Group:
    """Abort or retire: a version that is being published fails, a Ready one drains. Without effect on others."""
    entry = group.versions.get(number)
    if entry is None or entry.version.phase not in (VersionPhase.PUBLISHING, VersionPhase.READY):
        return group
    following = VersionPhase.FAILED if entry.version.phase is VersionPhase.PUBLISHING else VersionPhase.RELEASING
    return _close(group, entry.moved(following, reason), now)


def fail(group: Group, number: int, reason: str, now: float) -> Group:
    return _close(group, group.versions[number].moved(VersionPhase.FAILED, reason), now)


def _close(group: Group, entry: Entry, now: float) -> Group:
    group = group.put_version(replace(entry, closed_at=now))
    for holder in group.held(entry.version.number):
        group = close_holder(group, entry.version.number, holder.ref, now)
    return group


def close_holder(group: Group, number: int, ref: wire.WorkerRef, now: float) -> Group:
    """No new lease on what this worker holds of the version."""
    holder = group.holder(number, ref)
    if holder is None or holder.ref != ref or holder.closed_at is not None:
        return group
    return group.put_holder(number, replace(holder, closed_at=now))


def become_ready(group: Group, number: int, now: float) -> Group:
    """Ready if it is complete, else the same facts."""
    entry = group.versions[number]
    if entry.version.phase is not VersionPhase.PUBLISHING or len(entry.version.slots) < entry.expected or unsealed(group, entry):
        return group
    version = replace(entry.version, root=version_root(entry.run_roots()), bytes=sum(entry.sizes.values()))
    return group.put_version(replace(replace(entry, version=version).moved(VersionPhase.READY), ready_at=now))


def unsealed(group: Group, entry: Entry) -> list[str]:
    """Slots without a sealed shard, or with a live member that has not sealed its own."""
    holders = group.held(entry.version.number, Role.TRAINER)
    live = {rank for rank, worker in group.trainers().items() if worker.run_id == entry.version.run_id}
    sealed = {slot: {holder.ref.rank for holder in holders if slot in holder.shards and holder.shards[slot].sealed} for slot in entry.version.slots}
    return [slot for slot, ranks in sealed.items() if not ranks or not members(slot) & live <= ranks]


def trainers_hold(group: Group, number: int) -> bool:
    """Trainers offer every slot, sealed and open to new leases."""
    entry = group.versions.get(number)
    if entry is None or not entry.version.slots or len(entry.version.slots) < entry.expected:
        return False
    offered = {slot for holder in group.held(number, Role.TRAINER) if holder.closed_at is None for slot, shard in holder.shards.items() if shard.sealed}
    return set(entry.version.slots) <= offered


def members(slot: str) -> set[int]:
    return {int(rank) for rank in slot.split("-")}


def version_root(run_roots: dict[int, bytes]) -> bytes:
    """SHA-256 of the run roots in plan order."""
    return hashlib.sha256(b"".join(root for _, root in sorted(run_roots.items()))).digest()


def advance(group: Group, now: float) -> Group:
    """What time and loss do to versions."""
    for number, entry in list(group.versions.items()):
        if entry.version.phase is VersionPhase.PUBLISHING:
            group = become_ready(group, number, now)
            if group.versions[number].version.phase is VersionPhase.PUBLISHING and group.settled(now) and now >= entry.publish_by:
                group = fail(group, number, _late(group, entry), now)
        elif entry.version.phase is VersionPhase.READY and group.settled(now) and not _alive(group, number):
            if any(other.version.phase is VersionPhase.READY for newer, other in group.versions.items() if newer > number):
                group = end(group, number, f"{Reason.SUPERSEDED}: a newer version is Ready, and nobody holds, reads or serves this one", now)
            else:
                group = fail(group, number, f"{Reason.HOLDERS_LOST}: nobody holds, reads or serves it any more", now)
        elif entry.version.phase is VersionPhase.RELEASING and group.settled(now) and number not in group.leases:
            group = group.put_version(entry.moved(VersionPhase.RELEASED))
    return _prune(group)


def _late(group: Group, entry: Entry) -> str:
    slots = unsealed(group, entry)
    seconds, named = group.terms.publish_deadline_seconds, ", ".join(slots[:8])
    return f"{Reason.PUBLISH_DEADLINE_EXCEEDED}: {len(slots)} of {entry.expected} slots were not sealed in {seconds:g} s ({named})"


def _alive(group: Group, number: int) -> bool:
    """Somebody holds, reads, serves or stages it."""
    if number in group.leases or any(holder.closed_at is None for holder in group.held(number)):
        return True
    return any(number in (rank.serving, rank.staging, rank.arena, rank.kept) for report in group.reports.values() for rank in report.ranks)


def _prune(group: Group) -> Group:
    """Holders of ended versions that nobody reads any more, and the oldest ended versions of those without a WeightVersion."""
    ended = {number for number, entry in group.versions.items() if entry.version.phase in ENDED and number not in group.leases}
    unrecorded = sorted(number for number in ended if not group.versions[number].recorded)[:-KEPT_UNRECORDED]
    stale = {number for number in group.holders if number in ended or number not in group.versions}
    if not stale and not unrecorded:
        return group
    return replace(group, holders=without(group.holders, stale), versions=without(group.versions, unrecorded))

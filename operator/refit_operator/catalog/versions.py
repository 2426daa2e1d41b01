"""Publishing: one number for all ranks without a collective, shards opened and sealed, Ready.

Invariants:
- the first call with a key that plans what the group plans now creates the version; every other call with that key gets the same one;
- numbers are given in order, below the ceiling that the RefitGroup shows, and a version is told to trainers once its WeightVersion exists;
- a subset is completed by what lies in the trainers' memory, so its base is the newest Ready version of the run, planned alike; all ranks select alike;
- what happens to the arena that a publish reuses is decided once, by the first call of the key, for all ranks;
- the first seal of a slot fixes its roots for the version's life; a rank that sealed something else is no holder.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError
from refit_api import wire
from refit_api.errors import CatalogUnavailable, PeerUnavailable, RefitError, ReplicaMismatch, SpecError, StaleOrder, VersionRetired, WireMismatch
from refit_api.names import Reason
from refit_api.v1alpha1 import Select
from refit_api.wire import Role, VersionPhase

from refit_operator.catalog.facts import Entry, Group, Holder, Moment, Outcome, Pending, Shard, Worker
from refit_operator.catalog.phases import become_ready, close_holder, end, fail, members, trainers_hold, version_root
from refit_operator.catalog.workers import member, missing, plan_document

CONFIRM_SECONDS = 5.0  # how long a call waits for the operator's writes
REMEMBERED_SKIPS = 64


def find(group: Group, number: int, now: float) -> Entry:
    entry = group.versions.get(number)
    if entry is None:
        if not group.settled(now):
            raise CatalogUnavailable(f"version {number}: the catalog is rebuilding its memory", retry_after=1.0)
        raise VersionRetired(f"version {number} of group {group.ref.name} is unknown: it ended and its record is gone; take a newer one", seen=number)
    return entry


def create(group: Group, request: wire.CreateVersion, at: Moment) -> Outcome:
    trainer = member(group, request.worker)
    if request.run_id != trainer.run_id:
        raise StaleOrder(f"rank {trainer.ref.rank} publishes for run {request.run_id!r}, but registered for {trainer.run_id!r}", seen=request.run_id)
    if trainer.run_id != group.run_id:
        raise StaleOrder(f"run {trainer.run_id!r} was replaced by {group.run_id!r}: its trainers must end", seen=trainer.run_id, expected=group.run_id)
    for entry in group.versions.values():
        if entry.version.key == request.key:
            return _replay(group, request, entry, at)
    if request.key in group.skipped:
        return group, wire.Created(plan_key=group.skipped[request.key], skipped=True)
    lacking = missing(group)
    if lacking is not None:
        return group, Pending(at.began + group.terms.publish_deadline_seconds, lacking)
    plan_key, document = plan_document(group)
    if request.plan_key != plan_key:
        return group, wire.Created(plan_key=plan_key)
    _check_slots(request, trainer)
    if request.base or request.select is not None:
        waiting = _check_base(group, request, at)
        if waiting is not None:
            return group, waiting
    return _make(group, request, document, at)


def _replay(group: Group, request: wire.CreateVersion, entry: Entry, at: Moment) -> Outcome:
    version = entry.version
    if request.plan_key != version.plan_key:
        return group, wire.Created(plan_key=version.plan_key)
    if len(version.slots) < entry.expected:  # known again after lost memory
        entry = replace(entry, version=replace(version, slots=request.slots), expected=len(request.slots))
        group = group.put_version(entry)
    if request.step != version.step or set(request.slots) != set(entry.version.slots):
        raise WireMismatch(
            f"rank {request.worker.rank} publishes {request.key!r} with other slots or another step than the rank that created version {version.number}",
            seen=f"step {request.step}, slots {' '.join(request.slots)}",
            expected=f"step {version.step}, slots {' '.join(version.slots)}",
        )
    if (request.base, request.select) != (version.base, version.select):
        raise SpecError(
            f"rank {request.worker.rank} publishes {_what(request)} as {request.key!r}; the rank that created version {version.number} published "
            f"{_what(version)}: every rank has to give the same select",
            seen=_what(request),
            expected=_what(version),
        )
    return group, _answer(entry, at)


def _answer(entry: Entry, at: Moment) -> wire.Created | Pending:
    if entry.recorded and not entry.written:
        text = f"version {entry.version.number} waits for its WeightVersion, which the operator has not written yet"
        return Pending(at.began + CONFIRM_SECONDS, CatalogUnavailable(text, retry_after=1.0))
    return wire.Created(plan_key=entry.version.plan_key, version=entry.version)


def _check_slots(request: wire.CreateVersion, trainer: Worker) -> None:
    try:
        ranks = [members(slot) for slot in request.slots]
    except ValueError as error:
        raise WireMismatch('a slot is its owner ranks joined by "-", such as 0-2', seen=" ".join(request.slots)) from error
    if not ranks or len(set(request.slots)) < len(ranks) or any(not owners <= set(range(trainer.world)) for owners in ranks):
        raise WireMismatch(f"slots must be distinct tuples of ranks below {trainer.world}", seen=" ".join(request.slots))


def _what(publish: wire.CreateVersion | wire.Version) -> str:
    return "all tensors" if publish.select is None else f"{publish.select.spec()} over version {publish.base}"


def _check_base(group: Group, request: wire.CreateVersion, at: Moment) -> Pending | None:
    """The base has to lie in the trainers' memory, whole: it is the run's newest Ready version, planned alike. Raises SpecError, VersionRetired."""
    if request.select is None or not request.select.spec():
        raise SpecError("select names no tensor: give params, layers or layer_groups, or leave it out to publish all", field="select")
    try:
        Select.model_validate(request.select.spec())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in ("select", *first["loc"]))
        raise SpecError(f"{field}: {first['msg']}", field=field, seen=first["input"]) from error
    entry = group.versions.get(request.base)
    if entry is not None and entry.version.phase is VersionPhase.PUBLISHING:
        waits = PeerUnavailable(f"the base {request.base} of {request.key!r} is still being published by other ranks", retry_after=group.beat_seconds)
        return Pending(at.began + group.terms.publish_deadline_seconds, waits)
    why = _unfit(group, request, entry)
    if why and not group.settled(at.now):
        text = f"the base {request.base} of {request.key!r}: the catalog is rebuilding its memory"
        return Pending(group.settled_at, CatalogUnavailable(text, retry_after=1.0))
    if why:
        raise VersionRetired(f"version {request.base} cannot be the base of {request.key!r}: {why}; publish all tensors once", seen=request.base)
    return None


def _unfit(group: Group, request: wire.CreateVersion, base: Entry | None) -> str:
    """Why the version cannot be completed by a subset; empty if it can."""
    if base is None:
        return "it is unknown"
    version = base.version
    if version.phase is not VersionPhase.READY:
        return f"it is {version.phase.value} ({version.reason})"
    if version.run_id != request.run_id:
        return f"it belongs to run {version.run_id!r}"
    if version.plan_key != request.plan_key:
        return "the layouts of the group changed since"
    newest = max(number for number, entry in group.versions.items() if entry.version.phase is VersionPhase.READY and entry.version.run_id == request.run_id)
    if newest != version.number:
        return f"version {newest} is newer, and is what the trainers hold"
    return "" if trainers_hold(group, version.number) else "the trainers do not hold it any more"


def _make(group: Group, request: wire.CreateVersion, document: bytes, at: Moment) -> Outcome:
    reused = _reused(group)
    if any(group.versions[number].version.phase is VersionPhase.PUBLISHING for number in reused):
        waits = PeerUnavailable(f"the version before {request.key!r} is still being published by other ranks", retry_after=group.beat_seconds)
        return group, Pending(at.began + group.terms.publish_deadline_seconds, waits)
    if group.terms.on_busy == "Skip" and _busy(group):
        skipped = dict([*group.skipped.items(), (request.key, request.plan_key)][-REMEMBERED_SKIPS:])
        return replace(group, skipped=skipped), wire.Created(plan_key=request.plan_key, skipped=True)
    number = group.next_number
    if number > group.ceiling:
        text = f"version {number} waits for its number: the operator has not written status.versionCeiling yet (now {group.ceiling})"
        return group, Pending(at.began + CONFIRM_SECONDS, CatalogUnavailable(text, retry_after=1.0))
    for earlier in reused:
        for holder in group.held(earlier, Role.TRAINER):
            group = close_holder(group, earlier, holder.ref, at.now)
    version = wire.Version(
        number=number,
        key=request.key,
        run_id=request.run_id,
        step=request.step,
        plan_key=request.plan_key,
        slots=request.slots,
        phase=VersionPhase.PUBLISHING,
        base=request.base,
        select=request.select,
    )
    recorded = (number - 1) % group.terms.record_every == 0
    entry = Entry(
        version=version,
        expected=len(request.slots),
        created=at.now,
        publish_by=at.now + group.terms.publish_deadline_seconds,
        classes=frozenset(group.classes),
        recorded=recorded,
        written=False,
    )
    group = replace(group.put_version(entry), next_number=number + 1, blobs={**group.blobs, request.plan_key: document})
    return group, _answer(entry, at)


def _reused(group: Group) -> list[int]:
    """Versions in trainer memory that a new one has no free arena beside."""
    held = sorted(number for number in group.holders if any(holder.closed_at is None for holder in group.held(number, Role.TRAINER)))
    return held[: max(0, len(held) - group.terms.arenas + 1)]


def _busy(group: Group) -> bool:
    """Somebody reads memory of a trainer that a new version would reuse."""
    kept = {number for number in group.holders if number not in _reused(group) and any(h.closed_at is None for h in group.held(number, Role.TRAINER))}
    return any(
        ref.role is Role.TRAINER for number, leases in group.leases.items() if number not in kept for lease in leases.values() for ref in lease.holders()
    )


def get(group: Group, request: wire.GetVersion, at: Moment) -> Outcome:
    entry = find(group, request.number, at.now)
    known = entry.run_roots()
    wanted = request.runs or tuple(known)
    rebuilding = entry.version.phase is VersionPhase.READY and (len(entry.roots) < entry.expected or not set(wanted) <= set(known))
    serving = sum(all(rank.serving == request.number for rank in report.ranks) for report in group.reports.values())
    roots = {run: known[run] for run in wanted if run in known} if entry.version.root else {}
    reply = wire.VersionFacts(version=entry.version, run_roots=roots, generators=len(group.engines), serving=serving)
    if rebuilding:
        text = f"the run roots of version {request.number} are not known again yet: its trainers have to register"
        return group, Pending(at.began + request.wait_seconds, CatalogUnavailable(text, retry_after=1.0))
    if entry.version.phase is VersionPhase.PUBLISHING and request.wait_seconds > 0:
        return group, Pending(at.began + request.wait_seconds, reply)
    return group, reply


def listed(group: Group, request: wire.ListVersions, at: Moment) -> Outcome:
    """Those that exist for everybody: with their WeightVersion, if they get one."""
    known = (entry for number, entry in sorted(group.versions.items()) if number > request.after and (entry.written or not entry.recorded))
    return group, wire.Versions(tuple(entry.version for entry in known))


def end_version(group: Group, request: wire.EndVersion, at: Moment) -> Outcome:
    entry = find(group, request.number, at.now)
    if not group.settled(at.now):
        raise CatalogUnavailable(
            "the catalog is rebuilding its memory: nothing ends before all workers had time to register", retry_after=group.settled_at - at.now
        )
    if request.number in group.protected and not group.terms.manual:
        raise VersionRetired(f"version {request.number} is in use (target, current, pinned or held): choose another target first", seen=request.number)
    word = Reason.ABORTED if entry.version.phase is VersionPhase.PUBLISHING else Reason.RETIRED
    return end(group, request.number, f"{word}: {request.reason or 'asked for by a client'}", at.now), wire.Done()


def open_shard(group: Group, request: wire.OpenShard, at: Moment) -> Outcome:
    group, holder = _shard_of(group, request, at)
    if request.slot not in holder.shards:
        holder = replace(holder, shards={**holder.shards, request.slot: Shard(request.bytes)}, complete=False)
    return group.put_holder(request.number, holder), wire.Done()


def _shard_of(group: Group, request: wire.OpenShard | wire.SealShard, at: Moment) -> tuple[Group, Holder]:
    """The caller's holder of the version, made now if this is its first shard."""
    worker = member(group, request.worker)
    entry = find(group, request.number, at.now)
    version, who = entry.version, f"rank {worker.ref.rank}, slot {request.slot}, version {request.number}"
    if version.phase not in (VersionPhase.PUBLISHING, VersionPhase.READY):
        raise VersionRetired(f"{who}: the version is {version.phase.value} ({version.reason})", seen=version.phase.value)
    if worker.run_id != version.run_id:
        raise StaleOrder(f"{who}: it belongs to run {version.run_id!r}", seen=worker.run_id, expected=version.run_id)
    if worker.endpoint is None:
        raise WireMismatch(f"{who}: the rank registered without an endpoint, so nobody could fetch its manifest")
    if request.slot not in version.slots and len(version.slots) < entry.expected:
        entry = replace(entry, version=replace(version, slots=(*version.slots, request.slot)))
        group = group.put_version(entry)
    if request.slot not in entry.version.slots or worker.ref.rank not in members(request.slot):
        raise WireMismatch(f"{who}: no such slot of this rank", seen=request.slot, expected=" ".join(entry.version.slots))
    holder = group.holder(request.number, worker.ref) or Holder(worker.ref, worker.endpoint)
    if holder.closed_at is not None:
        raise VersionRetired(f"{who}: the rank has closed it, and its memory may hold something else", seen="closed")
    return group, holder


def seal_shard(group: Group, request: wire.SealShard, at: Moment) -> Outcome:
    group, holder = _shard_of(group, request, at)
    entry = group.versions[request.number]
    if request.plan_key != entry.version.plan_key:
        raise WireMismatch(f"version {request.number} was planned as {entry.version.plan_key}", seen=request.plan_key, expected=entry.version.plan_key)
    refused = _differs(entry, request)
    if refused is not None:
        if entry.version.phase is VersionPhase.PUBLISHING:
            return fail(group, request.number, f"ReplicaMismatch: {refused.message}", at.now), refused
        return close_holder(group.put_holder(request.number, holder), request.number, holder.ref, at.now), refused
    entry = replace(entry, roots={**entry.roots, request.slot: dict(request.run_roots)}, sizes={**entry.sizes, request.slot: request.bytes})
    shards = {**holder.shards, request.slot: Shard(request.bytes, sealed=True)}
    mine = {slot for slot in entry.version.slots if holder.ref.rank in members(slot)}
    holder = replace(holder, shards=shards, complete=mine == {slot for slot, shard in shards.items() if shard.sealed})
    group = group.put_version(entry).put_holder(request.number, holder)
    return become_ready(group, request.number, at.now), wire.Done()


def _differs(entry: Entry, request: wire.SealShard) -> RefitError | None:
    """Roots that are not those which the slot, or the version, has had from its first seal."""
    where = f"version {entry.version.number}, slot {request.slot}, rank {request.worker.rank}"
    first = entry.roots.get(request.slot)
    if first is not None:
        for run in sorted(set(first) | set(request.run_roots)):
            if first.get(run) != request.run_roots.get(run):
                return ReplicaMismatch(f"{where}: run {run} is not what the first rank of the slot sealed", run=run)
        return None
    taken = {run for slot, roots in entry.roots.items() for run in roots if run in request.run_roots}
    if taken or not request.run_roots:
        return ReplicaMismatch(f"{where}: runs {sorted(taken)} belong to another slot; every slot has runs of its own")
    whole = {**entry.run_roots(), **request.run_roots}
    if entry.version.root and len(entry.roots) + 1 == entry.expected and version_root(whole) != entry.version.root:
        return ReplicaMismatch(f"{where}: with it the version's root is not the one that was recorded when it became Ready")
    return None

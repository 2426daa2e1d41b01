"""WeightVersion objects: made when the catalog asks, kept as long as somebody may need them, let go in bounded time.

Invariants:
- `retain` newest versions stay, and every one that is target, current, previous, pinned or held; nothing is deleted while the catalog is not settled;
- deleting a record means abort (Publishing) or retire (later); its finalizer goes when no lease is left, or at drainSeconds + leaseSeconds at the latest;
- a record is removed from the catalog only after its object was let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refit_api import names
from refit_api.names import Condition, Reason
from refit_api.status import AdoptionStatus, HoldersStatus, LeasesStatus, ShardsStatus, WeightVersionStatus
from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import VersionPhase

from refit_operator.decide.actions import Abort, Action, Announce, CreateRecord, Delete, ReleaseRecord, RemoveVersion, Retire
from refit_operator.decide.conditions import Finding, merge, stamp, when
from refit_operator.decide.facts import CatalogFacts, Group, Record, VersionState
from refit_operator.decide.members import Member
from refit_operator.decide.target import Versions

KIND = "WeightVersion"
_ENDED = (VersionPhase.RELEASED, VersionPhase.FAILED)
_REASONS = {str(reason) for reason in Reason}


def manifest(group: Group, state: VersionState) -> Mapping[str, Any]:
    """The finalizer is in the first write: no version is ever without it."""
    version = state.version
    subset = {"format": "Subset", "baseVersion": version.base, "select": version.select.spec()} if version.select is not None else {}
    return {
        "apiVersion": names.API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": names.weight_version_name(group.name, version.number),
            "namespace": group.namespace,
            "labels": {names.LABEL_GROUP: group.name},
            "finalizers": [names.FINALIZER],
            "ownerReferences": [
                {"apiVersion": names.API_VERSION, "kind": "RefitGroup", "name": group.name, "uid": group.uid, "controller": True, "blockOwnerDeletion": True}
            ],
        },
        "spec": {
            "groupRef": {"name": group.name},
            "version": version.number,
            "trainerStep": version.step,
            "trainerRunId": version.run_id,
            "expectedSlots": len(version.slots),
            "planKey": version.plan_key,
            "idempotencyKey": version.key,
            **subset,
        },
    }


def create(group: Group, facts: CatalogFacts) -> list[Action]:
    wanted = set(facts.wants.records)
    return [CreateRecord(manifest(group, state)) for state in facts.versions if state.version.number in wanted]


def keeps(spec: RefitGroupSpec, records: Iterable[Record], versions: Versions) -> dict[int, tuple[str, ...]]:
    """Why a version is kept beyond retention, by number."""
    why: dict[int, list[str]] = {}
    named = [("target", versions.target), ("current", versions.current), ("previous", versions.previous)]
    if spec.rollout.policy == "Pinned" and spec.rollout.pinned_version is not None:
        named.append(("pinned", spec.rollout.pinned_version))
    for word, number in [*named, *(("hold", record.number) for record in records if record.hold)]:
        if number:
            why.setdefault(number, []).append(word)
    return {number: tuple(words) for number, words in why.items()}


def retain(spec: RefitGroupSpec, records: Sequence[Record], facts: CatalogFacts, versions: Versions) -> list[Action]:
    """Deletes records beyond retention (the deletion itself retires), and retires old versions that never had one."""
    kept = keeps(spec, records, versions)
    named = {r.number for r in records} | set(facts.wants.records) | set(kept)
    ready = sorted((s.version.number for s in facts.versions if s.version.phase is VersionPhase.READY), reverse=True)
    silent = [Retire(number, f"{Reason.RETIRED}: beyond versions.retain") for number in ready[spec.versions.retain :] if number not in named]
    living = sorted((r for r in records if r.deleted is None), key=lambda r: r.number, reverse=True)
    return [*silent, *(Delete(KIND, r.name, r.uid) for r in living[spec.versions.retain :] if r.number not in kept and _state_of(r) != "Publishing")]


def end(records: Iterable[Record], facts: CatalogFacts, versions: Versions | None, bound: float, now: float) -> list[Action]:
    """Carries deletions and aborts through. `bound`: how long the readers of a deleted version may still go on."""
    states = {state.version.number: state for state in facts.versions}
    used = {versions.target, versions.current} if versions else set()
    actions: list[Action] = []
    for record in sorted(records, key=lambda r: r.number):
        state = states.get(record.number)
        if record.deleted is not None:
            actions += _let_go(record, state, facts.settled, bound, now)
        elif record.abort and state is not None:
            actions += _abort(record, state, used)
    return actions


def _abort(record: Record, state: VersionState, used: set[int]) -> list[Action]:
    if state.version.phase is VersionPhase.PUBLISHING:
        return [Abort(record.number, f"{Reason.ABORTED}: spec.abort is set")]
    if state.version.phase is VersionPhase.READY and record.number not in used:
        return [Retire(record.number, f"{Reason.RETIRED}: spec.abort is set")]
    return []


def _let_go(record: Record, state: VersionState | None, settled: bool, bound: float, now: float) -> list[Action]:
    assert record.deleted is not None, "only deleted records are let go"
    late = now >= record.deleted + bound
    if not record.finalized:
        return []
    if state is not None and state.version.phase is VersionPhase.PUBLISHING:
        return [Abort(record.number, f"{Reason.ABORTED}: its WeightVersion was deleted")]
    if state is not None and state.version.phase is VersionPhase.READY:
        return [Retire(record.number, f"{Reason.RETIRED}: its WeightVersion was deleted")]
    if late or (state is not None and (state.version.phase in _ENDED or state.leases == 0)) or (state is None and settled):
        actions: list[Action] = [ReleaseRecord(record.name, record.uid)]
        if state is not None:
            actions.append(RemoveVersion(record.number))
        if state is not None and state.leases and late:
            note = f"version {record.number} was released with {state.leases} leases left after {bound:.0f} s"
            actions.insert(0, Announce(KIND, record.name, record.uid, True, Reason.DRAIN_DEADLINE_EXCEEDED, note))
        return actions
    return []


def drain_wake(records: Iterable[Record], bound: float, now: float) -> float | None:
    """When the next bounded wait ends."""
    ends = [record.deleted + bound for record in records if record.deleted is not None and record.finalized]
    return min((max(end, now + 1.0) for end in ends), default=None)


def _state_of(record: Record) -> str:
    return str(record.status.get("phase", "Publishing"))


def status(
    spec: RefitGroupSpec,
    record: Record,
    state: VersionState | None,
    fleet: Sequence[Member],
    versions: Versions,
    kept: Sequence[str],
    refused: str | None,
    now: float,
) -> tuple[WeightVersionStatus, tuple[Finding, ...]]:
    """`refused`: why it was taken back, None if it was not."""
    before = WeightVersionStatus.model_validate(record.status)
    if state is None:  # unknown to the catalog: what was written stays true as far as anybody knows
        found = ()
        return before.model_copy(update={"pinned_by": tuple(kept)}), found
    version = state.version
    adopted = _adoption(version.number, fleet, versions)
    done = version.number == versions.target and 0 < adopted.desired == adopted.installed and adopted.desired >= spec.generators.replicas
    converged = before.converged_at or (stamp(now) if done else None)
    made = (*_findings(state, adopted, converged is not None, versions), _back(record, refused), _stalled(state, now))
    made_status = WeightVersionStatus(
        observed_generation=record.generation,
        phase=version.phase.value,
        shards=ShardsStatus(expected=len(version.slots) or record.slots, sealed=state.sealed, bytes=state.sealed_bytes),
        digest=version.root.hex() or before.digest,
        leases=LeasesStatus(active=state.leases, drain_deadline=stamp(state.drain_deadline) if state.drain_deadline is not None else None),
        holders=HoldersStatus(trainers=state.trainers, generators=state.generators),
        adoption=adopted,
        pinned_by=tuple(kept)[:8],
        ready_at=before.ready_at or (stamp(state.ready_at) if state.ready_at is not None else None),
        converged_at=converged,
        conditions=merge(record.status.get("conditions", ()), made, record.generation, now),
    )
    return made_status, made


def _adoption(number: int, fleet: Sequence[Member], versions: Versions) -> AdoptionStatus:
    sent = [m for m in fleet if number == versions.target or number in (m.ordered, m.serving)]
    return AdoptionStatus(
        desired=len(sent),
        staged=sum(m.has(number) and m.serving != number for m in sent),
        installed=sum(m.serving == number for m in sent),
        failed=sum(m.failed_at(number) for m in sent),
    )


def _findings(state: VersionState, adopted: AdoptionStatus, converged: bool, versions: Versions) -> tuple[Finding, ...]:
    phase, number = state.version.phase, state.version.number
    ended, why = _why(state)
    ready = {
        VersionPhase.PUBLISHING: Finding(Condition.READY, "False", Reason.SLOTS_MISSING, f"{state.sealed} of {len(state.version.slots)} slots are sealed"),
        VersionPhase.READY: Finding(Condition.READY, "True", Reason.ALL_SLOTS_SEALED),
        VersionPhase.RELEASING: Finding(Condition.READY, "False", Reason.DRAINING, why),
    }.get(phase, Finding(Condition.READY, "False", ended, why))
    if phase is VersionPhase.READY:
        available = Finding(Condition.AVAILABLE, when(state.available), Reason.HOLDERS_PRESENT if state.available else Reason.NO_HOLDER)
    else:
        available = Finding(Condition.AVAILABLE, "False", ready.reason, ready.message)
    if converged:
        reached = Finding(Condition.CONVERGED, "True", Reason.ALL_INSTALLED)
    elif phase not in (VersionPhase.READY, VersionPhase.PUBLISHING) or number < versions.target:
        reached = Finding(Condition.CONVERGED, "False", Reason.SUPERSEDED if number < versions.target else ready.reason)
    else:
        reached = Finding(Condition.CONVERGED, "False", Reason.INSTALLING, f"{adopted.installed} of {adopted.desired} generators serve it")
    return ready, available, reached


def _back(record: Record, refused: str | None) -> Finding:
    """What was said when it was taken back stays said."""
    if refused is None or record.deleted is not None:
        return Finding(Condition.REJECTED, "False", Reason.NOT_REJECTED)
    before: Mapping[str, Any] = next((c for c in record.status.get("conditions", ()) if c.get("type") == Condition.REJECTED and c.get("status") == "True"), {})
    return Finding(Condition.REJECTED, "True", Reason.ROLLED_BACK, str(before.get("message") or refused))


def _stalled(state: VersionState, now: float) -> Finding:
    if state.leases and state.drain_deadline is not None and now > state.drain_deadline:
        told = f"{state.leases} generators still hold a lease after drainSeconds + leaseSeconds"
        return Finding(Condition.STALLED, "True", Reason.DRAIN_DEADLINE_EXCEEDED, told)
    return Finding(Condition.STALLED, "False", Reason.NOTHING_WRONG)


def _why(state: VersionState) -> tuple[str, str]:
    """The catalog writes `Reason: sentence`."""
    word, _, rest = state.version.reason.partition(":")
    known = word in _REASONS or word.isalpha()
    return (word, rest.strip()) if known else (Reason.ABORTED if state.version.phase is VersionPhase.FAILED else Reason.RETIRED, state.version.reason)

"""Generators that could not carry out an order: whether they try again, and whether the version is taken back (`rollout.onFailure`).

An error with `retry_after` passes by itself, and a generator that serves nothing has nothing to go on with: both are tried again whatever the policy.
Invariants:
- each failed order counts once; pauses grow;
- a version is taken back only with policy Latest, not paused, before it converged, and only if an older one is within reach;
- what was taken back stays so: by its WeightVersion, or, without one, as long as this process remembers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from refit_api.errors import BY_NAME, PeerError
from refit_api.v1alpha1 import RefitGroupSpec

from refit_operator.decide.facts import CatalogFacts, Record
from refit_operator.decide.members import Member
from refit_operator.decide.memory import Attempt, Memory
from refit_operator.decide.target import latest, rejected

RETRIES = 3
_RETRY_FIRST = 2.0
_RETRY_LAST = 60.0


def attempts(fleet: Sequence[Member], memory: Memory, now: float) -> dict[str, Attempt]:
    """Counts each failed order once; forgets generators that are gone or were sent elsewhere."""
    kept: dict[str, Attempt] = {}
    for member in fleet:
        assignment = member.generator.assignment if member.generator else None
        if assignment is None or member.generator is None:
            continue
        before = memory.attempts.get(member.id)
        if before is not None and before.version != assignment.target:
            before = None
        order = (assignment.catalog_epoch, assignment.seq)
        if member.failed_at(assignment.target) and (before is None or before.order != order):
            count = before.count + 1 if before is not None else 1
            asked = (member.generator.error.retry_after if member.generator.error else None) or 0.0
            before = Attempt(assignment.target, count, order, now + max(min(_RETRY_FIRST * 2 ** (count - 1), _RETRY_LAST), asked))
        if before is not None:
            kept[member.id] = before
    return kept


def may_retry(spec: RefitGroupSpec, member: Member, attempt: Attempt | None) -> bool:
    """It may pass by itself, there is nothing that it could go on serving, or `Retry` has tries left."""
    error = member.generator.error if member.generator else None
    passes = error is None or error.retry_after is not None or member.serving == 0
    return passes or (spec.rollout.on_failure == "Retry" and (attempt.count if attempt is not None else 0) <= RETRIES)


def due(spec: RefitGroupSpec, member: Member, memory: Memory, now: float) -> bool:
    attempt = memory.attempts.get(member.id)
    return may_retry(spec, member, attempt) and (attempt is None or attempt.not_before <= now)


def taken_back(spec: RefitGroupSpec, facts: CatalogFacts, records: Sequence[Record], fleet: Sequence[Member], before: Mapping[int, str]) -> dict[int, str]:
    """Versions that Latest may not select, with the reason; `before`: as of the last pass."""
    known = {state.version.number for state in facts.versions}
    found = dict.fromkeys(rejected(records), "") | {number: why for number, why in before.items() if number in known}
    if spec.rollout.on_failure != "Rollback" or spec.rollout.policy != "Latest" or spec.rollout.paused:
        return found
    target = latest(facts, frozenset(found))
    failed = [member for member in fleet if target and member.failed_at(target) and _for_good(member)]
    if failed and not _converged(records, target) and _within_reach(facts, fleet, frozenset({*found, target})):
        found[target] = _told(failed[0])
    return found


def _for_good(member: Member) -> bool:
    """What other peers may give, or time, says nothing about the version."""
    error = member.generator.error if member.generator else None
    kind = BY_NAME.get(error.type) if error is not None else None
    return error is not None and error.retry_after is None and not (kind is not None and issubclass(kind, PeerError))


def _converged(records: Sequence[Record], number: int) -> bool:
    """All served it once: then the fault is of one that joined later."""
    return any(record.number == number and "convergedAt" in record.status for record in records)


def _within_reach(facts: CatalogFacts, fleet: Sequence[Member], refused: frozenset[int]) -> bool:
    """The version that Latest would select instead can be read, or is served and so can be gathered back."""
    following = latest(facts, refused)
    offered = any(state.version.number == following and state.available for state in facts.versions)
    return bool(following) and (offered or any(member.serving == following for member in fleet))


def _told(member: Member) -> str:
    error = member.generator.error if member.generator else None
    return f"pod {member.pod.name}: {error.type}: {error.message}" if error is not None else f"pod {member.pod.name}"

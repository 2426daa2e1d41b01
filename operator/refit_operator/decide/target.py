"""Which version generators are sent to, which is current, which was before. Versions without a Ready phase are never chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from refit_api.names import Condition, Reason
from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import VersionPhase

from refit_operator.decide.facts import CatalogFacts, Group, Record
from refit_operator.decide.members import Member


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a person must repair."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Versions:
    """`target` 0: nobody is sent anywhere. `current`, `previous` 0: none."""

    target: int
    current: int
    previous: int
    problem: Problem | None = None


def choose(
    spec: RefitGroupSpec, group: Group, facts: CatalogFacts, records: Sequence[Record], refused: frozenset[int], fleet: Sequence[Member], least: int
) -> Versions:
    """`refused`: never selected by Latest. `least`: generators that make a version current.

    With Manual nobody is sent anywhere: the target is the newest Ready version, which the framework may install.
    """
    current = _current(fleet, least)
    before = int(group.status.get("currentVersion", 0))
    if current == 0 and not facts.settled:
        current = before
    previous = before if before and before != current else int(group.status.get("previousVersion", 0))
    if spec.rollout.paused and spec.rollout.policy != "Manual":  # joiners of a group that serves nothing yet take the newest
        return Versions(current or int(group.status.get("targetVersion", 0)) or latest(facts, refused), current, previous)
    if spec.rollout.policy == "Pinned" and spec.rollout.pinned_version is not None:
        problem = _missing(spec.rollout.pinned_version, facts, records, fleet)
        return Versions(0 if problem else spec.rollout.pinned_version, current, previous, problem)
    return Versions(latest(facts, refused), current, previous)


def rejected(records: Iterable[Record]) -> frozenset[int]:
    """Taken back, or being deleted: never selected by Latest."""
    return frozenset(record.number for record in records if record.deleted is not None or is_rejected(record))


def is_rejected(record: Record) -> bool:
    return any(c.get("type") == Condition.REJECTED and c.get("status") == "True" for c in record.status.get("conditions", ()))


def latest(facts: CatalogFacts, refused: frozenset[int]) -> int:
    """The newest Ready version that nobody took back."""
    ready = (state.version.number for state in facts.versions if state.version.phase is VersionPhase.READY)
    return max((number for number in ready if number not in refused), default=0)


def _current(fleet: Iterable[Member], least: int) -> int:
    """The newest version that `least` generators serve or have passed."""
    serving = sorted((member.serving for member in fleet if member.serving), reverse=True)
    wanted = max(1, least)
    return serving[wanted - 1] if len(serving) >= wanted else 0


def _missing(number: int, facts: CatalogFacts, records: Sequence[Record], fleet: Sequence[Member]) -> Problem | None:
    """A pin needs somebody who holds the version, or serves it; while the catalog is not settled nobody knows."""
    held = [s.version.number for s in facts.versions if s.version.phase is VersionPhase.READY and (s.offered or s.trainers or s.generators)]
    served = {member.serving for member in fleet} | {member.staged for member in fleet}
    if not facts.settled or number in held or number in served:
        return None
    known = any(record.number == number for record in records)
    there = ", ".join(map(str, sorted(set(held)))) or "none"
    fault = "nobody holds it any more" if known else "there is no such version"
    return Problem(Reason.VERSION_NOT_FOUND, f"rollout.pinnedVersion {number}: {fault}; versions with holders: {there}. Pin one of these, or use policy Latest")

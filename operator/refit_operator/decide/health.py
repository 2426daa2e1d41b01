"""The conditions of a RefitGroup: what holds, in one word and one sentence that says what to do.

Order of blame: what the author wrote, then what the cluster refuses, then what the layouts or engines cannot do, then time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from refit_api.errors import BY_NAME, InstallError, PlanError
from refit_api.implemented import unimplemented
from refit_api.names import Condition, Reason
from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import Role, VersionPhase

from refit_operator.decide.conditions import Finding, when
from refit_operator.decide.facts import Child, Observed, Pod
from refit_operator.decide.failures import may_retry
from refit_operator.decide.members import Member
from refit_operator.decide.memory import Memory
from refit_operator.decide.target import Problem, Versions
from refit_operator.resources import resolved

WORKLOADS = ("StatefulSet", "Deployment")


@dataclass(frozen=True, slots=True)
class Situation:
    """What the conditions are computed from. `stuck`: no progress for progressDeadlineSeconds while there was something to do."""

    spec: RefitGroupSpec
    observed: Observed
    fleet: tuple[Member, ...]
    versions: Versions
    stuck: bool = False
    memory: Memory = field(default_factory=Memory)

    @property
    def least(self) -> int:
        """minAvailable, resolved; none of no generators."""
        replicas = self.spec.generators.replicas
        return resolved(self.spec.generators.min_available, replicas) if replicas else 0


def spec_problem(spec: RefitGroupSpec, observed: Observed) -> Problem | None:
    """Why nothing may be applied: the group goes on as it is until its author acts."""
    refused = unimplemented(spec)
    if refused:
        return Problem(Reason.NOT_IMPLEMENTED, "; ".join(one.message for one in refused))
    bad = [f"{kind}: {verdict.message}" for kind, verdict in sorted(observed.verdicts.items()) if not verdict.accepted]
    if bad:
        return Problem(Reason.INVALID_TEMPLATE, f"the API server refuses pods made from the template; correct it in the spec. {'; '.join(bad)}")
    taken = [f"{child.kind} {child.name}" for child in observed.children if not child.owner]
    if taken:
        return Problem(Reason.NAME_TAKEN, f"{', '.join(taken)}: in the namespace already, but not this group's. Delete it, or rename the group")
    return None


def problem(situation: Situation) -> Problem | None:
    """What a person must repair now, the first in the order of blame."""
    found = spec_problem(situation.spec, situation.observed) or situation.versions.problem or _impossible(situation.fleet)
    if found is not None:
        return found
    refused = [f"{child.kind} {child.name}: {child.trouble}" for child in situation.observed.children if child.trouble]
    if refused:
        return Problem(Reason.PODS_REFUSED, "; ".join(refused))
    if situation.stuck:
        limit = situation.spec.rollout.progress_deadline_seconds
        return Problem(Reason.PROGRESS_DEADLINE_EXCEEDED, f"nothing moved for {limit} s: {_waiting(situation)[1]}")
    return None


def _impossible(fleet: Iterable[Member]) -> Problem | None:
    for member in fleet:
        error = member.generator.error if member.generator else None
        kind = BY_NAME.get(error.type) if error else None
        if error is None or kind is None or not member.failed:
            continue
        if issubclass(kind, PlanError):
            return Problem(Reason.IMPOSSIBLE_REFIT, f"pod {member.pod.name}: {error.type}: {error.message}")
        if issubclass(kind, InstallError) and error.retry_after is None and member.serving == 0:
            return Problem(error.type, f"pod {member.pod.name}: {error.message}")
    return None


def serving(situation: Situation) -> list[Member]:
    """Generators that serve an allowed version and get requests."""
    return [m for m in situation.fleet if m.serving and not m.fenced and m.pod.ready and not lags(situation, m)]


def lags(situation: Situation, member: Member) -> bool:
    """More than maxLag Ready versions behind the target."""
    bound, target = situation.spec.rollout.max_lag, situation.versions.target
    if bound == 0 or not member.serving or member.serving >= target:
        return False
    ready = {s.version.number for s in situation.observed.catalog.versions if s.version.phase is VersionPhase.READY}
    return sum(member.serving < number <= target for number in ready) > bound


def findings(situation: Situation, trouble: Problem | None) -> tuple[Finding, ...]:
    made = [
        _ready(situation),
        _reconciling(situation),
        Finding(Condition.STALLED, when(trouble is not None), trouble.reason if trouble else Reason.NOTHING_WRONG, trouble.message if trouble else ""),
        _degraded(situation),
        _current(situation),
        _suspended(situation),
    ]
    verdicts = situation.observed.verdicts
    if verdicts:
        refused = [f"{kind}: {v.message}" for kind, v in sorted(verdicts.items()) if not v.accepted]
        reason = Reason.INVALID_TEMPLATE if refused else Reason.DRY_RUN_PASSED
        made.append(Finding(Condition.TEMPLATE_VALID, when(not refused), reason, "; ".join(refused)))
    return tuple(made)


def _ready(situation: Situation) -> Finding:
    count, least = len(serving(situation)), situation.least
    if situation.spec.suspend:
        return Finding(Condition.READY, "False", Reason.SUSPEND_REQUESTED, "spec.suspend is true: the group runs no pods")
    if count >= least:
        told = f"{count} of {situation.spec.generators.replicas} generators serve an allowed version; at least {least} must"
        return Finding(Condition.READY, "True", Reason.ENOUGH_GENERATORS, told)
    reason, message = _waiting(situation)
    return Finding(Condition.READY, "False", reason, message)


def _waiting(situation: Situation) -> tuple[str, str]:
    """What the group waits for: the first thing in the order in which things happen."""
    spec, facts = situation.spec, situation.observed.catalog
    trainers = [p for p in situation.observed.pods if p.role is Role.TRAINER and not p.leaving]
    failing = _failing(situation.observed.pods)
    if failing:
        return Reason.CREATING_PODS, failing
    if len(trainers) < spec.trainer.replicas or len(situation.fleet) < spec.generators.replicas:
        there = f"{len(trainers)} of {spec.trainer.replicas} trainer pods, {len(situation.fleet)} of {spec.generators.replicas} generator pods"
        return Reason.CREATING_PODS, f"{there} are there"
    if not facts.settled and facts.epoch > 1:
        return Reason.CATALOG_REBUILDING, "workers are registering again"
    if not any(m.generator and m.generator.whole for m in situation.fleet):
        return Reason.WAITING_FOR_GENERATORS, f"no generator has registered all of its ranks: {_hint(m.pod for m in situation.fleet)}"
    if situation.versions.target == 0 and len(facts.trainers) < max(1, facts.world):
        there = f"{len(facts.trainers)} of {facts.world or 'unknown'} trainer ranks have registered"
        return Reason.WAITING_FOR_TRAINERS, f"{there}: {_hint(trainers)}"
    if situation.versions.target == 0:
        return Reason.WAITING_FOR_PUBLISH, "no version is Ready: the trainer must publish one"
    failed = [m for m in situation.fleet if m.failed_at(situation.versions.target)]
    if failed:
        return Reason.GENERATORS_FAILED, _told(situation, failed)
    at = sum(m.serving == situation.versions.target for m in situation.fleet)
    return _rolling(spec), f"{at} of {len(situation.fleet)} generators serve version {situation.versions.target}"


def _rolling(spec: RefitGroupSpec) -> Reason:
    if spec.rollout.policy == "Manual":
        return Reason.FRAMEWORK_DRIVEN
    return Reason.PAUSED if spec.rollout.paused else Reason.ROLLING_OUT


def _hint(pods: Iterable[Pod]) -> str:
    """Where to look: a pod whose container ended says more than one that still starts."""
    ordered = sorted(pods, key=lambda pod: (not pod.ended_before, pod.name))
    return next((f"pod {pod.name} {pod.ended_before or 'may still be starting; its log says more'}" for pod in ordered), "there is no pod")


def _told(situation: Situation, failed: Sequence[Member]) -> str:
    first, spec = failed[0], situation.spec
    error = first.generator.error if first.generator else None
    retried = may_retry(spec, first, situation.memory.attempts.get(first.id))
    again = "its framework decides what follows" if first.driven else "it is tried again" if retried else "it stays on its version until the next one"
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"pod {first.pod.name}: {error.type}: {error.message}; {again}{more}" if error else f"pod {first.pod.name}{more}"


def _failing(pods: Iterable[Pod]) -> str:
    troubled = [f"pod {pod.name}: {pod.trouble}" for pod in sorted(pods, key=lambda p: p.name) if pod.trouble and not pod.leaving]
    return "; ".join(troubled[:3]) + (f" (and {len(troubled) - 3} more)" if len(troubled) > 3 else "")


def _reconciling(situation: Situation) -> Finding:
    children = {child.kind: child for child in situation.observed.children if child.kind in WORKLOADS}
    for kind in WORKLOADS:
        child = children.get(kind)
        if child is None:
            return Finding(Condition.RECONCILING, "True", Reason.CREATING_PODS, f"the {kind} is not there yet")
        reason = _moving(child)
        if reason is not None:
            return Finding(Condition.RECONCILING, "True", reason, f"{kind} {child.name}: {child.pods} pods, {child.updated} up to date, {child.wanted} wanted")
    return Finding(Condition.RECONCILING, "False", Reason.SETTLED)


def _moving(child: Child) -> Reason | None:
    if child.pods == 0 and child.wanted:
        return Reason.CREATING_PODS
    if child.updated < min(child.pods, child.wanted):
        return Reason.REPLACING_PODS
    return Reason.SCALING if child.pods != child.wanted or not child.settled else None


def _degraded(situation: Situation) -> Finding:
    target = situation.versions.target
    fenced = [m for m in situation.fleet if m.fenced]
    failed = [m for m in situation.fleet if target and m.failed_at(target)]
    behind = [m for m in situation.fleet if lags(situation, m)]
    crashing = [p for p in situation.observed.pods if p.role is Role.TRAINER and p.trouble and not p.leaving]
    if fenced:
        return Finding(Condition.DEGRADED, "True", Reason.GENERATORS_FENCED, f"{len(fenced)} refuse requests until a full install: {_told(situation, fenced)}")
    if failed:
        return Finding(Condition.DEGRADED, "True", Reason.GENERATORS_FAILED, _told(situation, failed))
    if behind:
        return Finding(Condition.DEGRADED, "True", Reason.GENERATORS_LAGGING, f"{len(behind)} generators are more than {situation.spec.rollout.max_lag} behind")
    if crashing:
        return Finding(Condition.DEGRADED, "True", Reason.TRAINERS_FAILING, _failing(crashing))
    return Finding(Condition.DEGRADED, "False", Reason.NOTHING_WRONG)


def _current(situation: Situation) -> Finding:
    target, fleet = situation.versions.target, situation.fleet
    if target and len(fleet) >= situation.spec.generators.replicas and all(m.serving == target for m in fleet):
        return Finding(Condition.WEIGHTS_CURRENT, "True", Reason.ALL_AT_TARGET, f"{len(fleet)} generators serve version {target}")
    if target == 0:
        reason, message = (situation.versions.problem.reason, situation.versions.problem.message) if situation.versions.problem else _waiting(situation)
        return Finding(Condition.WEIGHTS_CURRENT, "False", reason, message)
    failed = [m for m in fleet if m.failed_at(target)]
    if failed:
        return Finding(Condition.WEIGHTS_CURRENT, "False", Reason.GENERATORS_FAILED, _told(situation, failed))
    at, wanted = sum(m.serving == target for m in fleet), max(len(fleet), situation.spec.generators.replicas)
    reason = _rolling(situation.spec)
    return Finding(Condition.WEIGHTS_CURRENT, "False", reason, f"{at} of {wanted} generators serve version {target}")


def _suspended(situation: Situation) -> Finding:
    if situation.spec.suspend:
        return Finding(Condition.SUSPENDED, "True", Reason.SUSPEND_REQUESTED, "spec.suspend is true: set it to false to bring the pods back")
    return Finding(Condition.SUSPENDED, "False", Reason.NOT_SUSPENDED)

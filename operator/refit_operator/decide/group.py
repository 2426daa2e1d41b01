"""`decide`: one picture of a group in, everything to do about it out. Pure: the same picture gives the same actions, in whatever order facts come.

Order of the actions: versions that somebody waits for, children, orders, readiness, retention, status, then what vouches for the status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refit_api import names
from refit_api.dialect import to_api
from refit_api.names import Condition, Reason
from refit_api.status import FanoutStatus, GeneratorsStatus, RefitGroupStatus, Straggler, TrainerStatus
from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import Role

from refit_operator.decide import health, refits, versions
from refit_operator.decide.actions import Action, Announce, Apply, Confirm, Delete, MarkPod, Protect, ReleaseRecord, WriteStatus
from refit_operator.decide.conditions import Finding, merge, turned
from refit_operator.decide.facts import Group, Observed
from refit_operator.decide.failures import taken_back
from refit_operator.decide.health import Situation
from refit_operator.decide.members import Member, members
from refit_operator.decide.memory import Memory
from refit_operator.decide.rollout import Plan, roll
from refit_operator.decide.target import Problem, Versions, choose
from refit_operator.resources import children, template_hash, trainer_name, workloads

KIND = "RefitGroup"
_STRAGGLERS = 16
_ANNOUNCED = (Condition.READY, Condition.STALLED, Condition.DEGRADED, Condition.SUSPENDED, Condition.TEMPLATE_VALID)
_WHO_WAITS = ("catalogEpoch", "versionCeiling", "phase", "targetVersion", "orderedVersion", "currentVersion", "observedGeneration")


@dataclass(frozen=True, slots=True)
class Site:
    """What the operator's installation adds to every group: where pods find the catalog, and the CA that its certificate is checked against."""

    catalog: str
    ca: str


@dataclass(frozen=True, slots=True)
class Decision:
    """`requeue_after`: seconds until time alone changes something; None: only events do."""

    actions: tuple[Action, ...]
    memory: Memory
    requeue_after: float | None


def decide(spec: RefitGroupSpec, group: Group, observed: Observed, site: Site, memory: Memory, now: float) -> Decision:
    facts, bound = observed.catalog, float(spec.versions.drain_seconds + spec.versions.lease_seconds)
    if group.deleting:
        return let_go(observed, bound, memory, now)
    fleet = members(observed, int(group.status.get("currentVersion", 0)), spec.rollout.policy == "Manual")
    memory = replace(memory, refused=taken_back(spec, facts, observed.records, fleet, memory.refused))
    least = Situation(spec, observed, fleet, Versions(0, 0, 0)).least
    chosen = choose(spec, group, facts, observed.records, frozenset(memory.refused), fleet, least)
    halted = health.spec_problem(spec, observed)
    plan = roll(spec, facts, fleet, 0 if halted else chosen.target, memory, now)
    memory, stuck = _progress(spec, observed, fleet, chosen, plan.memory, now)
    situation = Situation(spec, observed, fleet, chosen, stuck, memory)
    actions: list[Action] = [*versions.create(group, facts)]
    if halted is None:
        actions += _children(spec, group, observed, site)
    actions += [*plan.orders, *_gates(fleet), *_protect(spec, observed, chosen, memory)]
    if facts.settled and halted is None:
        actions += versions.retain(spec, observed.records, facts, chosen)
    ends = versions.end(observed.records, facts, chosen, bound, now)
    released = frozenset(action.uid for action in ends if isinstance(action, ReleaseRecord))
    actions += [*ends, *_status(situation, group, plan, now), *_records(situation, released, now), *_confirm(observed)]
    due = _deadline(spec, memory, stuck, now)
    wakes = [t - now for t in (plan.wake, versions.drain_wake(observed.records, bound, now), due) if t is not None]
    return Decision(tuple(actions), replace(memory, current=chosen.current), max(0.05, min(wakes)) if wakes else None)


def refuse(trouble: Problem, group: Group, memory: Memory, now: float) -> Decision:
    """A spec that cannot even be read: nothing is touched, and the status says why."""
    found = (Finding(Condition.STALLED, "True", trouble.reason, trouble.message),)
    kept = tuple(c for c in group.status.get("conditions", ()) if c.get("type") != Condition.STALLED)
    before = RefitGroupStatus.model_validate(group.status)
    conditions = (*RefitGroupStatus.model_validate({"conditions": kept}).conditions, *merge(group.status.get("conditions", ()), found, group.generation, now))
    status = before.model_copy(update={"observed_generation": group.generation, "phase": "Stalled", "conditions": conditions})
    return Decision((*_write(KIND, group.name, group.uid, group.status, to_api(status)), *_announce(group, found)), memory, None)


def let_go(observed: Observed, bound: float, memory: Memory, now: float) -> Decision:
    """The group is going, or gone: nothing is made any more; its versions end in bounded time."""
    actions = versions.end(observed.records, observed.catalog, None, bound, now)
    wake = versions.drain_wake(observed.records, bound, now)
    return Decision(tuple(actions), memory, wake - now if wake is not None else None)


def _children(spec: RefitGroupSpec, group: Group, observed: Observed, site: Site) -> list[Action]:
    actions: list[Action] = [Apply(manifest) for manifest in children(group, spec, site.catalog, site.ca)]
    for workload in workloads(group, spec):
        if workload["kind"] == "StatefulSet":
            actions += _replaced(group, observed, template_hash(workload))
    return actions


def _replaced(group: Group, observed: Observed, wanted: str) -> list[Action]:
    """Trainer pods of another template go together, once their StatefulSet has seen the new one."""
    ready = any(c.kind == "StatefulSet" and c.name == trainer_name(group.name) and c.settled for c in observed.children)
    old = [p for p in observed.pods if p.role is Role.TRAINER and not p.leaving and p.template != wanted]
    return [Delete("Pod", pod.name, pod.uid) for pod in sorted(old, key=lambda p: p.name)] if ready else []


def _gates(fleet: Sequence[Member]) -> list[Action]:
    """A pod is synced when all of its engines serve a version; what has not been heard of keeps its gate."""
    by_pod: dict[str, list[Member]] = {}
    for member in fleet:
        by_pod.setdefault(member.pod.uid, []).append(member)
    actions: list[Action] = []
    for engines in by_pod.values():
        pod = engines[0].pod
        if any(m.generator is None or not m.generator.whole for m in engines):
            continue
        synced = all(m.serving and not m.fenced for m in engines)
        if synced != pod.synced:
            told = "serves a complete version" if synced else "fenced until a full install" if any(m.fenced for m in engines) else "no version installed yet"
            actions.append(MarkPod(pod.name, pod.uid, synced, told))
    return actions


def _protect(spec: RefitGroupSpec, observed: Observed, chosen: Versions, memory: Memory) -> list[Action]:
    numbers = frozenset(versions.keeps(spec, observed.records, chosen))
    if numbers == observed.catalog.protected and chosen.current == memory.current:
        return []
    return [Protect(numbers, chosen.current)]


def _progress(spec: RefitGroupSpec, observed: Observed, fleet: Sequence[Member], chosen: Versions, memory: Memory, now: float) -> tuple[Memory, bool]:
    """Whether nothing moved for too long although there is something to do. Waiting for the trainer to publish is not our delay."""
    pods = tuple(sorted((p.uid, p.ready, p.leaving) for p in observed.pods))
    seen = (chosen.target, pods, len(observed.catalog.trainers), tuple((m.id, m.serving, m.staged, m.kept, m.staging, round(m.progress, 3)) for m in fleet))
    missing = len(fleet) < spec.generators.replicas or any(m.generator is None for m in fleet)
    behind = chosen.target > 0 and any(m.serving != chosen.target and not m.driven for m in fleet)
    idle = spec.suspend or not (missing or behind) or (memory.seen is None)
    if idle or seen != memory.seen:
        return replace(memory, seen=seen, since=now), False
    return memory, now - memory.since >= spec.rollout.progress_deadline_seconds


def _deadline(spec: RefitGroupSpec, memory: Memory, stuck: bool, now: float) -> float | None:
    if stuck or memory.seen is None:
        return None
    return max(now + 1.0, memory.since + spec.rollout.progress_deadline_seconds)


def _confirm(observed: Observed) -> list[Action]:
    wants = observed.catalog.wants
    if not (wants.epoch or wants.ceiling or wants.records):
        return []
    return [Confirm(wants.epoch, wants.ceiling, frozenset(wants.records))]


def _status(situation: Situation, group: Group, plan: Plan, now: float) -> list[Action]:
    trouble = health.problem(situation)
    found = health.findings(situation, trouble)
    facts, chosen = situation.observed.catalog, situation.versions
    made = RefitGroupStatus(
        observed_generation=group.generation,
        conditions=merge(group.status.get("conditions", ()), found, group.generation, now),
        phase=_phase(found),
        target_version=chosen.target or None,
        ordered_version=group.status.get("orderedVersion"),
        current_version=chosen.current or None,
        previous_version=chosen.previous or None,
        catalog_epoch=max(facts.wants.epoch, facts.epoch, int(group.status.get("catalogEpoch", 0))) or None,
        version_ceiling=max(facts.wants.ceiling, int(group.status.get("versionCeiling", 0))) or None,
        generators=_generators(situation, group),
        trainer=_trainer(situation),
        fanout=_fanout(group, plan),
        last_refit=refits.last(situation.fleet, facts, chosen.target, group.status.get("lastRefit")),
        stragglers=_stragglers(situation),
        template_hash="-".join(template_hash(w) for w in workloads(group, situation.spec)) or None,
    )
    turns = turned(group.status.get("conditions", ()), found)
    return [*_write(KIND, group.name, group.uid, group.status, to_api(made)), *_announce(group, _worth(group, turns))]


def _phase(found: Sequence[Finding]) -> Any:
    state = {finding.type: finding.status == "True" for finding in found}
    for condition, phase in ((Condition.SUSPENDED, "Suspended"), (Condition.STALLED, "Stalled"), (Condition.DEGRADED, "Degraded")):
        if state.get(condition):
            return phase
    if state.get(Condition.RECONCILING):
        return "Reconciling"
    return "Ready" if state.get(Condition.READY) else "Pending"


def _generators(situation: Situation, group: Group) -> GeneratorsStatus:
    fleet, target = situation.fleet, situation.versions.target
    return GeneratorsStatus(
        replicas=len({m.pod.uid for m in fleet}),
        ready=len(health.serving(situation)),
        staged=sum(m.has(target) and m.serving != target for m in fleet),
        at_target=sum(bool(target) and m.serving == target for m in fleet),
        lagging=sum(health.lags(situation, m) for m in fleet),
        failed=sum(bool(target) and m.failed_at(target) for m in fleet),
        fenced=sum(m.fenced for m in fleet),
        selector=f"{names.LABEL_GROUP}={group.name},{names.LABEL_ROLE}={names.ROLE_GENERATOR}",
        arena_bytes=max((m.generator.arena_bytes for m in fleet if m.generator), default=0) or None,
    )


def _trainer(situation: Situation) -> TrainerStatus:
    facts = situation.observed.catalog
    pods = [p for p in situation.observed.pods if p.role is Role.TRAINER and not p.leaving]
    registered = {t.worker.pod_uid for t in facts.trainers}
    return TrainerStatus(replicas=len(pods), ready=sum(p.uid in registered for p in pods), world_size=facts.world or None)


def _fanout(group: Group, plan: Plan) -> FanoutStatus | None:
    """The shape of the last rollout: kept when nothing is left to pull."""
    before = group.status.get("fanout")
    if not plan.edges or plan.shape is None:
        return FanoutStatus.model_validate(before) if before else None
    sources = {edge.parent for edge in plan.edges.values()}
    return FanoutStatus(topology=plan.shape.topology.value, depth=max(edge.depth for edge in plan.edges.values()), sources=len(sources))


def _stragglers(situation: Situation) -> tuple[Straggler, ...]:
    target = situation.versions.target
    found = []
    for member in situation.fleet:
        error = member.generator.error if member.generator else None
        if member.fenced:
            found.append((member, str(Reason.GENERATORS_FENCED)))
        elif target and member.failed_at(target) and error is not None:
            found.append((member, error.type))
        elif health.lags(situation, member):
            found.append((member, str(Reason.GENERATORS_LAGGING)))
    found.sort(key=lambda one: (one[0].serving, one[0].pod.name))
    return tuple(Straggler(pod=m.pod.name, version=m.serving or None, reason=reason) for m, reason in found[:_STRAGGLERS])


def _records(situation: Situation, released: frozenset[str], now: float) -> list[Action]:
    """What becomes of each version; not of those that this pass lets go."""
    spec, facts = situation.spec, situation.observed.catalog
    states = {state.version.number: state for state in facts.versions}
    kept = versions.keeps(spec, situation.observed.records, situation.versions)
    actions: list[Action] = []
    for record in sorted((r for r in situation.observed.records if r.uid not in released), key=lambda r: r.number):
        refused = situation.memory.refused.get(record.number)
        status, found = versions.status(spec, record, states.get(record.number), situation.fleet, situation.versions, kept.get(record.number, ()), refused, now)
        actions += _write(versions.KIND, record.name, record.uid, record.status, to_api(status))
        back = next((f for f in turned(record.status.get("conditions", ()), found) if f.type is Condition.REJECTED and f.status == "True"), None)
        if back is not None:
            actions.append(Announce(versions.KIND, record.name, record.uid, True, back.reason, f"version {record.number} was taken back: {back.message}"))
        failed = next((f for f in found if f.type is Condition.READY and status.phase == "Failed"), None)
        if failed is not None and record.status.get("phase") != "Failed":
            actions.append(Announce(versions.KIND, record.name, record.uid, True, failed.reason, f"version {record.number} failed: {failed.message}"))
    return actions


def _write(kind: str, name: str, uid: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Action]:
    if dict(before) == dict(after):
        return []
    marks = [(c.get("type"), c.get("status"), c.get("reason")) for c in before.get("conditions", ())]
    turned_now = marks != [(c["type"], c["status"], c["reason"]) for c in after.get("conditions", ())]
    return [WriteStatus(kind, name, uid, after, turned_now or any(before.get(field) != after.get(field) for field in _WHO_WAITS))]


def _worth(group: Group, turns: Sequence[Finding]) -> list[Finding]:
    """Transitions that people want to read about. At the first pass only what is wrong or right already."""
    first = not group.status.get("conditions")
    usual = {Condition.READY: "False", Condition.STALLED: "False", Condition.DEGRADED: "False", Condition.SUSPENDED: "False", Condition.TEMPLATE_VALID: "True"}
    return [f for f in turns if f.type in _ANNOUNCED and not (first and f.status == usual[f.type])]


def _announce(group: Group, found: Sequence[Finding]) -> list[Action]:
    before = {str(c.get("type")): c.get("status") for c in group.status.get("conditions", ())}
    actions: list[Action] = []
    for finding in found:
        good = "True" if finding.type in (Condition.READY, Condition.TEMPLATE_VALID) else "False"
        lost = finding.type is not Condition.READY or before.get(finding.type) == "True"
        note = f"{finding.type}={finding.status}. {finding.message}".strip()
        actions.append(Announce(KIND, group.name, group.uid, finding.status != good and lost, finding.reason, note))
    return actions

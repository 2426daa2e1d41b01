"""Orders: who stages what from whom, and who commits. Recomputed from what generators report, never from what was meant before.

Invariants:
- a generator that serves its target, or works towards it with sources that are left, gets no new order; while paused none that serves anything;
- an order to commit goes only to a generator that has staged the very version on all ranks; at most maxConcurrent are inside a commit;
- a newer target replaces a stage only below 80 % of it, and never two in a row for one generator, as long as a source is left;
- a failed order is repeated only as `failures` says, with growing pauses;
- nobody begins or finishes a version that was taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from refit_api.v1alpha1 import RefitGroupSpec
from refit_api.wire import CoordinateSources, Order, Source

from refit_operator.decide.actions import Assign
from refit_operator.decide.facts import CatalogFacts, VersionState
from refit_operator.decide.failures import attempts, due
from refit_operator.decide.members import Member
from refit_operator.decide.memory import Memory, Opening
from refit_operator.fanout.edges import TRAINERS, Edge, Node, Stage, assign
from refit_operator.fanout.shape import Load, Rates, Shape, shape
from refit_operator.resources import resolved

FINISH_ABOVE = 0.8
OPENS_WITHIN = 10.0
"""Seconds after which a generator that was sent to stage and opened nothing is no longer waited for by others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`edges` by member id, for printing and status; `wake`: when something waits for the clock."""

    orders: tuple[Assign, ...]
    edges: Mapping[str, Edge]
    shape: Shape | None
    memory: Memory
    wake: float | None


def roll(spec: RefitGroupSpec, facts: CatalogFacts, fleet: Sequence[Member], target: int, memory: Memory, now: float) -> Plan:
    memory = replace(memory, attempts=attempts(fleet, memory, now), openings=_openings(fleet, memory, now))
    state = next((s for s in facts.versions if s.version.number == target), None)
    if target == 0 or state is None or spec.rollout.policy == "Manual":
        return Plan((), {}, None, memory, None)
    ready = [m for m in fleet if m.generator is not None and m.generator.whole]
    available = frozenset(s.version.number for s in facts.versions if s.available)
    usable = available - frozenset(memory.refused) if spec.rollout.policy == "Latest" else frozenset()
    aims = {m.id: m.serving if spec.rollout.paused and m.serving else aim(m, target, usable, memory) for m in ready}
    going = [m for m in ready if aims[m.id] == target and _planned(m, state) and (not m.failed_at(target) or due(spec, m, memory, now))]
    doubtful = frozenset(memory.attempts) | {name for name, opening in memory.openings.items() if now - opening.since >= OPENS_WITHIN}
    edges, chosen = _edges(spec, facts, state, going, doubtful)
    orders = [*_stages(spec, going, edges, target), *_commits(spec, ready, aims, memory, now), *_discards(spec, ready, target, memory)]
    moved = frozenset(f"{order.pod_uid}/{order.instance}" for order in orders if order.order is Order.STAGE)
    superseded = frozenset(m.id for m in going if m.staging not in (0, target))
    memory = replace(memory, superseded=(memory.superseded - moved) | (superseded & moved))
    waits = [t for t in (*(a.not_before for a in memory.attempts.values()), *(o.since + OPENS_WITHIN for o in memory.openings.values())) if t > now]
    return Plan(tuple(orders), edges, chosen, memory, min(waits, default=None))


def _planned(member: Member, state: VersionState) -> bool:
    """Whether the version's plan serves the member's class; a new class waits for the next version."""
    return not state.classes or (member.generator is not None and member.generator.class_hash in state.classes)


def aim(member: Member, target: int, usable: frozenset[int], memory: Memory) -> int:
    """What it works for now: the target, or an older version that it was sent to and should finish first. `usable`: those that it may still finish."""
    ordered = member.ordered
    if ordered == target or ordered not in usable or ordered <= member.serving or member.failed_at(ordered):
        return target
    if member.has(ordered) or member.busy:
        return ordered
    under_way = member.staging == ordered
    return ordered if under_way and (member.progress > FINISH_ABOVE or member.id in memory.superseded) else target


def _openings(fleet: Sequence[Member], memory: Memory, now: float) -> dict[str, Opening]:
    """Who was sent to stage and offers nothing yet: nobody should wait for it for long."""
    found: dict[str, Opening] = {}
    for member in fleet:
        assignment = member.generator.assignment if member.generator else None
        if assignment is None or member.generator is None or not _pulls(member, assignment.target) or assignment.target in member.generator.offers:
            continue
        order = (assignment.catalog_epoch, assignment.seq)
        before = memory.openings.get(member.id)
        found[member.id] = before if before is not None and before.order == order else Opening(order, now)
    return found


def _edges(spec: RefitGroupSpec, facts: CatalogFacts, state: VersionState, going: Sequence[Member], doubtful: frozenset[str]) -> tuple[dict[str, Edge], Shape]:
    """Class by class: only equal needs can be relayed. `doubtful`: they come last and nobody reads from them until they offer the version."""
    number = state.version.number
    classes: dict[str, list[Member]] = {}
    for member in going:
        if member.generator is not None:
            classes.setdefault(member.generator.class_hash, []).append(member)
    edges: dict[str, Edge] = {}
    chosen: list[Shape] = []
    for _, fleet in sorted(classes.items()):
        ranks = max(len(m.generator.ranks) for m in fleet if m.generator)
        readers = [m for m in fleet if _stage(m, number) is not Stage.COMPLETE]
        load = Load(len(readers), state.version.bytes // max(1, ranks), ranks, state.trainers or facts.world)
        form = shape(spec.fanout.topology, spec.fanout.degree, spec.fanout.max_readers_per_source, load, Rates())
        nodes = [_node(spec, m, number, doubtful) for m in fleet]
        edges |= assign(nodes, state.offered, form, {m.id: _parent(m) for m in fleet if _pulls(m, number)})
        chosen.append(form)
    return edges, max(chosen, key=lambda one: one.seconds, default=Shape(shape("Direct", 2, None, Load(0, 0, 1, 1), Rates()).topology, None, None, 0.0))


def _node(spec: RefitGroupSpec, member: Member, number: int, doubtful: frozenset[str]) -> Node:
    stage = _stage(member, number)
    if member.id in doubtful and stage is not Stage.COMPLETE and not (member.generator and number in member.generator.offers):
        return Node(member.id, Stage.WAITING, member.pod.node, leaf=True)
    return Node(member.id, stage, member.pod.node, leaf=not _relays(spec, member, number))


def _stage(member: Member, number: int) -> Stage:
    offers = member.generator.offers if member.generator else {}
    if number in offers:
        return Stage.COMPLETE if offers[number] else Stage.READING
    if member.serving == number or member.has(number):
        return Stage.COMPLETE
    return Stage.READING if _pulls(member, number) else Stage.WAITING


def _pulls(member: Member, number: int) -> bool:
    """Sent to stage the version, and neither done nor failed."""
    assignment = member.generator.assignment if member.generator else None
    return assignment is not None and assignment.target == number and not member.failed and assignment.order is Order.STAGE


def _relays(spec: RefitGroupSpec, member: Member, number: int) -> bool:
    """May others read from it? Who has the bytes must offer them; who is still to pull them will."""
    if not spec.generators.engine.relays or member.fenced or member.generator is None:
        return False
    return number in member.generator.offers or _stage(member, number) is not Stage.COMPLETE


def _parent(member: Member) -> str:
    """Where it reads first, by its present order."""
    assignment = member.generator.assignment if member.generator else None
    for sources in assignment.sources if assignment else ():
        for source in sources.relays:
            return f"{source.worker.pod_uid}/{source.worker.instance}"
    return TRAINERS


def _stages(spec: RefitGroupSpec, going: Sequence[Member], edges: Mapping[str, Edge], target: int) -> list[Assign]:
    by_id = {member.id: member for member in going}
    orders: list[Assign] = []
    for member in going:
        edge = edges.get(member.id)
        if edge is None or _stage(member, target) is Stage.COMPLETE or member.busy:
            continue
        under_way = _pulls(member, target) and _parent(member) == edge.parent
        if under_way or not _offering(by_id.get(edge.parent), edge.parent, target):
            continue
        assert member.generator is not None, "only registered generators are going"
        sources = _sources(member, edge, by_id, target)
        orders.append(Assign(member.generator.pod_uid, member.generator.instance, target, Order.STAGE, sources, _deadline(spec)))
    return orders


def _offering(parent: Member | None, name: str, target: int) -> bool:
    """A child is sent when its parent can be leased: trainers always, peers as soon as they opened their holder."""
    return name == TRAINERS or (parent is not None and parent.generator is not None and target in parent.generator.offers)


def _sources(member: Member, edge: Edge, by_id: Mapping[str, Member], target: int) -> tuple[CoordinateSources, ...]:
    """Coordinate to coordinate; empty when the trainers are the source."""
    if edge.parent == TRAINERS or member.generator is None:
        return ()
    made = []
    for rank in sorted(member.generator.ranks, key=lambda r: r.worker.rank):
        relays = tuple(source for name in (edge.parent, *edge.alternates) for source in _relay(by_id.get(name), rank.coordinate, target))
        made.append(CoordinateSources(rank.coordinate, relays))
    return tuple(made)


def _relay(peer: Member | None, coordinate: str, target: int) -> tuple[Source, ...]:
    if peer is None or peer.generator is None or target not in peer.generator.offers:
        return ()
    complete = peer.generator.offers[target]
    return tuple(
        Source(rank.worker, rank.endpoint, coordinate=coordinate, complete=complete)
        for rank in peer.generator.ranks
        if rank.coordinate == coordinate and rank.endpoint is not None
    )


def _commits(spec: RefitGroupSpec, ready: Sequence[Member], aims: Mapping[str, int], memory: Memory, now: float) -> list[Assign]:
    """Those who have staged commit, as many at once as allowed; who serves nothing goes first, then by name."""
    inside = sum(member.committing or member.busy for member in ready)
    free = max(1, resolved(spec.rollout.max_concurrent, len(ready))) - inside
    waiting = [m for m in ready if m.has(aims[m.id]) and m.serving != aims[m.id] and not m.committing and not m.busy]
    orders: list[Assign] = []
    for member in sorted(waiting, key=lambda m: (m.serving != 0, m.id)):
        if free <= 0:
            break
        number = aims[member.id]
        if member.failed_at(number) and not due(spec, member, memory, now):
            continue
        assert member.generator is not None, "only registered generators have staged"
        kept = member.generator.assignment
        sources = kept.sources if kept is not None and kept.target == number else ()
        orders.append(Assign(member.generator.pod_uid, member.generator.instance, number, Order.COMMIT, sources, _deadline(spec)))
        free -= 1
    return orders


def _discards(spec: RefitGroupSpec, ready: Sequence[Member], target: int, memory: Memory) -> list[Assign]:
    """Who serves the target already gives up a version that was taken back, and offers the target to those who have to go back to it."""
    return [
        Assign(m.generator.pod_uid, m.generator.instance, target, Order.ABORT, (), _deadline(spec))
        for m in ready
        if m.generator is not None and m.serving == target and m.ordered in memory.refused and not m.busy and not m.committing
    ]


def _deadline(spec: RefitGroupSpec) -> float:
    return float(spec.rollout.progress_deadline_seconds)

"""A fleet lives through random events while `decide` gives its orders: what must hold at every moment, and that it gets there in the end."""

from __future__ import annotations

import random as randomness
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from refit_api.wire import Assignment, Order, RankPhase
from refit_operator.decide.actions import Assign, MarkPod
from refit_operator.decide.facts import Generator, Observed
from refit_operator.decide.group import Decision, decide
from refit_operator.decide.members import members
from refit_operator.decide.memory import Memory
from refit_operator.resources import resolved

from tests.decide.world import NOW, SITE, catalog, failure, generator, group, observed, pod, spec, state
from tests.examples import examples

EVENTS = ("publish", "stage", "finish", "commit", "fail", "break", "restart", "leave", "join", "wait", "release")


@dataclass
class Engine:
    """One generator as its agent would report it."""

    serving: int = 0
    arena: int = 0
    staging: int = 0
    progress: float = 0.0
    assignment: Assignment | None = None
    heard: tuple[int, int] = (0, 0)
    failed: str = ""
    fenced: bool = False

    def facts(self, name: str) -> Generator:
        phase = RankPhase.STAGING if self.staging else RankPhase.STAGED if self.arena != self.serving else RankPhase.SERVING if self.serving else RankPhase.IDLE
        error = failure(self.failed, 0.1 if self.failed == "PeerUnavailable" else None) if self.failed else None
        return generator(
            name, serving=self.serving, arena=self.arena, staging=self.staging, progress=self.progress,
            phase=phase, assignment=self.assignment, heard=self.heard, error=error, fenced=self.fenced,
        )  # fmt: skip


@dataclass
class World:
    spec: dict[str, Any]
    engines: dict[str, Engine] = field(default_factory=dict)
    newest: int = 1
    closed: frozenset[int] = frozenset()
    now: float = NOW
    memory: Memory = field(default_factory=Memory)
    status: dict[str, Any] = field(default_factory=dict)
    made: int = 0

    def look(self, random: randomness.Random | None = None) -> Observed:
        generators = [engine.facts(name) for name, engine in self.engines.items()]
        versions = [state(n, offered=n not in self.closed, trainers=0 if n in self.closed else 1) for n in range(1, self.newest + 1)]
        if random is not None:
            random.shuffle(generators)
            random.shuffle(versions)
        seen = observed(catalog(*generators, versions=tuple(versions)))
        return replace(seen, pods=tuple(replace(p, synced=self.engines[p.name].serving > 0) if p.name in self.engines else p for p in seen.pods))

    def decide(self, seen: Observed | None = None) -> Decision:
        made = spec(max(1, len(self.engines)), **self.spec)
        return decide(made, group(status=self.status), seen if seen is not None else self.look(), SITE, self.memory, self.now)

    def carry_out(self, decision: Decision) -> None:
        self.memory = decision.memory
        for order in orders(decision):
            engine = self.engines[order.pod_uid]
            seq = engine.assignment.seq + 1 if engine.assignment else 1
            engine.assignment = Assignment(1, seq, order.target, order.order, order.sources, order.deadline_seconds)

    def happen(self, event: str, pick: randomness.Random) -> None:
        self.now += 1.0
        if event == "publish":
            self.newest += 1
            self.closed |= {self.newest - 2}
        elif event == "join" and len(self.engines) < 6:
            self.engines[f"g{self.made}"] = Engine()
            self.made += 1
        elif event == "wait":
            self.now += 120.0
        elif self.engines:
            name = pick.choice(sorted(self.engines))
            if event == "leave":
                del self.engines[name]
            else:
                obey(self.engines[name], event)


def obey(engine: Engine, event: str) -> None:
    """What an agent does next; orders that it cannot follow leave it as it is."""
    order = engine.assignment
    if event == "restart":
        engine.__init__(assignment=order)  # type: ignore[misc]
    if order is None:
        return
    fresh = engine.heard < (1, order.seq)
    if event == "stage" and order.order is Order.STAGE and (fresh or not engine.failed):
        engine.heard, engine.failed = (1, order.seq), ""
        if engine.arena != order.target:
            engine.staging, engine.arena, engine.progress = order.target, 0, 0.5
    elif event == "finish" and engine.staging:
        engine.arena, engine.staging = engine.staging, 0
    elif event == "commit" and order.order is Order.COMMIT and engine.arena == order.target:
        engine.heard, engine.serving, engine.failed, engine.fenced = (1, order.seq), order.target, "", False
    elif event == "stage" and order.order is Order.ABORT and fresh:
        engine.heard, engine.failed, engine.arena, engine.staging = (1, order.seq), "", engine.serving, 0
    elif event in ("fail", "break") and fresh:
        engine.heard, engine.failed, engine.staging = (1, order.seq), "PeerUnavailable" if event == "fail" else "InstallError", 0


def orders(decision: Decision) -> list[Assign]:
    return [action for action in decision.actions if isinstance(action, Assign)]


SPECS = st.fixed_dictionaries(
    {
        "rollout__maxConcurrent": st.sampled_from([1, "50%", "100%"]),
        "fanout__topology": st.sampled_from(["Auto", "Direct", "Chain"]),
        "rollout__onFailure": st.sampled_from(["KeepPrevious", "Retry", "Rollback"]),
        "generators__minAvailable": st.sampled_from([0, 1, 2, "100%"]),
    }
)


@examples(20)
@given(SPECS, st.lists(st.sampled_from(EVENTS), max_size=40), st.randoms(use_true_random=False))
def test_at_every_moment(parts: dict[str, Any], events: list[str], random: randomness.Random) -> None:
    """Orders are right, bounded, given once, the same in any order of facts; no pod that serves is taken out."""
    world = World(parts, engines={"g-a": Engine(), "g-b": Engine()})
    for event in events:
        world.happen(event, random)
        decision = world.decide()
        assert world.decide(world.look(random)).actions == decision.actions, "the order of facts must not matter"
        for order in orders(decision):
            assert order.target not in decision.memory.refused, "what was taken back is not given out again"
            if order.order is Order.COMMIT:
                assert world.engines[order.pod_uid].arena == order.target, "only who has staged commits"
        assert set(world.memory.refused) <= set(decision.memory.refused), "and stays so"
        assert parts["rollout__onFailure"] == "Rollback" or not decision.memory.refused
        marked = [action for action in decision.actions if isinstance(action, MarkPod) and not action.synced]
        assert all(world.engines[mark.name].serving == 0 or world.engines[mark.name].fenced for mark in marked), "who serves stays in service"
        world.carry_out(decision)
        fleet = members(world.look(), 0)
        limit = max(1, resolved(parts["rollout__maxConcurrent"], max(1, len(fleet))))
        assert sum(m.committing for m in fleet) <= max(limit, 1) or not orders(decision), "maxConcurrent"
        assert orders(world.decide()) == [], "an order is given once"


@examples(20)
@given(SPECS, st.lists(st.sampled_from(EVENTS), max_size=25), st.randoms(use_true_random=False))
def test_in_the_end_everybody_serves_the_target(parts: dict[str, Any], events: list[str], random: randomness.Random) -> None:
    """When nothing more goes wrong, the fleet converges in a bounded number of steps on the next version, whatever happened before."""
    world = World(parts, engines={"g-a": Engine(), "g-b": Engine()})
    for event in events:
        world.happen(event, random)
        world.carry_out(world.decide())
    world.happen("publish", random)
    for _ in range(12 * (len(world.engines) + 1)):
        world.now += 120.0
        world.carry_out(world.decide())
        for engine in world.engines.values():
            for event in ("stage", "finish", "commit"):
                obey(engine, event)
    assert {engine.serving for engine in world.engines.values()} <= {world.newest}


@examples(20)
@given(SPECS, st.lists(st.sampled_from(EVENTS), max_size=25), st.randoms(use_true_random=False))
def test_a_version_that_nobody_can_install_leaves_everybody_on_the_one_before(parts: dict[str, Any], events: list[str], random: randomness.Random) -> None:
    """With Rollback, and however far it came, as long as somebody serves or offers the one before."""
    world = World({**parts, "rollout__onFailure": "Rollback"}, engines={"g-a": Engine(serving=1, arena=1), "g-b": Engine(serving=1, arena=1)}, newest=2)
    broken = 2
    world.carry_out(world.decide())
    for event in events:
        if event not in ("publish", "break", "fail", "restart", "leave"):
            world.happen(event, random)
            world.carry_out(world.decide())
    if all(engine.serving == broken for engine in world.engines.values()):
        return
    for _ in range(12 * (len(world.engines) + 1)):
        world.now += 120.0
        world.carry_out(world.decide())
        for engine in world.engines.values():
            hit = engine.assignment is not None and engine.assignment.target == broken and engine.serving != broken
            for event in ("break",) if hit else ("stage", "finish", "commit"):
                obey(engine, event)
    assert {engine.serving for engine in world.engines.values()} == {1}


def test_a_pod_that_is_leaving_gets_no_orders() -> None:
    """It has other things to do."""
    seen = observed(catalog(generator("a"), versions=(state(2),)), pods=(pod("a", leaving=True),))
    assert orders(decide(spec(), group(), seen, SITE, Memory(), NOW)) == []

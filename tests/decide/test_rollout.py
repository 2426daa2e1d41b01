"""Who gets which order, as a table: each row is a picture of the fleet and the orders that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from refit_api.wire import Order
from refit_operator.decide.actions import Assign
from refit_operator.decide.facts import CatalogFacts, Generator
from refit_operator.decide.memory import Attempt, Memory, Opening
from refit_operator.decide.rollout import roll

from tests.decide.world import NOW, catalog, failure, fleet, generator, order, spec, state

STAGE, COMMIT = Order.STAGE, Order.COMMIT


@dataclass(frozen=True)
class Row:
    """`orders`: (pod, version, order, first source or "trainers")."""

    protects: str
    generators: Sequence[Generator]
    orders: Sequence[tuple[str, int, Order, str]]
    target: int = 2
    spec: dict[str, Any] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    offered: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    older: dict[str, Any] = field(default_factory=dict)


AT_OLD = {"serving": 1, "arena": 1}
AT_NEW = {"serving": 2, "arena": 2}
RETRY = {"rollout__onFailure": "Retry"}

ROWS = [
    Row("nobody is there, nothing is ordered", [], []),
    Row("no target, nothing is ordered", [generator("a")], [], target=0),
    Row("the first one reads from the trainers", [generator("a")], [("a", 2, STAGE, "trainers")]),
    Row("an order under way is not repeated", [generator("a", assignment=order(2))], []),
    Row("not even when the stage has begun", [generator("a", staging=2, assignment=order(2))], []),
    Row("who has staged commits", [generator("a", arena=2, assignment=order(2))], [("a", 2, COMMIT, "trainers")]),
    Row("an order to commit is not repeated", [generator("a", arena=2, assignment=order(2, COMMIT))], []),
    Row("who serves the target is left alone", [generator("a", **AT_NEW, assignment=order(2, COMMIT))], []),
    Row("also when an operator without memory sees it first", [generator("a", **AT_NEW)], []),
    Row("a joiner reads from a peer, not from the trainers", [generator("a", **AT_NEW), generator("b")], [("b", 2, STAGE, "a")]),
    Row("the next one waits until the first has opened its holder", [generator("a", **AT_NEW), generator("b"), generator("c")], [("b", 2, STAGE, "a")]),
    Row(
        "then it reads behind the first while that is staging",
        [generator("a", **AT_NEW), generator("b", staging=2, assignment=order(2, parent="a")), generator("c")],
        [("c", 2, STAGE, "b")],
    ),
    Row(
        "with maxReadersPerSource 2 both read from the same peer",
        [generator("a", **AT_NEW), generator("b"), generator("c")],
        [("b", 2, STAGE, "a"), ("c", 2, STAGE, "a")],
        spec={"fanout__maxReadersPerSource": 2},
    ),
    Row("Direct reads from the trainers", [generator("a", **AT_NEW), generator("b")], [("b", 2, STAGE, "trainers")], spec={"fanout__topology": "Direct"}),
    Row(
        "without relays everybody reads from the trainers",
        [generator("a", **AT_NEW), generator("b")],
        [("b", 2, STAGE, "trainers")],
        spec={"generators__engine": {"relay": False}},
    ),
    Row("nobody offers the version: it waits", [generator("a", **AT_OLD)], [], offered=False),
    Row("a version that only a peer holds comes from the peer", [generator("a", **AT_NEW), generator("b", **AT_OLD)], [("b", 2, STAGE, "a")], offered=False),
    Row(
        "maxConcurrent bounds those inside a commit",
        [generator("a", arena=2), generator("b", arena=2)],
        [("a", 2, COMMIT, "trainers")],
        spec={"rollout__maxConcurrent": 1},
    ),
    Row(
        "the next one commits when the first serves",
        [generator("a", **AT_NEW, assignment=order(2, COMMIT)), generator("b", arena=2)],
        [("b", 2, COMMIT, "trainers")],
        spec={"rollout__maxConcurrent": 1},
    ),
    Row(
        "who serves nothing commits first",
        [generator("a", serving=1, arena=2), generator("b", arena=2)],
        [("b", 2, COMMIT, "trainers")],
        spec={"rollout__maxConcurrent": 1},
    ),
    Row(
        "a newer target replaces a stage that has hardly begun",
        [generator("a", serving=1, staging=2, progress=0.5, assignment=order(2))],
        [("a", 3, STAGE, "trainers")],
        target=3,
    ),
    Row("but not one that is almost there", [generator("a", serving=1, staging=2, progress=0.9, assignment=order(2))], [], target=3),
    Row(
        "and never two in a row",
        [generator("a", serving=1, staging=2, progress=0.1, assignment=order(2))],
        [],
        target=3,
        memory=Memory(superseded=frozenset({"a/0"})),
    ),
    Row(
        "unless its last source is gone",
        [generator("a", serving=1, staging=2, progress=0.1, assignment=order(2))],
        [("a", 3, STAGE, "trainers")],
        target=3,
        memory=Memory(superseded=frozenset({"a/0"})),
        older={"offered": False},
    ),
    Row("what was finished is committed before the next", [generator("a", serving=1, arena=2, assignment=order(2))], [("a", 2, COMMIT, "trainers")], target=3),
    Row(
        "a pin does not wait for what it replaces",
        [generator("a", serving=3, staging=2, progress=0.9, assignment=order(2))],
        [("a", 1, STAGE, "trainers")],
        target=1,
        spec={"rollout": {"policy": "Pinned", "pinnedVersion": 1}},
    ),
    Row("a failure without a remedy waits for the next version", [generator("a", **AT_OLD, assignment=order(2), error=failure())], []),
    Row("the next version is tried", [generator("a", **AT_OLD, assignment=order(2), error=failure())], [("a", 3, STAGE, "trainers")], target=3),
    Row(
        "an error that may pass is tried again after its pause",
        [generator("a", **AT_OLD, assignment=order(2), error=failure("PeerUnavailable", 1.0))],
        [("a", 2, STAGE, "trainers")],
        memory=Memory(attempts={"a/0": Attempt(2, 1, (1, 1), NOW - 1)}),
    ),
    Row("not before", [generator("a", **AT_OLD, assignment=order(2), error=failure("PeerUnavailable", 1.0))], []),
    Row(
        "who serves nothing is always tried again",
        [generator("a", assignment=order(2), error=failure())],
        [("a", 2, STAGE, "trainers")],
        memory=Memory(attempts={"a/0": Attempt(2, 1, (1, 1), NOW - 1)}),
    ),
    Row("an error of before the order says nothing about it", [generator("a", **AT_OLD, assignment=order(2, seq=5), heard=(1, 4), error=failure())], []),
    Row("a fenced one that heard its order is tried again after a pause", [generator("a", arena=2, fenced=True, assignment=order(2, COMMIT))], []),
    Row(
        "who is fenced and has the bytes installs again",
        [generator("a", arena=2, fenced=True, assignment=order(2, COMMIT))],
        [("a", 2, COMMIT, "trainers")],
        memory=Memory(attempts={"a/0": Attempt(2, 1, (1, 1), NOW - 1)}),
    ),
    Row("a restarted engine stages anew", [generator("a", assignment=order(2, COMMIT))], [("a", 2, STAGE, "trainers")]),
    Row("who is inside a commit gets no other order", [generator("a", serving=1, arena=2, phase="Committing", assignment=order(2, COMMIT))], [], target=3),
    Row(
        "a reader whose parent is gone gets another",
        [generator("a", **AT_NEW), generator("c", staging=2, assignment=order(2, parent="b"))],
        [("c", 2, STAGE, "a")],
    ),
    Row(
        "a class that the version was not planned for waits for the next", [generator("a", class_hash="class-b")], [], facts={"classes": frozenset({"class-a"})}
    ),
    Row(
        "nobody hangs below one that failed",
        [generator("a", **AT_OLD, assignment=order(2), error=failure()), generator("b", **AT_OLD)],
        [("b", 2, STAGE, "trainers")],
    ),
    Row(
        "nor waits long for one that opens nothing",
        [generator("a", **AT_OLD, assignment=order(2)), generator("b", **AT_OLD)],
        [
            ("b", 2, STAGE, "trainers"),
        ],
        memory=Memory(openings={"a/0": Opening((1, 1), NOW - 60)}),
    ),
    Row("but for a while it does", [generator("a", **AT_OLD, assignment=order(2)), generator("b", **AT_OLD)], []),
    Row("paused: nobody who serves moves", [generator("a", **AT_OLD), generator("b", **AT_NEW)], [], spec={"rollout__paused": True}),
    Row("paused: a joiner joins", [generator("a", **AT_OLD), generator("b")], [("b", 1, STAGE, "a")], target=1, spec={"rollout__paused": True}),
    Row("what it keeps is committed without a pull", [generator("a", serving=2, arena=2, kept=1)], [("a", 1, COMMIT, "trainers")], target=1),
    Row("who keeps a version is a source of it", [generator("a", serving=2, arena=2, kept=1), generator("b")], [("b", 2, STAGE, "a")]),
    Row(
        "Retry: an error that does not pass is tried again",
        [generator("a", **AT_OLD, assignment=order(2), error=failure())],
        [("a", 2, STAGE, "trainers")],
        spec=RETRY,
        memory=Memory(attempts={"a/0": Attempt(2, 3, (1, 1), NOW - 1)}),
    ),
    Row(
        "three times",
        [generator("a", **AT_OLD, assignment=order(2), error=failure())],
        [],
        spec=RETRY,
        memory=Memory(attempts={"a/0": Attempt(2, 4, (1, 1), NOW - 1)}),
    ),
    Row(
        "also an install, from what is there",
        [generator("a", **AT_OLD, kept=2, assignment=order(2, COMMIT), error=failure("InstallError"))],
        [("a", 2, COMMIT, "trainers")],
        spec=RETRY,
        memory=Memory(attempts={"a/0": Attempt(2, 1, (1, 1), NOW - 1)}),
    ),
    Row(
        "taken back: who has not installed it gives it up, who has goes back",
        [generator("a", serving=1, arena=2, assignment=order(2)), generator("b", **AT_NEW, assignment=order(2, COMMIT)), generator("c", **AT_OLD)],
        [("b", 1, STAGE, "c"), ("a", 1, Order.ABORT, "trainers")],
        target=1,
        memory=Memory(refused={2: "why"}),
    ),
    Row(
        "and it is told so once",
        [generator("a", serving=1, arena=2, assignment=order(1, Order.ABORT))],
        [],
        target=1,
        memory=Memory(refused={2: "why"}),
    ),
    Row(
        "a newer one replaces it at once, however far it came",
        [generator("a", serving=1, arena=2, assignment=order(2))],
        [("a", 3, STAGE, "trainers")],
        target=3,
        memory=Memory(refused={2: "why"}),
    ),
    Row("Manual: nobody gets an order", [generator("a"), generator("b", arena=2)], [], spec={"rollout__policy": "Manual"}),
    Row("a generator with a rank missing is not ordered about", [generator("a", whole=False)], []),
]


def carried_out(orders: Sequence[Assign]) -> list[tuple[str, int, Order, str]]:
    first = {a.pod_uid: next((s.worker.pod_uid for one in a.sources for s in one.relays), "trainers") for a in orders}
    return [(a.pod_uid, a.target, a.order, first[a.pod_uid]) for a in orders]


def facts_of(row: Row) -> CatalogFacts:
    known = {n: row.facts if n == row.target else row.older for n in (1, 2, 3) if n <= max(2, row.target)}
    versions = tuple(state(n, **{"offered": row.offered, **facts}) for n, facts in known.items())
    return catalog(*row.generators, versions=versions)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.protects.replace(" ", "-"))
def test_orders(row: Row) -> None:
    facts = facts_of(row)
    plan = roll(spec(len(row.generators), **row.spec), facts, fleet(facts), row.target, row.memory, NOW)
    assert carried_out(plan.orders) == list(row.orders)


def test_a_failure_is_counted_once_and_its_pauses_grow() -> None:
    """The same report seen twice is one failure; the next order's failure waits twice as long."""
    facts = catalog(generator("a", **AT_OLD, assignment=order(2), error=failure("PeerUnavailable", 0.1)), versions=(state(2),))
    first = roll(spec(), facts, fleet(facts), 2, Memory(), NOW).memory
    assert roll(spec(), facts, fleet(facts), 2, first, NOW + 1).memory == first
    again = catalog(generator("a", **AT_OLD, assignment=order(2, seq=2), error=failure("PeerUnavailable", 0.1)), versions=(state(2),))
    second = roll(spec(), again, fleet(again), 2, first, NOW).memory
    assert [m.attempts["a/0"].not_before - NOW for m in (first, second)] == [2.0, 4.0]


def test_alternates_travel_with_the_order() -> None:
    """A child whose parent fails goes on at once, without asking."""
    facts = catalog(generator("a", **AT_NEW), generator("b", **AT_NEW), generator("c"), versions=(state(2),))
    (only,) = roll(spec(3), facts, fleet(facts), 2, Memory(), NOW).orders
    assert [source.worker.pod_uid for source in only.sources[0].relays] == ["a", "b"]

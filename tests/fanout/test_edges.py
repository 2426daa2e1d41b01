"""Who reads from whom: a few shapes by hand, then what holds for every fleet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refit_operator.fanout.edges import TRAINERS, Edge, Node, Stage, assign
from refit_operator.fanout.shape import Shape, Topology

from tests.examples import examples

CHAIN = Shape(Topology.CHAIN, 2, 1, 0.0)
TREE = Shape(Topology.TREE, 1, 2, 0.0)
DIRECT = Shape(Topology.DIRECT, None, None, 0.0, trainers_first=True)


def waiting(*names: str, domain: str = "") -> list[Node]:
    return [Node(name, Stage.WAITING, domain) for name in names]


@dataclass(frozen=True)
class Row:
    protects: str
    nodes: list[Node]
    shape: Shape
    parents: dict[str, str]
    offered: bool = True
    previous: tuple[tuple[str, str], ...] = ()


ROWS = [
    Row("nobody reads, nothing is drawn", [], CHAIN, {}),
    Row("one reads from the trainers", waiting("a"), CHAIN, {"a": TRAINERS}),
    Row("two streams make two chains, evenly long", waiting("a", "b", "c", "d"), CHAIN, {"a": TRAINERS, "b": TRAINERS, "c": "a", "d": "b"}),
    Row("a tree fills each level before the next", waiting("a", "b", "c", "d"), TREE, {"a": TRAINERS, "b": "a", "c": "a", "d": "b"}),
    Row("direct means everybody", waiting("a", "b", "c"), DIRECT, dict.fromkeys("abc", TRAINERS)),
    Row("direct without trainers falls back to a peer", [Node("a", Stage.COMPLETE), *waiting("b")], DIRECT, {"b": "a"}, offered=False),
    Row("a joiner spares the trainers", [Node("a", Stage.COMPLETE), *waiting("b")], CHAIN, {"b": "a"}),
    Row("joiners queue up behind each other", [Node("a", Stage.COMPLETE), *waiting("b", "c")], CHAIN, {"b": "a", "c": "b"}),
    Row("a leaving holder gets no child", [Node("a", Stage.COMPLETE, leaf=True), *waiting("b")], CHAIN, {"b": TRAINERS}),
    Row("leaves read last, below the others", [Node("a", Stage.WAITING, leaf=True), *waiting("b", "c")], CHAIN, {"a": "b", "b": TRAINERS, "c": TRAINERS}),
    Row("nobody has it: all wait", waiting("a", "b"), CHAIN, {}, offered=False),
    Row(
        "the same rack first",
        [Node("a", Stage.COMPLETE, "r1"), Node("b", Stage.COMPLETE, "r2"), *waiting("c", domain="r2")],
        CHAIN,
        {"c": "b"},
    ),
    Row(
        "readers under way keep their parent",
        [Node("a", Stage.COMPLETE), Node("b", Stage.COMPLETE), Node("c", Stage.READING), *waiting("d")],
        CHAIN,
        {"c": "b", "d": "a"},
        previous=(("c", "b"),),
    ),
    Row("unless it is gone", [Node("a", Stage.COMPLETE), Node("c", Stage.READING)], CHAIN, {"c": "a"}, previous=(("c", "b"),)),
    Row("who reads from closing trainers may finish", [Node("c", Stage.READING)], CHAIN, {"c": TRAINERS}, offered=False, previous=(("c", TRAINERS),)),
    Row(
        "a chain whose head died hangs on its next source as a whole",
        [Node("a", Stage.READING), Node("b", Stage.READING)],
        CHAIN,
        {"a": TRAINERS, "b": "a"},
        previous=(("a", "dead"), ("b", "a")),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.protects.replace(" ", "-"))
def test_parents(row: Row) -> None:
    found = assign(row.nodes, row.offered, row.shape, dict(row.previous))
    assert {name: edge.parent for name, edge in found.items()} == row.parents


NODES = st.lists(
    st.builds(
        Node,
        id=st.sampled_from([f"p{i}" for i in range(12)]),
        stage=st.sampled_from(Stage),
        domain=st.sampled_from(["r1", "r2"]),
        leaf=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda node: node.id,
)
SHAPES = st.sampled_from([CHAIN, TREE, DIRECT, Shape(Topology.CHAIN, 1, 1, 0.0), Shape(Topology.TREE, 3, 4, 0.0)])
PREVIOUS = st.dictionaries(st.sampled_from([f"p{i}" for i in range(12)]), st.sampled_from([TRAINERS, *(f"p{i}" for i in range(14))]), max_size=8)


@examples(200)
@given(NODES, st.booleans(), SHAPES, PREVIOUS, st.randoms(use_true_random=False))
def test_what_holds_for_every_fleet(nodes: list[Node], offered: bool, shape: Shape, previous: dict[str, str], random: object) -> None:
    """No cycle, no orphan, no reader above its limit, nobody below a leaf, alternates off the reader's own branch; the order of facts is nothing."""
    found = assign(nodes, offered, shape, previous)
    by_id = {node.id: node for node in nodes}
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(shuffled, offered, shape, previous) == found
    for name, edge in found.items():
        assert by_id[name].stage is not Stage.COMPLETE
        path = _up(name, found)
        assert path[-1] == TRAINERS or by_id[path[-1]].stage is Stage.COMPLETE
        assert edge.parent == TRAINERS or not by_id[edge.parent].leaf
        assert not any(name in _up(other, found) for other in edge.alternates)
        assert not {edge.parent, name} & set(edge.alternates)
    for parent in {edge.parent for edge in found.values()} - {TRAINERS}:
        assert shape.fanout is None or sum(edge.parent == parent for edge in found.values()) <= shape.fanout
    kept = sum(previous.get(n.id) == TRAINERS and n.stage is Stage.READING for n in nodes)
    assert shape.streams is None or sum(edge.parent == TRAINERS for edge in found.values()) <= max(shape.streams, kept)


@examples(100)
@given(NODES, SHAPES)
def test_nobody_waits_while_a_source_has_room(nodes: list[Node], shape: Shape) -> None:
    """Who is not in the answer found every source taken."""
    found = assign(nodes, True, shape, {})
    left = [n for n in nodes if n.stage is not Stage.COMPLETE and n.id not in found]
    if left:
        loads = [sum(edge.parent == n.id for edge in found.values()) for n in nodes if not n.leaf and (n.id in found or n.stage is Stage.COMPLETE)]
        assert all(shape.fanout is not None and load >= shape.fanout for load in loads)
        assert sum(edge.parent == TRAINERS for edge in found.values()) == shape.streams


def _up(name: str, found: dict[str, Edge]) -> list[str]:
    """The way to the root; fails on a cycle."""
    path = []
    while name in found:
        assert name not in path, "cycle"
        path.append(name)
        name = found[name].parent
    return [*path, name]

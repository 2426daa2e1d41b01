"""Who reads a version from whom, within one engine class: `assign` is pure, deterministic and order-free.

Invariants (properties under test):
- following parents always ends at the trainers or at a complete holder: no cycle, no orphan;
- nobody exceeds its limit: `streams` at the trainers, `fanout` at a generator; who finds no place waits and is not in the answer;
- trainers are read only while no peer holds the version (then the first `streams` readers), or when no peer has room;
- leaves (leaving, draining, demoted) are never above anybody;
- an edge that works stays: readers under way keep their parent while it may serve them;
- alternates are no descendants of the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from refit_operator.fanout.shape import Shape, Topology

TRAINERS = ""
"""The parent of who reads from the trainers."""
_ALTERNATES = 2


class Stage(IntEnum):
    """Better sources first."""

    COMPLETE = 0
    READING = 1
    WAITING = 2


@dataclass(frozen=True, slots=True)
class Node:
    """A generator of the class. `domain`: its place; readers prefer sources of the same. `leaf`: nobody may read from it."""

    id: str
    stage: Stage
    domain: str = ""
    leaf: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """`alternates`: where to go on when the parent fails, before the trainers. `depth`: hops from the trainers or from a complete holder."""

    parent: str
    depth: int
    alternates: tuple[str, ...] = ()


def assign(nodes: Iterable[Node], offered: bool, shape: Shape, previous: Mapping[str, str]) -> dict[str, Edge]:
    """An edge for each node that is not complete and finds a source. `offered`: the trainers hold the version. `previous`: parents until now."""
    tree = _Tree({node.id: node for node in sorted(nodes, key=lambda n: n.id)}, offered, shape)
    tree.keep(previous)
    waiting = [n for n in tree.nodes.values() if n.stage is not Stage.COMPLETE and n.id not in tree.parents]
    for node in sorted(waiting, key=lambda n: (n.leaf, n.stage, n.domain, n.id)):
        tree.place(node)
    return {id: Edge(parent, tree.depth(id), tree.alternates(id)) for id, parent in sorted(tree.parents.items())}


@dataclass(slots=True)
class _Tree:
    nodes: Mapping[str, Node]
    offered: bool
    shape: Shape
    parents: dict[str, str] = field(default_factory=dict)
    load: dict[str, int] = field(default_factory=dict)

    def keep(self, previous: Mapping[str, str]) -> None:
        """Takes over the edges of readers under way, from the sources downwards, so that none hangs on a parent that lost its own.

        Who reads from the trainers keeps doing so even if they take no new readers: its lease lasts.
        """
        open_edges = {id: previous[id] for id, node in self.nodes.items() if node.stage is Stage.READING and id in previous}
        for id in [id for id, parent in open_edges.items() if parent == TRAINERS]:
            self._link(id, open_edges.pop(id))
        grown = True
        while grown:
            kept = [id for id, parent in open_edges.items() if self._rooted(parent)]
            grown = bool(kept)
            for id in kept:
                parent = open_edges.pop(id)
                if self._has_room(parent):
                    self._link(id, parent)

    def place(self, node: Node) -> None:
        peers = [n for n in self.nodes.values() if n.id != node.id and self._rooted(n.id) and self._has_room(n.id)]
        best = min(peers, key=lambda n: (n.domain != node.domain, self.depth(n.id), self.load.get(n.id, 0), n.id), default=None)
        if self._has_room(TRAINERS) and (best is None or self._trainers_first()):
            self._link(node.id, TRAINERS)
        elif best is not None:
            self._link(node.id, best.id)

    def depth(self, id: str) -> int:
        hops = 0
        while id in self.parents:
            id = self.parents[id]
            hops += 1
        return hops

    def alternates(self, id: str) -> tuple[str, ...]:
        others = [n for n in self.nodes.values() if n.id not in (id, self.parents[id]) and not n.leaf and self._rooted(n.id) and not self._above(id, n.id)]
        others.sort(key=lambda n: (n.stage, n.domain != self.nodes[id].domain, self.load.get(n.id, 0), self.depth(n.id), n.id))
        return tuple(n.id for n in others[:_ALTERNATES])

    def _trainers_first(self) -> bool:
        if self.shape.topology is Topology.DIRECT:
            return True
        return not any(n.stage is Stage.COMPLETE and not n.leaf for n in self.nodes.values())

    def _rooted(self, id: str) -> bool:
        return id == TRAINERS or id in self.parents or (id in self.nodes and self.nodes[id].stage is Stage.COMPLETE)

    def _has_room(self, id: str) -> bool:
        if id == TRAINERS:
            return self.offered and (self.shape.streams is None or self.load.get(id, 0) < self.shape.streams)
        node = self.nodes.get(id)
        return node is not None and not node.leaf and (self.shape.fanout is None or self.load.get(id, 0) < self.shape.fanout)

    def _above(self, ancestor: str, id: str) -> bool:
        """Whether `id` hangs, over any number of hops, below `ancestor`."""
        while id in self.parents:
            id = self.parents[id]
            if id == ancestor:
                return True
        return False

    def _link(self, id: str, parent: str) -> None:
        self.parents[id] = parent
        self.load[parent] = self.load.get(parent, 0) + 1

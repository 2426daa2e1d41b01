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
from heapq import heappop, heappush

from refit_operator.fanout.shape import Shape

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
    tree.plant()
    tree.keep(previous)
    waiting = [n for n in tree.nodes.values() if n.stage is not Stage.COMPLETE and n.id not in tree.parents]
    for node in sorted(waiting, key=lambda n: (n.leaf, n.stage, n.domain, n.id)):
        tree.place(node)
    return tree.edges()


@dataclass(slots=True)
class _Tree:
    """Sources with room wait in heaps, one for each domain and one for all; an entry counts while its load is still true. So a fleet costs N log N."""

    nodes: Mapping[str, Node]
    offered: bool
    shape: Shape
    parents: dict[str, str] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    heaps: dict[str | None, list[tuple[int, int, str]]] = field(default_factory=dict)

    def plant(self) -> None:
        """Complete holders are the roots."""
        for node in self.nodes.values():
            if node.stage is Stage.COMPLETE:
                self._grow(node, 0)

    def keep(self, previous: Mapping[str, str]) -> None:
        """Takes over the edges of readers under way, from the sources downwards, so that none hangs on a parent that lost its own.

        Who reads from the trainers keeps doing so even if they take no new readers: its lease lasts.
        """
        readers: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            if node.stage is Stage.READING and name in previous:
                readers.setdefault(previous[name], []).append(name)
        for root in (TRAINERS, *list(self.depths)):
            self._keep_below(root, readers)
        lost = {name for names in readers.values() for name in names}
        for name in sorted(name for name in lost if previous[name] not in lost):  # heads of branches whose own source is gone: the branch moves as one
            self.place(self.nodes[name])
            self._keep_below(name, readers)

    def _keep_below(self, root: str, readers: dict[str, list[str]]) -> None:
        row = [root]
        while row:
            parent = row.pop(0)
            if parent != TRAINERS and parent not in self.depths:
                continue
            for name in readers.pop(parent, ()):
                if name not in self.parents and (parent == TRAINERS or self._has_room(parent)):
                    self._link(name, parent)
                    row.append(name)

    def place(self, node: Node) -> None:
        peer = self._best(node.domain) or self._best(None)
        if self._trainers_have_room() and (peer is None or self._trainers_first()):
            self._link(node.id, TRAINERS)
        elif peer is not None:
            self._link(node.id, peer)

    def edges(self) -> dict[str, Edge]:
        able = [name for name in self.depths if not self.nodes[name].leaf]
        able.sort(key=lambda name: (self.nodes[name].stage, self.loads.get(name, 0), self.depths[name], name))
        near: dict[str, list[str]] = {}
        for name in able:
            near.setdefault(self.nodes[name].domain, []).append(name)
        return {
            name: Edge(parent, self.depths[name], self._alternates(name, (*near.get(self.nodes[name].domain, ())[:16], *able)))
            for name, parent in sorted(self.parents.items())
        }

    def _alternates(self, reader: str, able: Iterable[str]) -> tuple[str, ...]:
        found: list[str] = []
        for name in able:
            if name not in (reader, self.parents[reader], *found) and not self._below(reader, name):
                found.append(name)
            if len(found) == _ALTERNATES:
                break
        return tuple(found)

    def _best(self, domain: str | None) -> str | None:
        heap = self.heaps.get(domain, [])
        while heap:
            _, load, name = heap[0]
            if load == self.loads.get(name, 0) and self._has_room(name):
                return name
            heappop(heap)
        return None

    def _trainers_first(self) -> bool:
        return self.shape.trainers_first or not any(n.stage is Stage.COMPLETE and not n.leaf for n in self.nodes.values())

    def _trainers_have_room(self) -> bool:
        return self.offered and (self.shape.streams is None or self.loads.get(TRAINERS, 0) < self.shape.streams)

    def _has_room(self, name: str) -> bool:
        node = self.nodes.get(name)
        return node is not None and not node.leaf and (self.shape.fanout is None or self.loads.get(name, 0) < self.shape.fanout)

    def _below(self, ancestor: str, name: str) -> bool:
        """Whether `name` hangs, over any number of hops, below `ancestor`."""
        while name in self.parents:
            name = self.parents[name]
            if name == ancestor:
                return True
        return False

    def _link(self, name: str, parent: str) -> None:
        self.parents[name] = parent
        self.loads[parent] = self.loads.get(parent, 0) + 1
        if parent != TRAINERS:
            self._offer(self.nodes[parent])
        self._grow(self.nodes[name], self.depths.get(parent, 0) + 1)

    def _grow(self, node: Node, depth: int) -> None:
        self.depths[node.id] = depth
        self._offer(node)

    def _offer(self, node: Node) -> None:
        if self._has_room(node.id):
            for domain in (node.domain, None):
                heappush(self.heaps.setdefault(domain, []), (self.depths[node.id], self.loads.get(node.id, 0), node.id))

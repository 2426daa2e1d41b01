"""The plan: every run of one pair of layouts, and where each rank finds its part. A pure function of the facts; complete, or refused.

    plan(trainer, classes) -> Plan                 .runs in plan order, .slots (owner tuples)
        .source(rank)            -> SourcePlan     arena of a trainer rank, and the copies that fill it from live memory
        .coordinate(class_, id)  -> CoordinatePlan arena of an engine rank, and the copies that install from it

Invariants: a needed byte of a tensor is in exactly one run for each coordinate that needs it; a run has the same bytes in the same order in the arena of
every owner and of every needer; the facts may come in any order; indices of shards and needs are those of the facts that the plan was made of.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Box, CoordinateNeeds, Dtype, RankShards, Shape, box_shape

from refit_runtime.plan.boxes import contains, relative, strips
from refit_runtime.plan.coverage import Casts, prove
from refit_runtime.plan.cut import floating_casts
from refit_runtime.plan.runs import ALIGNMENT, Form, Layout, lay_out
from refit_runtime.plan.survey import Numbers, Survey, survey
from refit_runtime.plan.table import Names, NeedKind, NeedTable, ShardKind, ShardTable, need_table, shard_table

_LAYER = re.compile(r"\.layers\.(?=([0-9]+)\.)")
Ranges = tuple[tuple[int, int], ...]
"""(offset, bytes) of parts of a run, in order, none touching the next."""


@dataclass(frozen=True, slots=True)
class Subset:
    """Selects tensors by name, by layer (`.layers.<n>.`) or by a part of the name; without selectors, everything."""

    params: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()
    layer_groups: frozenset[str] = frozenset()

    def keeps(self, tensor: str) -> bool:
        if not (self.params or self.layers or self.layer_groups):
            return True
        if tensor in self.params or any(part in tensor for part in self.layer_groups):
            return True
        return bool(self.layers) and any(int(n) in self.layers and n == str(int(n)) for n in _LAYER.findall(tensor))

    def idle(self, tensors: Sequence[str]) -> tuple[str, ...]:
        """Selectors that keep none of the tensors, as people name them."""
        layers = {n for tensor in tensors for n in _LAYER.findall(tensor)}
        return (
            *sorted(self.params - set(tensors)),
            *(f"layer {n}" for n in sorted(self.layers) if str(n) not in layers),
            *(repr(part) for part in sorted(self.layer_groups) if not any(part in tensor for tensor in tensors)),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """`needers` are (class, coordinate id). `owners` in the order in which readers try them."""

    index: int
    owners: tuple[int, ...]
    needers: frozenset[tuple[str, str]]
    bytes: int
    atoms: int

    @property
    def slot(self) -> str:
        return "-".join(str(rank) for rank in self.owners)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a run that one read moves; `offset` is within the run."""

    run: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """`box` (counted from the corner of the shard's own box) of shard `shard`, cast to `dtype`, row-major, to `offset` in the rank's arena."""

    run: int
    offset: int
    nbytes: int
    dtype: Dtype
    shard: int
    box: Box


@dataclass(frozen=True, slots=True)
class InstallCopy:
    """`nbytes` at `offset` in the coordinate's arena are an array of `shape` and `dtype`; its dims permuted by `perm`, it goes to `at` in the parameter.

    `at` may have more dims than the piece: the extra ones come first and have extent 1. A parameter of another dtype casts.
    """

    run: int
    offset: int
    nbytes: int
    dtype: Dtype
    shape: Shape
    tensor: str
    need: int
    parameter: str
    perm: tuple[int, ...] | None
    at: Box


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """`offsets` are those of the runs in the arena."""

    arena_bytes: int
    offsets: Mapping[int, int]
    copies: tuple[SnapshotCopy, ...]


@dataclass(frozen=True, slots=True)
class CoordinatePlan:
    """`bytes` cross the wire; the arena has alignment on top."""

    bytes: int
    arena_bytes: int
    offsets: Mapping[int, int]
    copies: tuple[InstallCopy, ...]


class Plan:
    """Made by `plan` only. What one rank or coordinate has to do is worked out when asked for."""

    def __init__(self, facts: Survey, layout: Layout) -> None:
        self._facts, self._layout = facts, layout
        self._ranks = {table.rank: i for i, table in enumerate(facts.trainer)}
        self._places = {(class_, table.id): i for i, (class_, table) in enumerate(facts.coordinates)}
        ranks, places = list(self._ranks), list(self._places)
        atoms = np.diff(layout.starts).tolist()
        self.runs = tuple(
            Run(i, tuple(ranks[o] for o in owners), frozenset(places[n] for n in needers), size, atoms[i])
            for i, (owners, needers, size) in enumerate(zip(layout.owners, layout.needers, layout.bytes, strict=True))
        )
        self._slots: defaultdict[str, list[int]] = defaultdict(list)
        for run in self.runs:
            self._slots[run.slot].append(run.index)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._ranks)

    @property
    def coordinates(self) -> tuple[tuple[str, str], ...]:
        """(class, id)."""
        return tuple(self._places)

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(self._slots)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Those that move."""
        return tuple(self._facts.names[tensor] for tensor in np.unique(self._layout.tensor).tolist())

    @property
    def unread(self) -> tuple[str, ...]:
        """Those that are held and that no coordinate needs: they stay where they are."""
        unread = [group.tensors for group in self._facts.groups if group.holders and not group.needers]
        return tuple(self._facts.names[tensor] for tensor in np.unique(np.concatenate(unread)).tolist()) if unread else ()

    def selected(self, subset: Subset, runs: Iterable[int]) -> dict[int, Ranges]:
        """What of each run belongs to tensors of the subset."""
        layout = self._layout
        kept = np.array([subset.keeps(name) for name in self._facts.names], bool)
        found: dict[int, Ranges] = {}
        for run in runs:
            here = slice(int(layout.starts[run]), int(layout.starts[run + 1]))
            at = np.append(layout.offset[here], self.runs[run].bytes)
            inside = np.concatenate([[False], kept[layout.tensor[here]], [False]])
            edges = at[np.flatnonzero(inside[1:] != inside[:-1])].tolist()
            found[run] = tuple((lo, hi - lo) for lo, hi in zip(edges[::2], edges[1::2], strict=True))
        return found

    def slot_runs(self, slot: str) -> tuple[int, ...]:
        return tuple(self._slots[slot])

    def rank_runs(self, rank: int) -> tuple[int, ...]:
        return tuple(run.index for run in self.runs if rank in run.owners)

    def coordinate_runs(self, class_: str, id: str) -> tuple[int, ...]:  # noqa: A002  an id is what it is
        return tuple(run.index for run in self.runs if (class_, id) in run.needers)

    def source_bytes(self, rank: int) -> int:
        """Of the rank's arena: every run whose tuple names it."""
        return _arena(self.runs, self.rank_runs(rank))[1]

    def coordinate_bytes(self, class_: str, id: str) -> int:  # noqa: A002
        """Of the coordinate's arena."""
        return _arena(self.runs, self.coordinate_runs(class_, id))[1]

    def strips(self, rank: int) -> tuple[int, int]:
        """(how many, bytes of the shortest) contiguous strips of its shards hold the rank's runs: what readers ask for when no arena packs them."""
        many, shortest = 0, 0
        for _, form, tensors, _ in self._pieces(self.rank_runs(rank)):
            kind = self._held(self._ranks[rank], form)
            count = strips(relative(form.box, kind.box), box_shape(kind.box))
            many += count * len(tensors)
            shortest = min(shortest or form.bytes, form.bytes // count)
        return many, shortest

    def source(self, rank: int) -> SourcePlan:
        which = self._ranks[rank]
        table = self._facts.trainer[which]
        rows = _Rows(self._facts.tensors(table), table.kind, len(table.kinds))
        local = {kind: k for k, kind in enumerate(table.kinds)}
        runs = self.rank_runs(rank)
        offsets, size = _arena(self.runs, runs)
        copies: list[SnapshotCopy] = []
        for run, form, tensors, at in self._pieces(runs):
            kind = self._held(which, form)
            box, start = relative(form.box, kind.box), offsets[run]
            shards = rows.of(tensors, local[kind])[0]
            copies += (SnapshotCopy(run, start + o, form.bytes, form.dtype, s, box) for o, s in zip(at.tolist(), shards.tolist(), strict=True))
        copies.sort(key=lambda copy: copy.offset)
        return SourcePlan(size, offsets, tuple(copies))

    def coordinate(self, class_: str, id: str) -> CoordinatePlan:  # noqa: A002
        which = self._places[class_, id]
        table = self._facts.coordinates[which][1]
        rows = _Rows(self._facts.tensors(table), table.kind, len(table.kinds))
        local = {kind: k for k, kind in enumerate(table.kinds)}
        params = [table.params[p] for p in table.param.tolist()]
        runs = self.coordinate_runs(class_, id)
        offsets, size = _arena(self.runs, runs)
        copies: list[InstallCopy] = []
        for run, form, tensors, at in self._pieces(runs):
            places = [o + offsets[run] for o in at.tolist()]
            names = [self._facts.names[t] for t in tensors.tolist()]
            shape, nbytes = box_shape(form.box), form.bytes
            for kind in dict.fromkeys(kind for needer, kind in self._facts.groups[form.group].needers if needer == which and contains(kind.box, form.box)):
                to = _target(form.box, kind)
                for needs in rows.of(tensors, local[kind]):
                    each = zip(places, names, needs.tolist(), strict=True)
                    copies += (InstallCopy(run, o, nbytes, form.dtype, shape, name, need, params[need], kind.perm, to) for o, name, need in each)
        copies.sort(key=lambda copy: (copy.offset, copy.parameter, copy.at))
        return CoordinatePlan(sum(self.runs[run].bytes for run in runs), size, offsets, tuple(copies))

    def contents(self, run: int, offset: int, nbytes: int) -> tuple[tuple[str, Box], ...]:
        """The (tensor, box) of every piece that these bytes of a run touch: what an error about a block or chunk names."""
        layout = self._layout
        lo, hi = (int(end) for end in layout.starts[run : run + 2])
        first = int(np.searchsorted(layout.offset[lo:hi], offset, side="right")) - 1
        last = int(np.searchsorted(layout.offset[lo:hi], offset + nbytes, side="left"))
        return tuple((self._facts.names[layout.tensor[i]], layout.forms[layout.form[i]].box) for i in range(lo + max(first, 0), lo + last))

    def _held(self, which: int, form: Form) -> ShardKind:
        """The shards of a rank that a form's pieces lie in."""
        return next(kind for holder, kind in self._facts.groups[form.group].holders if holder == which and contains(kind.box, form.box))

    def _pieces(self, runs: Sequence[int]) -> Iterator[tuple[int, Form, Numbers, Numbers]]:
        """Run, form, and for all its pieces there the tensor and the offset in the run."""
        layout = self._layout
        for run in runs:
            here = slice(int(layout.starts[run]), int(layout.starts[run + 1]))
            order = np.argsort(layout.form[here], kind="stable")
            forms, tensors, at = (values[here][order] for values in (layout.form, layout.tensor, layout.offset))
            edges = [0, *(np.flatnonzero(forms[1:] != forms[:-1]) + 1).tolist(), len(forms)]
            for lo, hi in pairwise(edges):
                yield run, layout.forms[forms[lo]], tensors[lo:hi], at[lo:hi]


def plan(
    trainer: Sequence[RankShards],
    classes: Mapping[str, Sequence[CoordinateNeeds]],
    redundancy: int = 1,
    subset: Subset | None = None,
    casts: Casts = floating_casts,
) -> Plan:
    """Raises PlanError: UnsupportedLayout, UnknownTensor, DtypeMismatch, ShapeMismatch, OverlappingPlan, IncompletePlan; the first that applies."""
    names = Names()
    shards = [shard_table(entry, names) for entry in trainer]
    needs = [(class_, need_table(entry, names)) for class_, coordinates in classes.items() for entry in coordinates]
    return plan_tables(names, shards, needs, redundancy, subset, casts)


def plan_tables(
    names: Names,
    trainer: Sequence[ShardTable],
    coordinates: Sequence[tuple[str, NeedTable]],
    redundancy: int = 1,
    subset: Subset | None = None,
    casts: Casts = floating_casts,
) -> Plan:
    if redundancy < 1:
        raise UnsupportedLayout(f"redundancy {redundancy}: expected at least 1 owner for each run", seen=redundancy)
    _refuse_twice("trainer rank", [str(table.rank) for table in trainer])
    _refuse_twice("coordinate", [f"{table.id} of class {class_}" for class_, table in coordinates])
    facts = survey(trainer, coordinates, names)
    prove(facts, casts)
    keeps: Callable[[str], bool] = subset.keeps if subset is not None else lambda _: True
    kept = np.array([keeps(name) for name in facts.names], bool)
    return Plan(facts, lay_out(facts, [group.tensors[kept[group.tensors]] for group in facts.groups], redundancy))


def chunks(run: Run, chunk_bytes: int) -> tuple[Chunk, ...]:
    """What a reader asks for, read by read; `chunk_bytes` should be a multiple of the digest block."""
    return tuple(Chunk(run.index, at, min(chunk_bytes, run.bytes - at)) for at in range(0, run.bytes, chunk_bytes))


class _Rows:
    """The rows of a table that state a kind of fact about a tensor."""

    def __init__(self, tensor: Numbers, kind: NDArray[np.int32], kinds: int) -> None:
        keys = tensor * kinds + kind
        self._kinds = kinds
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def of(self, tensors: Numbers, kind: int) -> Numbers:
        """One line for each time that each of the tensors has such a fact: as often for all of them."""
        keys = tensors * self._kinds + kind
        first = np.searchsorted(self._keys, keys, side="left")
        times = int(np.searchsorted(self._keys, keys[0], side="right") - first[0])
        return self._order[first + np.arange(times)[:, None]]


def _target(box: Box, kind: NeedKind) -> Box:
    """Where a piece of a need lands in the parameter."""
    perm = kind.perm if kind.perm is not None else tuple(range(len(box)))
    inside = relative(box, kind.box)
    extra = len(kind.at) - len(box)
    moved = ((kind.at[extra + i][0] + inside[dim][0], kind.at[extra + i][0] + inside[dim][1]) for i, dim in enumerate(perm))
    return (*kind.at[:extra], *moved)


def _arena(runs: Sequence[Run], which: Sequence[int]) -> tuple[dict[int, int], int]:
    """Where the runs lie, in plan order, and the bytes of the whole."""
    offsets, end = {}, 0
    for run in which:
        offsets[run] = end
        end += -(-runs[run].bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _refuse_twice(what: str, given: Sequence[str]) -> None:
    twice = sorted(name for name, times in Counter(given).items() if times > 1)
    if twice:
        raise UnsupportedLayout(f"{what} {twice[0]}: given more than once; {len(twice)} are", seen=", ".join(twice))

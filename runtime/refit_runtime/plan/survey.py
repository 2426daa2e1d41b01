"""All facts of one plan seen together, in layer order, with tensors that are laid out alike put in one group.

Layer order is the order of checkpoint names with their numbers read as numbers: embeddings, layers 0, 1, 2, ..., final norm.

Invariant: two tensors are in one group exactly if the same ranks hold the same kinds of shards of them, and the same coordinates have the same kinds of
needs. Whatever is found out about one tensor of a group (its cut, its faults) holds for each of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refit_runtime.plan.table import NeedKind, NeedTable, ShardKind, ShardTable

Numbers = NDArray[np.int64]

_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True, slots=True)
class Group:
    """`tensors` are positions in layer order, ascending. `holders` and `needers` name ranks and coordinates by their index in the survey."""

    tensors: Numbers
    holders: tuple[tuple[int, ShardKind], ...]
    needers: tuple[tuple[int, NeedKind], ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """`trainer` is sorted by rank, `coordinates` by class and id; the positions give the place in layer order of each of a table's names.

    `given` is the order in which the facts came: only refusals, which name the first fact at fault, look at it.
    """

    trainer: tuple[ShardTable, ...]
    coordinates: tuple[tuple[str, NeedTable], ...]
    names: tuple[str, ...]
    rank_positions: tuple[Numbers, ...]
    coordinate_positions: tuple[Numbers, ...]
    groups: tuple[Group, ...]
    given: tuple[Sequence[ShardTable], Sequence[tuple[str, NeedTable]]]


def survey(trainer: Sequence[ShardTable], coordinates: Sequence[tuple[str, NeedTable]]) -> Survey:
    ranks = tuple(sorted(trainer, key=lambda table: table.rank))
    places = tuple(sorted(coordinates, key=lambda entry: (entry[0], entry[1].id)))
    tables: list[ShardTable | NeedTable] = [*ranks, *(table for _, table in places)]
    names, positions = _layer_order([table.names for table in tables])
    owners: list[Numbers] = []
    codes: list[Numbers] = []
    decode: list[tuple[int, ShardKind | NeedKind]] = []
    for which, (table, position) in enumerate(zip(tables, positions, strict=True)):
        owners.append(position[table.name])
        codes.append(table.kind.astype(np.int64) + len(decode))
        decode.extend((which if which < len(ranks) else which - len(ranks), kind) for kind in table.kinds)
    groups = []
    if owners:
        for tensors, code in alike(np.concatenate(owners), np.concatenate(codes), len(decode)):
            entries = [decode[c] for c in code.tolist()]
            holders = tuple((rank, kind) for rank, kind in entries if isinstance(kind, ShardKind))
            needers = tuple((place, kind) for place, kind in entries if isinstance(kind, NeedKind))
            groups.append(Group(tensors, holders, needers))
    return Survey(ranks, places, names, tuple(positions[: len(ranks)]), tuple(positions[len(ranks) :]), tuple(groups), (trainer, coordinates))


def layer_key(name: str) -> tuple[str, str]:
    return _DIGITS.sub(lambda digits: digits[0].zfill(12), name), name


def _layer_order(tables: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[Numbers]]:
    """All names in layer order, and the positions of each table's names. Equal tables are looked up once."""
    names = sorted({name for table in {id(table): table for table in tables}.values() for name in table}, key=layer_key)
    index = {name: position for position, name in enumerate(names)}
    known: dict[int, Numbers] = {}
    for table in tables:
        if id(table) not in known:
            known[id(table)] = np.array([index[name] for name in table], np.int64)
    return tuple(names), [known[id(table)] for table in tables]


def alike(owners: Numbers, codes: Numbers, codes_end: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Owners that have equal multisets of codes, and those codes; codes are below `codes_end`."""
    if not len(owners):
        return
    keys = np.sort(owners * codes_end + codes)
    owners = keys // codes_end
    codes = keys - owners * codes_end
    starts = np.concatenate([[0], np.flatnonzero(owners[1:] != owners[:-1]) + 1])
    counts = np.diff(starts, append=len(owners))
    for count in np.unique(counts).tolist():
        at = starts[counts == count]
        rows = codes[at[:, None] + np.arange(count)]
        if count == 1:
            _, first, label = np.unique(rows[:, 0], return_index=True, return_inverse=True)
        else:
            first, label = _equal_rows(rows)
        by_label = np.argsort(label, kind="stable")
        ends = np.cumsum(np.bincount(label))
        for one, members in zip(first.tolist(), np.split(by_label, ends[:-1]), strict=True):
            yield owners[at[members]], rows[one]


def _equal_rows(rows: Numbers) -> tuple[Numbers, Numbers]:
    """The first of each set of equal rows; for each row the number of its set."""
    sets: defaultdict[bytes, int] = defaultdict(lambda: len(sets))
    label = np.array([sets[row.tobytes()] for row in rows], np.int64)
    first = np.full(len(sets), len(rows), np.int64)
    np.minimum.at(first, label, np.arange(len(rows)))
    return first, label

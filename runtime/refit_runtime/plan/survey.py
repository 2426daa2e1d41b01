"""All facts of one plan seen together, in layer order, with tensors that are laid out alike put in one group.

Layer order is the order of checkpoint names with their numbers read as numbers: embeddings, layers 0, 1, 2, ..., final norm.

Invariant: two tensors are in one group exactly if the same ranks hold the same kinds of shards of them, and the same coordinates have the same kinds of
needs. Whatever is found out about one tensor of a group (its cut, its faults) holds for each of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refit_runtime.plan.table import Names, NeedKind, NeedTable, ShardKind, ShardTable

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
    """`trainer` is sorted by rank, `coordinates` by class and id; `position[number]` is the place of a name in layer order.

    `given` is the order in which the facts came: only refusals, which name the first fact at fault, look at it.
    """

    trainer: tuple[ShardTable, ...]
    coordinates: tuple[tuple[str, NeedTable], ...]
    names: tuple[str, ...]
    position: Numbers
    groups: tuple[Group, ...]
    given: tuple[Sequence[ShardTable], Sequence[tuple[str, NeedTable]]]

    def tensors(self, table: ShardTable | NeedTable) -> Numbers:
        """Position in layer order of the tensor of each row."""
        return self.position[table.name]


def survey(trainer: Sequence[ShardTable], coordinates: Sequence[tuple[str, NeedTable]], names: Names) -> Survey:
    ranks = tuple(sorted(trainer, key=lambda table: table.rank))
    places = tuple(sorted(coordinates, key=lambda entry: (entry[0], entry[1].id)))
    in_order = layer_order(names.all())
    position = np.empty(len(in_order), np.int64)
    position[[names.numbers[name] for name in in_order]] = np.arange(len(in_order))
    owners: list[Numbers] = []
    codes: list[Numbers] = []
    decode: list[tuple[int, ShardKind | NeedKind]] = []
    tables: list[tuple[int, ShardTable | NeedTable]] = [*enumerate(ranks), *enumerate(table for _, table in places)]
    for which, table in tables:
        owners.append(position[table.name])
        codes.append(table.kind.astype(np.int64) + len(decode))
        decode.extend((which, kind) for kind in table.kinds)
    groups = []
    if owners:
        for tensors, code in alike(np.concatenate(owners), np.concatenate(codes), len(decode)):
            entries = [decode[c] for c in code.tolist()]
            holders = tuple((rank, kind) for rank, kind in entries if isinstance(kind, ShardKind))
            needers = tuple((place, kind) for place, kind in entries if isinstance(kind, NeedKind))
            groups.append(Group(tensors, holders, needers))
    return Survey(ranks, places, tuple(in_order), position, tuple(groups), (trainer, coordinates))


class _Padded(dict[str, str]):
    """Parts of names with their numbers as wide as others'. A model has few parts, and many names."""

    def __missing__(self, part: str) -> str:
        padded = self[part] = _DIGITS.sub(lambda digits: digits[0].zfill(9), part)
        return padded


def layer_order(names: Iterable[str]) -> list[str]:
    padded = _Padded()
    return sorted(sorted(names), key=lambda name: ".".join(map(padded.__getitem__, name.split("."))))


def alike(owners: Numbers, codes: Numbers, codes_end: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Owners that have equal multisets of codes, and those codes; codes are below `codes_end`."""
    counts = np.bincount(owners)
    single = counts[owners] == 1
    yield from _by_code(owners[single], codes[single])
    keys = np.sort(owners[~single] * codes_end + codes[~single])
    owners = keys // codes_end
    codes = keys - owners * codes_end
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    lengths = counts[owners[starts]]
    for length in np.unique(lengths).tolist():
        at = starts[lengths == length]
        rows = codes[at[:, None] + np.arange(length)]
        for members in _equal_rows(rows):
            yield owners[at[members]], rows[members[0]]


def _by_code(owners: Numbers, codes: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Owners of one code each."""
    if not len(owners):
        return
    order = stable_order(codes, int(codes.max()) + 1)
    owners, codes = owners[order], codes[order]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    for code, members in zip(codes[starts], np.split(owners, starts[1:]), strict=True):
        yield np.sort(members), np.array([code])


def stable_order(keys: Numbers, end: int) -> Numbers:
    """Like argsort; keys are below `end`. numpy sorts 16-bit keys in linear time."""
    return np.argsort(keys.astype(np.uint16) if end <= 1 << 16 else keys, kind="stable")


def _equal_rows(rows: Numbers) -> Iterator[Numbers]:
    """Indices of rows that are equal, ascending."""
    sets: defaultdict[bytes, int] = defaultdict(lambda: len(sets))
    label = np.array([sets[row.tobytes()] for row in rows], np.int64)
    yield from np.split(stable_order(label, len(sets)), np.cumsum(np.bincount(label))[:-1])

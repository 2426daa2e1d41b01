"""Facts as columns: what thousands of shards or needs have in common is kept once, the rest is numbers.

A *kind* is everything about a shard or need but its names. Models repeat a few kinds over thousands of names, so the columns are small, two ranks
with the same columns are the same bytes, and tensors that are laid out alike are found by comparing numbers.

Names are numbers too, given out by one `Names` for all tables of a plan.

Invariant: row i is shard or need i of the facts that the table was made of; a table turns back into exactly those facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec

Column = NDArray[np.int32]


class Names:
    """Numbers for names, in the order in which they are met."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def all(self) -> list[str]:
        return list(self.numbers)


class ShardKind(NamedTuple):
    dtype: Dtype
    shape: Shape
    box: Box


class NeedKind(NamedTuple):
    """`shape` is the whole tensor's as the engine expects it, if it says so; `dtype` and `param_shape` are the parameter's."""

    box: Box
    at: Box
    dtype: Dtype
    param_shape: Shape
    perm: tuple[int, ...] | None
    shape: Shape | None


@dataclass(frozen=True, slots=True)
class ShardTable:
    rank: int
    replica: int
    kinds: tuple[ShardKind, ...]
    name: Column
    kind: Column

    def facts(self, names: Sequence[str]) -> RankShards:
        specs: dict[tuple[int, Dtype, Shape], TensorSpec] = {}
        shards = []
        for name, kind in zip(self.name.tolist(), (self.kinds[k] for k in self.kind.tolist()), strict=True):
            key = (name, kind.dtype, kind.shape)
            spec = specs.get(key)
            if spec is None:
                spec = specs[key] = TensorSpec(names[name], kind.dtype, kind.shape)
            shards.append(Shard(spec, kind.box))
        return RankShards(self.rank, self.replica, tuple(shards))


@dataclass(frozen=True, slots=True)
class NeedTable:
    """`params` are the coordinate's own: nobody else's matter to it."""

    id: str
    params: tuple[str, ...]
    kinds: tuple[NeedKind, ...]
    name: Column
    param: Column
    kind: Column
    unwritten: tuple[Parameter, ...]

    def facts(self, names: Sequence[str]) -> CoordinateNeeds:
        params: dict[tuple[int, Dtype, Shape], Parameter] = {}
        needs = []
        for name, param, k in zip(self.name.tolist(), self.param.tolist(), self.kind.tolist(), strict=True):
            kind = self.kinds[k]
            key = (param, kind.dtype, kind.param_shape)
            parameter = params.get(key)
            if parameter is None:
                parameter = params[key] = Parameter(self.params[param], kind.dtype, kind.param_shape)
            needs.append(Need(names[name], kind.box, parameter, kind.at, kind.perm, kind.shape))
        return CoordinateNeeds(self.id, tuple(needs), self.unwritten)


def column(values: Sequence[int]) -> Column:
    return np.array(values, np.int32)


def shard_table(facts: RankShards, names: Names) -> ShardTable:
    numbers = names.numbers
    kinds: dict[tuple[str, Shape, Box], int] = {}
    distinct: list[ShardKind] = []
    name_of, kind_of = [], []
    for shard in facts.shards:
        tensor = shard.tensor
        name_of.append(numbers.setdefault(tensor.name, len(numbers)))
        key = (tensor.dtype._value_, tensor.shape, shard.box)  # a text hashes faster than an enum
        kind = kinds.setdefault(key, len(distinct))
        if kind == len(distinct):
            distinct.append(ShardKind(tensor.dtype, tensor.shape, shard.box))
        kind_of.append(kind)
    return ShardTable(facts.rank, facts.replica, tuple(distinct), column(name_of), column(kind_of))


def need_table(facts: CoordinateNeeds, names: Names) -> NeedTable:
    numbers = names.numbers
    params: dict[str, int] = {}
    known: dict[int, tuple[int, str, Shape]] = {}  # by identity: a fused parameter is named by many needs
    kinds: dict[tuple[object, ...], int] = {}
    distinct: list[NeedKind] = []
    name_of, param_of, kind_of = [], [], []
    for need in facts.needs:
        parameter = need.parameter
        found = known.get(id(parameter))
        if found is None:
            found = known[id(parameter)] = (params.setdefault(parameter.name, len(params)), parameter.dtype._value_, parameter.shape)
        number, dtype, shape = found
        name_of.append(numbers.setdefault(need.tensor, len(numbers)))
        param_of.append(number)
        key = (need.box, need.at, dtype, shape, need.perm, need.shape)
        kind = kinds.setdefault(key, len(distinct))
        if kind == len(distinct):
            distinct.append(NeedKind(need.box, need.at, parameter.dtype, shape, need.perm, need.shape))
        kind_of.append(kind)
    return NeedTable(facts.id, tuple(params), tuple(distinct), column(name_of), column(param_of), column(kind_of), facts.unwritten)

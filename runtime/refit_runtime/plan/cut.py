"""The cut: the common refinement of all shard and need boxes of a tensor, kept where the tensor is needed.

Invariant: an atom lies inside one box of every rank that owns it, and inside or outside of each need; the atoms of a tensor are disjoint, in
row-major order, and cover all that is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from refit_api.tensors import Box, Dtype, Shape

from refit_runtime.plan.boxes import Members, refine
from refit_runtime.plan.survey import Group
from refit_runtime.plan.table import NeedKind, ShardKind

_FLOATS = (Dtype.FLOAT64, Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Atom:
    """`owners` are ranks, `needers` coordinates, both as indices in the survey, ascending."""

    box: Box
    owners: Members
    needers: Members


def floating_casts(tensor: Dtype, parameter: Dtype) -> bool:
    """What a copy may convert: one float of 16 bits or more to another. Smaller ones need scales, which a copy knows nothing of."""
    return tensor == parameter or (tensor in _FLOATS and parameter in _FLOATS)


def wire_dtype(tensor: Dtype, needed: Iterable[Dtype]) -> Dtype:
    """The dtype that all needs agree on, cast at the snapshot; the tensor's where they differ, or where theirs would move more bytes."""
    wanted = set(needed)
    one = wanted.pop() if len(wanted) == 1 else tensor
    return one if one.bytes <= tensor.bytes else tensor


def cut(group: Group) -> list[Atom]:
    """The atoms of any tensor of the group; every needed byte must have an owner."""
    held, needed = _by_box(group.holders), _by_box(group.needers)
    who = [*held.values(), *needed.values()]
    atoms = []
    for members, box in _refined(group.holders[0][1].shape, tuple(held), tuple(needed)):
        if members[-1] >= len(held):
            owners = sorted({rank for m in members if m < len(held) for rank in who[m]})
            needers = sorted({place for m in members if m >= len(held) for place in who[m]})
            atoms.append(Atom(box, tuple(owners), tuple(needers)))
    return atoms


def _by_box(some: Iterable[tuple[int, ShardKind | NeedKind]]) -> dict[Box, list[int]]:
    """Who has each box; boxes ascend."""
    found: defaultdict[Box, list[int]] = defaultdict(list)
    for who, kind in some:
        found[kind.box].append(who)
    return dict(sorted(found.items()))


@lru_cache(maxsize=1024)
def _refined(shape: Shape, held: tuple[Box, ...], needed: tuple[Box, ...]) -> list[tuple[Members, Box]]:
    return refine(shape, [*held, *needed])

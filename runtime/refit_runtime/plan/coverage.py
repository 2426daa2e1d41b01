"""Proof before movement: either every needed byte is held and every byte of every parameter is written exactly once, or the plan is refused.

Faults are looked for type by type, in the order of `prove`, so that a layout with several is refused for the first type. Whether there is one is found
out once per group of tensors (or parameters) that are laid out alike; only a refusal looks at single facts, to name the first in the order given.

Boxes in a refusal are exactly the bytes concerned. They travel in the error's facts as JSON: `missing` and `doubled`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from refit_api.errors import DtypeMismatch, IncompletePlan, OverlappingPlan, PlanError, ShapeMismatch, UnknownTensor, UnsupportedLayout
from refit_api.tensors import Box, Dtype, Shape, box_shape, whole

from refit_runtime.plan.boxes import Grid, cells, contains, covered
from refit_runtime.plan.survey import Group, Numbers, Survey, alike
from refit_runtime.plan.table import NeedKind, NeedTable, ShardKind, ShardTable

Casts = Callable[[Dtype, Dtype], bool]
"""Whether a tensor of the first dtype may be installed in a parameter of the second."""

Where = dict[str, object]
"""A box of a tensor, or of a parameter of a coordinate, as it stands in the facts of an error."""

MOST_CELLS = 1 << 25  # of one tensor: each takes some dozens of bytes while it is looked at

_FEW = 3  # boxes that a message spells out; all of them are in the facts


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts to judge: all of them in the order given, or one tensor and parameter of each kind of layout."""

    shards: Iterable[tuple[str, int, ShardKind]]  # tensor, rank
    needs: Iterable[tuple[str, str, str, NeedKind]]  # tensor, coordinate, parameter
    parameters: Iterable[tuple[str, str, Dtype, Shape]]  # coordinate, parameter; as often as it is stated


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters of one coordinate that are written alike: `params` are indices in its table."""

    place: int
    params: Numbers
    kinds: tuple[NeedKind, ...]


def prove(facts: Survey, casts: Casts) -> None:
    """Returns, or raises the PlanError that says why there is no plan."""
    unknown = {facts.names[t] for group in facts.groups if not group.holders for t in group.tensors.tolist()}
    if unknown:
        _refuse_unknown(facts, unknown)
    parameters = [entry for place in range(len(facts.coordinates)) for entry in _parameters(facts, place)]
    for faults in (lambda some: _dtypes(some, casts), _shapes):
        if next(faults(_one_of_each(facts, parameters)), None):
            raise next(faults(_all_as_given(facts)))
    _refuse_too_many_cells(facts, parameters)
    _refuse_overlapping_shards(facts)
    _refuse_overlapping_writes(facts, parameters)
    _refuse_holes(facts, parameters)


def label(class_: str, coordinate: str) -> str:
    """What messages call a coordinate."""
    return f"{class_}/{coordinate}" if class_ else coordinate


# ---------------------------------------------------------------- which facts to look at


def _parameters(facts: Survey, place: int) -> Iterator[_Parameters]:
    table = facts.coordinates[place][1]
    for params, kinds in alike(table.param.astype(np.int64), table.kind.astype(np.int64), len(table.kinds)):
        yield _Parameters(place, params, tuple(table.kinds[k] for k in kinds.tolist()))


def _one_of_each(facts: Survey, parameters: list[_Parameters]) -> _Facts:
    groups = [(facts.names[group.tensors[0]], group) for group in facts.groups]
    places = [label(class_, table.id) for class_, table in facts.coordinates]
    stated = []
    for one in parameters:
        place, param = places[one.place], facts.coordinates[one.place][1].params[one.params[0]]
        stated += [(place, param, kind.dtype, kind.param_shape) for kind in one.kinds]
    for class_, table in facts.coordinates:
        declared = {parameter.name for parameter in table.unwritten}.intersection(table.params if table.unwritten else ())
        stated += [(place, param, kind.dtype, kind.param_shape) for _, place, param, kind in _needs(facts, class_, table, declared)]
        stated += _unwritten(class_, table)
    return _Facts(
        [(name, facts.trainer[rank].rank, kind) for name, group in groups for rank, kind in group.holders],
        [(name, places[place], "", kind) for name, group in groups for place, kind in group.needers],
        stated,
    )


def _all_as_given(facts: Survey) -> _Facts:
    trainer, coordinates = facts.given
    return _Facts(
        ((facts.names[t], table.rank, table.kinds[k]) for table in trainer for t, k in _rows(facts, table)),
        [need for class_, table in coordinates for need in _needs(facts, class_, table)],
        [
            *((place, param, kind.dtype, kind.param_shape) for class_, table in coordinates for _, place, param, kind in _needs(facts, class_, table)),
            *(stated for class_, table in coordinates for stated in _unwritten(class_, table)),
        ],
    )


def _rows(facts: Survey, table: ShardTable | NeedTable) -> Iterator[tuple[int, int]]:
    """Tensor and kind."""
    return zip(facts.tensors(table).tolist(), table.kind.tolist(), strict=True)


def _needs(facts: Survey, class_: str, table: NeedTable, only: set[str] | None = None) -> Iterator[tuple[str, str, str, NeedKind]]:
    """`only` are the parameters to look at."""
    if only is None or only:
        for (t, k), p in zip(_rows(facts, table), table.param.tolist(), strict=True):
            if only is None or table.params[p] in only:
                yield facts.names[t], label(class_, table.id), table.params[p], table.kinds[k]


def _unwritten(class_: str, table: NeedTable) -> Iterator[tuple[str, str, Dtype, Shape]]:
    return ((label(class_, table.id), parameter.name, parameter.dtype, parameter.shape) for parameter in table.unwritten)


# ---------------------------------------------------------------- agreement


def _refuse_unknown(facts: Survey, unknown: set[str]) -> None:
    for class_, table in facts.given[1]:
        for tensor, place, param, _ in _needs(facts, class_, table):
            if tensor in unknown:
                raise UnknownTensor(
                    f"tensor {tensor}: needed by parameter {param} of coordinate {place}, held by none of {len(facts.trainer)} trainer ranks; "
                    f"{len(unknown)} needed tensors are held by nobody: publish them, or correct the mapping of names that the trainer binds with",
                    tensor=tensor,
                    coordinate=place,
                    param=param,
                )


def _dtypes(some: _Facts, casts: Casts) -> Iterator[PlanError]:
    held: dict[str, Dtype] = {}
    for tensor, rank, shard in some.shards:
        if held.setdefault(tensor, shard.dtype) != shard.dtype:
            message = f"tensor {tensor}: {shard.dtype.value} on rank {rank}, {held[tensor].value} on another: publish one dtype"
            yield DtypeMismatch(message, tensor=tensor, seen=shard.dtype.value, expected=held[tensor].value)
    for tensor, place, param, need in some.needs:
        if not casts(held[tensor], need.dtype):
            message = f"tensor {tensor}: {held[tensor].value} does not fit parameter {param} of coordinate {place}, which is {need.dtype.value}"
            yield DtypeMismatch(f"{message}: publish that dtype", tensor=tensor, seen=held[tensor].value, expected=need.dtype.value)
    stated: dict[tuple[str, str], Dtype] = {}
    for place, param, dtype, _ in some.parameters:
        if stated.setdefault((place, param), dtype) != dtype:
            message = f"parameter {param} of coordinate {place}: stated as {stated[place, param].value} and as {dtype.value}"
            yield DtypeMismatch(message, coordinate=place, param=param, seen=dtype.value, expected=stated[place, param].value)


def _shapes(some: _Facts) -> Iterator[PlanError]:
    shards, needs = list(some.shards), list(some.needs)
    held: dict[str, Shape] = {}
    for tensor, rank, shard in shards:
        if held.setdefault(tensor, shard.shape) != shard.shape:
            yield _shape_error(f"tensor {tensor} on rank {rank}", shard.shape, held[tensor], tensor=tensor)
    stated: dict[tuple[str, str], Shape] = {}
    for place, param, _, shape in some.parameters:
        if stated.setdefault((place, param), shape) != shape:
            yield _shape_error(f"parameter {param} of coordinate {place}", shape, stated[place, param], coordinate=place, param=param)
    for tensor, place, param, need in needs:
        if need.shape is not None and need.shape != held[tensor]:
            yield _shape_error(f"tensor {tensor} as parameter {param} of coordinate {place} expects it", need.shape, held[tensor], tensor=tensor)
    for tensor, rank, shard in shards:
        if not contains(whole(shard.shape), shard.box):
            yield _shape_error(f"tensor {tensor} on rank {rank}: box {words(shard.box)} lies outside", box_shape(shard.box), shard.shape, tensor=tensor)
    yield from _misplaced(needs, held)


def _misplaced(needs: Iterable[tuple[str, str, str, NeedKind]], held: Mapping[str, Shape]) -> Iterator[PlanError]:
    """A need's box lies in its tensor, `at` in its parameter, and both have the same extents, after leading extents of 1."""
    seen: set[tuple[Shape, NeedKind]] = set()
    for tensor, place, param, need in needs:
        if (held[tensor], need) in seen:
            continue
        seen.add((held[tensor], need))
        if not contains(whole(held[tensor]), need.box):
            where = f"tensor {tensor}: box {words(need.box)}, needed by parameter {param} of coordinate {place}, lies outside"
            yield _shape_error(where, box_shape(need.box), held[tensor], tensor=tensor)
        elif not contains(whole(need.param_shape), need.at):
            where = f"tensor {tensor}: {words(need.at)} lies outside of parameter {param} of coordinate {place}"
            yield _shape_error(where, box_shape(need.at), need.param_shape, tensor=tensor)
        else:
            perm = need.perm if need.perm is not None else tuple(range(len(need.box)))
            moved = tuple(box_shape(need.box)[dim] for dim in perm if 0 <= dim < len(need.box))
            extra = len(need.at) - len(moved)
            if sorted(perm) != list(range(len(need.box))):
                where = f"tensor {tensor}, parameter {param} of coordinate {place}: perm names not every dim of the box once"
                yield _shape_error(where, perm, tuple(range(len(need.box))), tensor=tensor)
            elif box_shape(need.at) != (1,) * extra + moved:
                where = f"tensor {tensor}: box {words(need.box)} goes to {words(need.at)} of parameter {param} of coordinate {place}"
                yield _shape_error(where, moved, box_shape(need.at), tensor=tensor)


def _shape_error(where: str, seen: Shape, expected: Shape, *, tensor: str | None = None, coordinate: str | None = None, param: str | None = None) -> PlanError:
    message = f"{where}: {list(seen)} and {list(expected)} do not agree"
    return ShapeMismatch(message, seen=list(seen), expected=list(expected), tensor=tensor, coordinate=coordinate, param=param)


# ---------------------------------------------------------------- overlaps and holes


def _refuse_too_many_cells(facts: Survey, parameters: list[_Parameters]) -> None:
    """Boxes that share no edges, in many dims, cut a tensor into more pieces than memory has room for."""
    for group in facts.groups:
        shape, boxes = group.holders[0][1].shape, {kind.box for _, kind in group.holders} | {kind.box for _, kind in group.needers}
        _require_cells(shape, boxes, f"tensor {facts.names[group.tensors[0]]}", tensor=facts.names[group.tensors[0]])
    for one in parameters:
        class_, table = facts.coordinates[one.place]
        place, param = label(class_, table.id), table.params[one.params[0]]
        _require_cells(one.kinds[0].param_shape, set(_targets(one)), f"parameter {param} of coordinate {place}", coordinate=place, param=param)


def _require_cells(shape: Shape, boxes: set[Box], what: str, *, tensor: str | None = None, coordinate: str | None = None, param: str | None = None) -> None:
    if (found := cells(shape, boxes)) > MOST_CELLS:
        message = f"{what}: the edges of {len(boxes)} boxes cut it into {found} cells, at most {MOST_CELLS}: cut it in fewer dims, or at common edges"
        raise UnsupportedLayout(message, seen=found, expected=f"at most {MOST_CELLS}", tensor=tensor, coordinate=coordinate, param=param)


def _refuse_overlapping_shards(facts: Survey) -> None:
    found: list[tuple[str, list[Box]]] = []
    for group in facts.groups:
        if group.holders and (boxes := _doubled_shards(facts, group)):
            found += [(facts.names[t], boxes) for t in group.tensors.tolist()]
    if found:
        doubled: list[Where] = [{"tensor": tensor, "box": box} for tensor, boxes in _as_given(facts, found) for box in boxes]
        raise OverlappingPlan(
            f"tensor {doubled[0]['tensor']}: ranks of one replica overlap, or one rank holds bytes twice, in {_few(doubled)}: correct the shards",
            tensor=doubled[0]["tensor"],
            doubled=json.dumps(doubled),
        )


def _doubled_shards(facts: Survey, group: Group) -> list[Box]:
    """Boxes of ranks of one replica are equal or disjoint; those of one rank are disjoint."""
    shape = group.holders[0][1].shape
    replicas: defaultdict[int, set[Box]] = defaultdict(set)
    for rank, kind in group.holders:
        replicas[facts.trainer[rank].replica].add(kind.box)
    boxes = {box for held in replicas.values() if len(held) > 1 for box in _covered_twice(shape, tuple(sorted(held)))}
    boxes |= {box for (_, box), times in Counter((rank, kind.box) for rank, kind in group.holders).items() if times > 1}
    return covered(shape, list(boxes), lambda counts: counts > 0) if boxes else []


def _refuse_overlapping_writes(facts: Survey, parameters: list[_Parameters]) -> None:
    doubled: list[Where] = []
    for one in parameters:
        if len(one.kinds) > 1 and (boxes := _covered_twice(one.kinds[0].param_shape, _targets(one))):
            doubled += _of_parameters(facts, one, boxes, frozenset())
    if doubled:
        doubled = _in_given_order(facts, doubled)
        where = f"parameter {doubled[0]['param']} of coordinate {doubled[0]['coordinate']}"
        raise OverlappingPlan(f"{where}: bytes would be written twice in {_few(doubled)}: correct the needs", doubled=json.dumps(doubled))


def _refuse_holes(facts: Survey, parameters: list[_Parameters]) -> None:
    found = []
    for group in facts.groups:
        if group.needers:
            held, needed = (tuple(sorted({kind.box for _, kind in side})) for side in (group.holders, group.needers))
            if boxes := _not_held(group.holders[0][1].shape, held, needed):
                found += [(facts.names[t], boxes) for t in group.tensors.tolist()]
    missing: list[Where] = [{"tensor": tensor, "box": box} for tensor, boxes in _as_given(facts, found) for box in boxes]
    unwritten = [frozenset(parameter.name for parameter in table.unwritten) for _, table in facts.coordinates]
    holes: list[Where] = []
    for one in parameters:
        if boxes := _never_covered(one.kinds[0].param_shape, _targets(one)):
            holes += _of_parameters(facts, one, boxes, unwritten[one.place])
    missing += _in_given_order(facts, holes)
    if missing:
        first = missing[0]
        where = f"tensor {first['tensor']}" if "tensor" in first else f"parameter {first['param']} of coordinate {first['coordinate']}"
        advice = "publish them" if "tensor" in first else "find what should write them, or declare the parameter as unwritten"
        raise IncompletePlan(f"{where}: bytes are missing in {_few(missing)}: {advice}", tensor=first.get("tensor"), missing=json.dumps(missing))


def _of_parameters(facts: Survey, one: _Parameters, boxes: list[Box], but: frozenset[str]) -> list[Where]:
    class_, table = facts.coordinates[one.place]
    names = [table.params[p] for p in one.params.tolist() if table.params[p] not in but]
    return [{"coordinate": label(class_, table.id), "param": name, "box": box} for name in names for box in boxes]


def _targets(one: _Parameters) -> tuple[Box, ...]:
    return tuple(kind.at for kind in one.kinds)


@lru_cache(maxsize=1024)
def _covered_twice(shape: Shape, boxes: tuple[Box, ...]) -> list[Box]:
    return covered(shape, boxes, lambda counts: counts > 1)


@lru_cache(maxsize=1024)
def _never_covered(shape: Shape, boxes: tuple[Box, ...]) -> list[Box]:
    return [] if whole(shape) in boxes else covered(shape, boxes, lambda counts: counts == 0)


@lru_cache(maxsize=1024)
def _not_held(shape: Shape, held: tuple[Box, ...], needed: tuple[Box, ...]) -> list[Box]:
    if whole(shape) in held:
        return []
    grid = Grid(shape, [*held, *needed])
    return [box for _, box in grid.pieces(((grid.counts(needed) > 0) & (grid.counts(held) == 0)).astype(np.int64))]


def _as_given(facts: Survey, found: list[tuple[str, list[Box]]]) -> list[tuple[str, list[Box]]]:
    """In the order in which the shards name the tensors."""
    if len(found) < 2:
        return found
    order = {facts.names[t]: i for i, t in enumerate(dict.fromkeys(t for table in facts.given[0] for t, _ in _rows(facts, table)))}
    return sorted(found, key=lambda entry: order[entry[0]])


def _in_given_order(facts: Survey, found: list[Where]) -> list[Where]:
    """In the order in which the needs name the parameters."""
    if len(found) < 2:
        return found
    order: dict[tuple[object, object], int] = {}
    for class_, table in facts.given[1]:
        for param in table.params:
            order.setdefault((label(class_, table.id), param), len(order))
    return sorted(found, key=lambda entry: order[entry["coordinate"], entry["param"]])


def words(box: Box) -> str:
    return str([list(side) for side in box])


def _few(found: list[Where]) -> str:
    boxes = ", ".join(json.dumps(entry["box"]) if entry["box"] else "all of it" for entry in found[:_FEW])
    return boxes + (f" and {len(found) - _FEW} more boxes" if len(found) > _FEW else "")

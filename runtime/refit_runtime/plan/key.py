"""What everybody plans from: layouts as bytes named by their hash, and the document that names the layouts of one plan.

A layout blob is the shards of a rank, or the needs of a coordinate, in canonical order: whatever order they were found in, equal facts are equal bytes.
It says neither which rank nor which coordinate, so replicas share one. First the names, a line of JSON for each table of names; then, in one more line,
the distinct kinds, and columns that say for each shard or need which name and which kind it has (base64 of little-endian 32-bit numbers).

The plan key is the hash of the plan document: layout only, never content, addresses or worker ids.

Invariant: a plan made of a document counts shards and needs in canonical order; `canonical_order` maps them back to the order in which they were found.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from refit_api.errors import WireMismatch
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Need, Parameter, RankShards, Shard

from refit_runtime.plan.plan import Plan, Subset, plan_tables
from refit_runtime.plan.table import Column, Names, NeedKind, NeedTable, ShardKind, ShardTable, column, need_table, shard_table


@dataclass(frozen=True, slots=True)
class _Reader:
    """The names of one plan, and the lines of names that were read already: ranks that hold parts of the same tensors repeat them."""

    names: Names
    lines: dict[bytes, Column]

    def numbers(self, line: bytes) -> Column:
        if line not in self.lines:
            self.lines[line] = column([self.names.number(name) for name in json.loads(line)])
        return self.lines[line]


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """`trainer`: layout hash by rank; `classes`: by class hash, layout hash by coordinate id."""

    trainer: Mapping[int, str]
    classes: Mapping[str, Mapping[str, str]]
    redundancy: int = 1

    def encode(self) -> bytes:
        classes = {class_: dict(coordinates) for class_, coordinates in self.classes.items()}
        return _json({"trainer": {str(rank): layout for rank, layout in self.trainer.items()}, "classes": classes, "redundancy": self.redundancy})

    @classmethod
    def decode(cls, blob: bytes) -> PlanDocument:
        try:
            found = json.loads(blob)
            trainer = {int(rank): str(layout) for rank, layout in found["trainer"].items()}
            classes = {str(class_): {str(id_): str(layout) for id_, layout in needs.items()} for class_, needs in found["classes"].items()}
            document = cls(trainer, classes, int(found["redundancy"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WireMismatch(
                f"plan document of {len(blob)} bytes: not of a form that this version of Refit knows ({error}); run one version everywhere"
            ) from error
        if document.encode() != blob:
            raise WireMismatch(f"plan document of {len(blob)} bytes: has fields that this version of Refit does not know; run one version everywhere")
        return document


def plan_key(document: PlanDocument) -> str:
    return hashlib.sha256(document.encode()).hexdigest()


def layout_hash(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def plan_document(document: PlanDocument, layout: Callable[[str], bytes], subset: Subset | None = None) -> Plan:
    """Plans from the blobs that `layout` finds by their hash; refuses a blob that is another one."""
    reader = _Reader(Names(), {})
    shards: dict[str, ShardTable] = {}
    needs: dict[str, NeedTable] = {}
    trainer = []
    for rank, name in document.trainer.items():
        if name not in shards:
            shards[name] = _read_shards(_checked(name, layout(name)), rank, reader)
        trainer.append(replace(shards[name], rank=rank))
    coordinates = []
    for class_, ids in document.classes.items():
        for id_, name in ids.items():
            if name not in needs:
                needs[name] = _read_needs(_checked(name, layout(name)), id_, reader)
            coordinates.append((class_, replace(needs[name], id=id_)))
    return plan_tables(reader.names, trainer, coordinates, document.redundancy, subset)


def canonical_order(facts: RankShards | CoordinateNeeds) -> tuple[int, ...]:
    """Which of the facts stands at each place of the canonical order."""
    keys = [_shard_key(shard) for shard in facts.shards] if isinstance(facts, RankShards) else [_need_key(need) for need in facts.needs]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def encode_shards(facts: RankShards) -> bytes:
    names = Names()
    table = shard_table(RankShards(facts.rank, facts.replica, tuple(facts.shards[i] for i in canonical_order(facts))), names)
    kinds = [[kind.dtype.value, kind.shape, kind.box] for kind in table.kinds]
    rest = {"layout": "shards", "replica": table.replica, "kinds": kinds, "name": _packed(table.name), "kind": _packed(table.kind)}
    return b"\n".join((_json(names.all()), _json(rest)))


def encode_needs(facts: CoordinateNeeds) -> bytes:
    names = Names()
    table = need_table(CoordinateNeeds(facts.id, tuple(facts.needs[i] for i in canonical_order(facts)), facts.unwritten), names)
    kinds = [[kind.box, kind.at, kind.dtype.value, kind.param_shape, kind.perm, kind.shape] for kind in table.kinds]
    unwritten = sorted({(parameter.name, parameter.dtype.value, parameter.shape) for parameter in facts.unwritten})
    columns = {"name": _packed(table.name), "param": _packed(table.param), "kind": _packed(table.kind)}
    return b"\n".join((_json(names.all()), _json(table.params), _json({"layout": "needs", "kinds": kinds, "unwritten": unwritten, **columns})))


def decode_shards(blob: bytes, rank: int) -> RankShards:
    reader = _Reader(Names(), {})
    return _read_shards(blob, rank, reader).facts(reader.names.all())


def decode_needs(blob: bytes, id: str) -> CoordinateNeeds:  # noqa: A002  an id is what it is
    reader = _Reader(Names(), {})
    return _read_needs(blob, id, reader).facts(reader.names.all())


def _read_shards(blob: bytes, rank: int, reader: _Reader) -> ShardTable:
    try:
        (line,), rest = _lines(blob, "shards", 1)
        kinds = tuple(ShardKind(Dtype(dtype), tuple(shape), _box(box)) for dtype, shape, box in rest["kinds"])
        return ShardTable(rank, int(rest["replica"]), kinds, reader.numbers(line)[_unpacked(rest["name"])], _unpacked(rest["kind"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable("layout", blob, error) from error


def _read_needs(blob: bytes, id_: str, reader: _Reader) -> NeedTable:
    try:
        (tensors, params), rest = _lines(blob, "needs", 2)
        kinds = tuple(
            NeedKind(
                _box(box), _box(at), Dtype(dtype), tuple(param_shape), tuple(perm) if perm is not None else None, tuple(shape) if shape is not None else None
            )
            for box, at, dtype, param_shape, perm, shape in rest["kinds"]
        )
        unwritten = tuple(Parameter(name, Dtype(dtype), tuple(shape)) for name, dtype, shape in rest["unwritten"])
        columns = (reader.numbers(tensors)[_unpacked(rest["name"])], _unpacked(rest["param"]), _unpacked(rest["kind"]))
        return NeedTable(id_, tuple(json.loads(params)), kinds, *columns, unwritten)
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable("layout", blob, error) from error


def _checked(name: str, blob: bytes) -> bytes:
    if layout_hash(blob) != name:
        raise WireMismatch(f"layout {name}: the bytes found under this hash have another ({layout_hash(blob)})", seen=layout_hash(blob), expected=name)
    return blob


def _lines(blob: bytes, what: str, tables: int) -> tuple[list[bytes], dict[str, Any]]:
    *names, last = blob.split(b"\n")
    rest = json.loads(last)
    if rest["layout"] != what or len(names) != tables:
        raise ValueError(f"it holds {rest['layout']}, expected {what}")
    return names, rest


def _unreadable(what: str, blob: bytes, error: Exception) -> WireMismatch:
    return WireMismatch(f"{what} of {len(blob)} bytes: not of a form that this version of Refit knows ({error}); run one version everywhere")


def _shard_key(shard: Shard) -> tuple[object, ...]:
    return shard.tensor.name, shard.box, shard.tensor.dtype.value, shard.tensor.shape


def _need_key(need: Need) -> tuple[object, ...]:
    parameter = need.parameter
    return need.tensor, need.box, parameter.name, need.at, need.perm or (), parameter.dtype.value, parameter.shape, need.shape or ()


def _box(sides: list[list[int]]) -> Box:
    return tuple((lo, hi) for lo, hi in sides)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _packed(numbers: Column) -> str:
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def _unpacked(text: str) -> Column:
    return np.frombuffer(base64.b64decode(text), "<i4").astype(np.int32)

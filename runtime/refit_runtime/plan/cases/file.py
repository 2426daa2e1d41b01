"""A case file as typed facts. Everything that is wrong with the file itself is found here, and nothing about layouts: those are refused by the plan.

The functions below are the format, field by field; `docs/reference/case-files.md` explains it. The first fault is raised as InvalidCase with `field`, the
dotted path of the culprit, and `line`, where it stands (or where the mapping starts that lacks it).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from reprlib import Repr
from typing import NoReturn

import yaml
from refit_api.errors import InvalidCase
from refit_api.tensors import Box, Dtype, Need, Parameter, RankShards, Shape, Shard, TensorSpec

from refit_runtime.plan.plan import Subset

DEFAULT_CHUNK = 64 << 20

LARGEST = 1 << 50  # elements of a tensor: sizes beyond are typing errors, and would not fit the machine's integers
_DIMS = 63  # of a tensor: arrays have 64, one of them for the bytes of an element
_MOST = 1 << 16  # ranks, experts, heads: each of them is looked at
_Path = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Megatron trainer: ranks are numbered tp fastest, then ep, dp, pp."""

    tp: int
    pp: int
    ep: int
    etp: int
    dp: int
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Vocabulary:
    hf: str
    vocab: int
    padded: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Heads:
    """`bias` has the names of the 1-D twins, or none."""

    hf: tuple[str, ...]
    bias: tuple[str, ...]
    q: int
    kv: int
    dim: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Plain:
    hf: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Gated:
    hf: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Experts:
    """`names` of gate, up and down, with `{e}` for the id."""

    names: tuple[str, str, str]
    experts: int
    ffn: int
    hidden: int
    map: str | tuple[tuple[int, ...], ...]

    def named(self, expert: int) -> tuple[str, str, str]:
        gate, up, down = (name.replace("{e}", str(expert)) for name in self.names)
        return gate, up, down


@dataclass(frozen=True, slots=True)
class Module:
    """`body` is None for an unknown role, whose fields are not judged. `order` is what the file says about fused memory, if it does."""

    role: str
    stage: int
    tied: bool
    order: str | None
    body: Vocabulary | Heads | Plain | Gated | Experts | None


@dataclass(frozen=True, slots=True)
class Megatron:
    sizes: Sizes
    modules: tuple[Module, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """`unwritten`: names, and parameters that every coordinate has."""

    name: str
    trainer: tuple[RankShards, ...] | Megatron
    needs: tuple[tuple[str, tuple[Need, ...]], ...]
    unwritten: tuple[str | Parameter, ...]
    redundancy: int
    chunk_bytes: int
    subset: Subset


def read_case(content: bytes) -> Case:
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(content.decode())
        try:
            root = loader.get_single_node()
            _refuse_repeated_keys(root)
            value = loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InvalidCase(f"line {line}: not YAML: {error.problem}", line=line, field="") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidCase(f"not YAML: {error}", line=1, field="") from error
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:  # of the library, where a tag does not fit its value
        raise InvalidCase("not YAML: a tag (!!...) does not fit the value behind it: leave it out, or correct the value", line=1, field="") from error
    try:
        return _case(_At(value, ()))
    except _Fault as fault:
        field, line = _dotted(fault.path), _line(root, fault.where)
        raise InvalidCase(f"line {line}: {field or 'the file'}: {fault}", line=line, field=field) from None


# ---------------------------------------------------------------- values, and where they stand


class _Fault(Exception):
    """`path` is the field at fault, `where` it stands if not there."""

    def __init__(self, path: _Path, message: str, where: _Path | None = None) -> None:
        super().__init__(message)
        self.path, self.where = path, where if where is not None else path


class _Short(Repr):
    """Aliases make a value as large as one likes out of a few lines, and numbers of thousands of digits have no decimal form."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict, self.maxstring, self.maxother = 3, 16, 16, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < LARGEST else hex(x)


_SHORT = _Short()


@dataclass(frozen=True, slots=True)
class _At:
    value: object
    path: _Path

    def refuse(self, expected: str) -> NoReturn:
        found = "nothing" if self.value is None else _SHORT.repr(self.value)
        raise _Fault(self.path, f"expected {expected}, found {found if len(found) < 80 else found[:76] + ' ...'}")

    def fields(self, required: str, optional: str = "") -> dict[str, _At]:
        if not isinstance(self.value, dict):
            self.refuse("a mapping")
        names = required.split()
        for name in names:
            if name not in self.value:
                raise _Fault((*self.path, name), "missing")
        for name in self.value:
            if name not in names and name not in optional.split():
                raise _Fault((*self.path, name), f"unknown field; expected {', '.join([*names, *optional.split()])}")
        return {name: _At(value, (*self.path, name)) for name, value in self.value.items()}

    def items(self) -> list[_At]:
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [_At(item, (*self.path, i)) for i, item in enumerate(self.value)]

    def text(self, having: str = "") -> str:
        if not isinstance(self.value, str) or not self.value or having not in self.value or any("\ud800" <= letter <= "\udfff" for letter in self.value):
            self.refuse(f"a text with {having}" if having else "a text")
        return self.value

    def integer(self, least: int | None = None) -> int:
        if type(self.value) is not int or (least is not None and self.value < least):
            self.refuse("an integer" if least is None else f"an integer of at least {least}")
        if not -LARGEST < self.value < LARGEST:
            self.refuse(f"an integer below {LARGEST}")
        return self.value

    def count(self) -> int:
        found = self.integer(1)
        if found > _MOST:
            self.refuse(f"at most {_MOST}")
        return found

    def limit(self) -> int:
        """Beyond what there can be, one is as good as another."""
        if type(self.value) is int and self.value > LARGEST:
            return LARGEST
        return self.integer(1)

    def flag(self) -> bool:
        if type(self.value) is not bool:
            self.refuse("true or false")
        return self.value

    def dtype(self) -> Dtype:
        if not isinstance(self.value, str) or self.value not in [dtype.value for dtype in Dtype]:
            self.refuse(f"one of {', '.join(dtype.value for dtype in Dtype)}")
        return Dtype(self.value)

    def shape(self) -> Shape:
        found = tuple(item.integer(1) for item in self.dims())
        if prod(found) >= LARGEST:
            self.refuse(f"fewer than {LARGEST} elements")
        return found

    def box(self) -> Box:
        return tuple(item.range() for item in self.dims())

    def dims(self) -> list[_At]:
        found = self.items()
        if len(found) > _DIMS:
            self.refuse(f"at most {_DIMS} dims")
        return found

    def range(self) -> tuple[int, int]:
        if not isinstance(self.value, list) or [type(end) for end in self.value] != [int, int] or not 0 <= self.value[0] < self.value[1] < LARGEST:
            self.refuse(f"[lo, hi] with 0 <= lo < hi < {LARGEST}")
        return self.value[0], self.value[1]

    def texts(self, count: int | None = None) -> tuple[str, ...]:
        found = tuple(item.text() for item in self.items())
        if count is not None and len(found) != count:
            self.refuse(f"{count} names")
        return found


def _dotted(path: _Path) -> str:
    steps = [step if isinstance(step, str) else _SHORT.repr(step) for step in path]
    return "".join(f"[{said}]" if isinstance(step, int) and i else f".{said}" for i, (step, said) in enumerate(zip(path, steps, strict=True))).lstrip(".")


def _line(root: yaml.Node | None, path: _Path) -> int:
    node = root
    line: int = node.start_mark.line if node is not None else 0
    for step in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == step]
            if not found:
                break
            line, node = found[-1][0].start_mark.line, found[-1][1]
    return line + 1


def _refuse_repeated_keys(root: yaml.Node | None) -> None:
    """A key given twice would silently lose the first."""
    seen: set[int] = set()
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            known: set[tuple[str, str]] = set()
            for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
                if (key.tag, key.value) in known:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                known.add((key.tag, key.value))
            nodes += [value for _, value in node.value]


# ---------------------------------------------------------------- the format


def _case(at: _At) -> Case:
    top = at.fields("kind trainer generator", "name options expect")
    if top["kind"].text() != "RefitCase":
        top["kind"].refuse("RefitCase")
    generator = top["generator"].fields("coordinates", "unwritten")
    options = top["options"].fields("", "redundancy chunkBytes subset") if "options" in top else {}
    trainer = top["trainer"]
    explicit = isinstance(trainer.value, dict) and "ranks" in trainer.value
    coordinates = [_coordinate(item) for item in generator["coordinates"].items()]
    _refuse_twice(generator["coordinates"], "id", [id_ for id_, _ in coordinates])
    return Case(
        top["name"].text() if "name" in top else "",
        _ranks(trainer.fields("ranks")["ranks"]) if explicit else _megatron(trainer.fields("megatron modules")),
        tuple(coordinates),
        tuple(_unwritten(item) for item in generator["unwritten"].items()) if "unwritten" in generator else (),
        options["redundancy"].limit() if "redundancy" in options else 1,
        options["chunkBytes"].limit() if "chunkBytes" in options else DEFAULT_CHUNK,
        _subset(options["subset"].fields("", "params layers layerGroups")) if "subset" in options else Subset(),
    )


def _refuse_twice(at: _At, what: str, given: Sequence[Hashable]) -> None:
    seen: set[Hashable] = set()
    for i, one in enumerate(given):
        if one in seen:
            raise _Fault(at.path, f"{what} {one} is given twice", (*at.path, i, what))
        seen.add(one)


def _ranks(at: _At) -> tuple[RankShards, ...]:
    ranks = []
    for item in at.items():
        fields = item.fields("rank shards", "replica")
        replica = fields["replica"].integer(0) if "replica" in fields else 0
        ranks.append(RankShards(fields["rank"].integer(0), replica, tuple(_shard(shard) for shard in fields["shards"].items())))
    _refuse_twice(at, "rank", [entry.rank for entry in ranks])
    return tuple(ranks)


def _shard(at: _At) -> Shard:
    fields = at.fields("tensor dtype shape box")
    return Shard(TensorSpec(fields["tensor"].text(), fields["dtype"].dtype(), fields["shape"].shape()), fields["box"].box())


def _coordinate(at: _At) -> tuple[str, tuple[Need, ...]]:
    fields = at.fields("id needs")
    return fields["id"].text(), tuple(_need(item) for item in fields["needs"].items())


def _need(at: _At) -> Need:
    fields = at.fields("tensor box param paramShape dtype at", "perm")
    box, perm = fields["box"].box(), None
    if "perm" in fields:
        perm = tuple(item.integer(0) for item in fields["perm"].items())
        if sorted(perm) != list(range(len(box))):
            fields["perm"].refuse("each dim of the box once")
    return Need(fields["tensor"].text(), box, _parameter(fields), fields["at"].box(), perm)


def _unwritten(at: _At) -> str | Parameter:
    return at.text() if isinstance(at.value, str) else _parameter(at.fields("param paramShape dtype"))


def _parameter(fields: dict[str, _At]) -> Parameter:
    return Parameter(fields["param"].text(), fields["dtype"].dtype(), fields["paramShape"].shape())


def _subset(fields: dict[str, _At]) -> Subset:
    return Subset(
        frozenset(fields["params"].texts()) if "params" in fields else frozenset(),
        frozenset(item.integer(0) for item in fields["layers"].items()) if "layers" in fields else frozenset(),
        frozenset(fields["layerGroups"].texts()) if "layerGroups" in fields else frozenset(),
    )


def _megatron(fields: dict[str, _At]) -> Megatron:
    sizes = fields["megatron"].fields("dtype", "tp pp ep etp dp")
    tp, pp, ep, etp, dp = (sizes[axis].integer(1) if axis in sizes else 1 for axis in ("tp", "pp", "ep", "etp", "dp"))
    if tp * pp * ep * dp > _MOST:
        fields["megatron"].refuse(f"at most {_MOST} ranks")
    return Megatron(Sizes(tp, pp, ep, etp, dp, sizes["dtype"].dtype()), tuple(_module(item) for item in fields["modules"].items()))


def _module(at: _At) -> Module:
    role = _At(at.value.get("role") if isinstance(at.value, dict) else None, (*at.path, "role")).text()
    if role not in ROLES:
        return Module(role, 0, False, None, None)
    required, optional = ROLES[role]
    fields = at.fields(f"role {required}", f"stage {optional}")
    stage = fields["stage"].integer(0) if "stage" in fields else 0
    tied = fields["tied"].flag() if "tied" in fields else False
    return Module(role, stage, tied, fields["order"].text() if "order" in fields else None, _body(role, fields, at))


ROLES = {
    "embedding": ("hf vocab hidden", "vocabPadded"),
    "output": ("hf vocab hidden", "vocabPadded tied"),
    "qkv": ("hf qHeads kvHeads headDim hidden", "bias hfBias order"),
    "column": ("hf shape", ""),
    "row": ("hf shape", ""),
    "replicated": ("hf shape", ""),
    "gatedMlp": ("hf shape", "order"),
    "experts": ("hf experts ffn hidden map", "order"),
}
"""Required and optional fields of each role, beside `role` and `stage`."""


def _body(role: str, fields: dict[str, _At], at: _At) -> Vocabulary | Heads | Plain | Gated | Experts:
    if role in ("embedding", "output"):
        vocab = fields["vocab"].integer(1)
        padded = fields["vocabPadded"].integer(1) if "vocabPadded" in fields else vocab
        return Vocabulary(fields["hf"].text(), vocab, padded, fields["hidden"].integer(1))
    if role == "qkv":
        return _heads(fields, at)
    if role == "gatedMlp":
        return Gated(fields["hf"].texts(2), fields["shape"].shape())
    if role == "experts":
        hf = fields["hf"].fields("gate up down")
        names = (hf["gate"].text("{e}"), hf["up"].text("{e}"), hf["down"].text("{e}"))
        experts, ffn, hidden = fields["experts"].count(), fields["ffn"].integer(1), fields["hidden"].integer(1)
        map_ = fields["map"]
        listed = map_.value if isinstance(map_.value, str) else tuple(tuple(expert.integer() for expert in ids.items()) for ids in map_.items())
        return Experts(names, experts, ffn, hidden, listed)
    return Plain(fields["hf"].text(), fields["shape"].shape())


def _heads(fields: dict[str, _At], at: _At) -> Heads:
    names = fields["hf"].texts(3)
    bias = fields["hfBias"].texts(3) if "hfBias" in fields else ()
    if (fields["bias"].flag() if "bias" in fields else False) != bool(bias):
        raise _Fault((*at.path, "hfBias"), "goes with bias: true, and only with it")
    q, kv, dim, hidden = fields["qHeads"].count(), fields["kvHeads"].count(), fields["headDim"].integer(1), fields["hidden"].integer(1)
    return Heads(names, bias, q, kv, dim, hidden)

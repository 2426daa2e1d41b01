"""A file that is wrong in itself is refused with the field at fault and the line where it stands, whatever else is wrong with the layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from refit_api.errors import InvalidCase
from refit_runtime.plan.cases.file import read_case

from tests.plan.answers import answer, written

Fields = dict[str, Any]

RANKS: Fields = {
    "kind": "RefitCase",
    "trainer": {"ranks": [{"rank": 0, "shards": [{"tensor": "x", "dtype": "float32", "shape": [4, 8], "box": [[0, 4], [0, 8]]}]}]},
    "generator": {
        "coordinates": [
            {"id": "tp0", "needs": [{"tensor": "x", "box": [[0, 4], [0, 8]], "param": "x", "paramShape": [4, 8], "dtype": "float32", "at": [[0, 4], [0, 8]]}]}
        ]
    },
    "options": {"redundancy": 1, "subset": {"layers": [1]}},
}
ROLES: Fields = {
    "kind": "RefitCase",
    "trainer": {
        "megatron": {"tp": 2, "dtype": "float32"},
        "modules": [
            {"role": "qkv", "hf": ["q", "k", "v"], "qHeads": 4, "kvHeads": 2, "headDim": 2, "hidden": 3, "bias": True, "hfBias": ["qb", "kb", "vb"]},
            {"role": "gatedMlp", "hf": ["gate", "up"], "shape": [4, 3]},
            {"role": "experts", "hf": {"gate": "{e}.g", "up": "{e}.u", "down": "{e}.d"}, "experts": 2, "ffn": 4, "hidden": 3, "map": "linear"},
            {"role": "output", "hf": "head", "vocab": 6, "hidden": 3},
        ],
    },
    "generator": {"coordinates": []},
}


def _put(value: Any, *path: Any) -> Callable[[Fields], None]:
    def change(case: Any) -> None:
        for step in path[:-1]:
            case = case[step]
        case[path[-1]] = value

    return change


def _take(*path: Any) -> Callable[[Fields], None]:
    def change(case: Any) -> None:
        for step in path[:-1]:
            case = case[step]
        del case[path[-1]]

    return change


SHARD = ("trainer", "ranks", 0, "shards", 0)
NEED = ("generator", "coordinates", 0, "needs", 0)
AT = "trainer.ranks[0].shards[0]"
QKV, GATED, EXPERTS, OUTPUT = (("trainer", "modules", i) for i in range(4))

FAULTS: list[tuple[str, Fields, Callable[[Fields], None], str]] = [
    ("other kind", RANKS, _put("RefitGroup", "kind"), "kind"),
    ("no kind", RANKS, _take("kind"), "kind"),
    ("no generator", RANKS, _take("generator"), "generator"),
    ("unknown top field", RANKS, _put(1, "model"), "model"),
    ("empty name", RANKS, _put("", "name"), "name"),
    ("neither ranks nor megatron", RANKS, _put({}, "trainer"), "trainer.megatron"),
    ("ranks and modules", RANKS, _put([], "trainer", "modules"), "trainer.modules"),
    ("trainer is a list", RANKS, _put([], "trainer"), "trainer"),
    ("rank is a fraction", RANKS, _put(0.5, "trainer", "ranks", 0, "rank"), "trainer.ranks[0].rank"),
    ("rank is 2.0", RANKS, _put(2.0, "trainer", "ranks", 0, "rank"), "trainer.ranks[0].rank"),
    ("rank is true", RANKS, _put(True, "trainer", "ranks", 0, "rank"), "trainer.ranks[0].rank"),
    ("rank is negative", RANKS, _put(-1, "trainer", "ranks", 0, "rank"), "trainer.ranks[0].rank"),
    ("replica is null", RANKS, _put(None, "trainer", "ranks", 0, "replica"), "trainer.ranks[0].replica"),
    ("rank twice", RANKS, lambda case: case["trainer"]["ranks"].append(case["trainer"]["ranks"][0]), "trainer.ranks"),
    ("empty tensor name", RANKS, _put("", *SHARD, "tensor"), f"{AT}.tensor"),
    ("tensor name is a number", RANKS, _put(7, *SHARD, "tensor"), f"{AT}.tensor"),
    ("unknown dtype", RANKS, _put("float8", *SHARD, "dtype"), f"{AT}.dtype"),
    ("extent 0", RANKS, _put(0, *SHARD, "shape", 1), f"{AT}.shape[1]"),
    ("extent is a text", RANKS, _put("8", *SHARD, "shape", 1), f"{AT}.shape[1]"),
    ("shape is null", RANKS, _put(None, *SHARD, "shape"), f"{AT}.shape"),
    ("more elements than any machine holds", RANKS, _put([1 << 40, 1 << 40], *SHARD, "shape"), f"{AT}.shape"),
    ("more dims than an array has", RANKS, _put([1] * 64, *SHARD, "shape"), f"{AT}.shape"),
    ("a box of more dims than an array has", RANKS, _put([[0, 1]] * 64, *NEED, "at"), "generator.coordinates[0].needs[0].at"),
    ("empty range", RANKS, _put([2, 2], *SHARD, "box", 0), f"{AT}.box[0]"),
    ("range backwards", RANKS, _put([3, 2], *SHARD, "box", 0), f"{AT}.box[0]"),
    ("range with a fraction", RANKS, _put([0, 4.0], *SHARD, "box", 0), f"{AT}.box[0]"),
    ("range of three", RANKS, _put([0, 2, 4], *SHARD, "box", 0), f"{AT}.box[0]"),
    ("unknown field of a shard", RANKS, _put(0, *SHARD, "offset"), f"{AT}.offset"),
    ("coordinate twice", RANKS, lambda case: case["generator"]["coordinates"].append(case["generator"]["coordinates"][0]), "generator.coordinates"),
    ("need without at", RANKS, _take(*NEED, "at"), "generator.coordinates[0].needs[0].at"),
    ("perm is none of the dims", RANKS, _put([0, 2], *NEED, "perm"), "generator.coordinates[0].needs[0].perm"),
    ("perm repeats a dim", RANKS, _put([0, 0], *NEED, "perm"), "generator.coordinates[0].needs[0].perm"),
    ("perm is null", RANKS, _put(None, *NEED, "perm"), "generator.coordinates[0].needs[0].perm"),
    ("unwritten is null", RANKS, _put([None], "generator", "unwritten"), "generator.unwritten[0]"),
    ("unwritten without a dtype", RANKS, _put([{"param": "p", "paramShape": [1]}], "generator", "unwritten"), "generator.unwritten[0].dtype"),
    ("redundancy 0", RANKS, _put(0, "options", "redundancy"), "options.redundancy"),
    ("unknown option", RANKS, _put(1, "options", "chunkbytes"), "options.chunkbytes"),
    ("layer is a text", RANKS, _put(["1"], "options", "subset", "layers"), "options.subset.layers[0]"),
    ("subset is null", RANKS, _put(None, "options", "subset"), "options.subset"),
    ("tp is 2.5", ROLES, _put(2.5, "trainer", "megatron", "tp"), "trainer.megatron.tp"),
    ("more ranks than anybody has", ROLES, _put(1 << 16, "trainer", "megatron", "dp"), "trainer.megatron"),
    ("more experts than anybody has", ROLES, _put(1 << 21, *EXPERTS, "experts"), "trainer.modules[2].experts"),
    ("more heads than anybody has", ROLES, _put(10**9, *QKV, "kvHeads"), "trainer.modules[0].kvHeads"),
    ("no dtype", ROLES, _take("trainer", "megatron", "dtype"), "trainer.megatron.dtype"),
    ("a module without a role", ROLES, _take(*QKV, "role"), "trainer.modules[0].role"),
    ("a module is a text", ROLES, _put("qkv", *QKV), "trainer.modules[0].role"),
    ("no kvHeads", ROLES, _take(*QKV, "kvHeads"), "trainer.modules[0].kvHeads"),
    ("two names for qkv", ROLES, _put(["q", "k"], *QKV, "hf"), "trainer.modules[0].hf"),
    ("bias without names", ROLES, _take(*QKV, "hfBias"), "trainer.modules[0].hfBias"),
    ("names without bias", ROLES, _put(False, *QKV, "bias"), "trainer.modules[0].hfBias"),
    ("bias is 1", ROLES, _put(1, *QKV, "bias"), "trainer.modules[0].bias"),
    ("three names for a gated MLP", ROLES, _put(["a", "b", "c"], *GATED, "hf"), "trainer.modules[1].hf"),
    ("order is null", ROLES, _put(None, *GATED, "order"), "trainer.modules[1].order"),
    ("an expert name without {e}", ROLES, _put("up", *EXPERTS, "hf", "up"), "trainer.modules[2].hf.up"),
    ("an expert id is true", ROLES, _put([[True], [0]], *EXPERTS, "map"), "trainer.modules[2].map[0][0]"),
    ("map is null", ROLES, _put(None, *EXPERTS, "map"), "trainer.modules[2].map"),
    ("tied is a text", ROLES, _put("yes", *OUTPUT, "tied"), "trainer.modules[3].tied"),
    ("padded to null", ROLES, _put(None, *OUTPUT, "vocabPadded"), "trainer.modules[3].vocabPadded"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "field"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_fault(case: Fields, change: Callable[[Fields], None], field: str) -> None:
    case = copy.deepcopy(case)
    assert answer(written(case))[0] in (0, 3), "the case without the fault is a good file"
    change(case)
    code, found = answer(written(case))
    assert (code, found["verdict"], found["error"]["type"]) == (2, "invalid", "InvalidCase")
    assert found["error"]["field"] == field
    assert found["error"]["line"] >= 1


TEXTS = {
    "nothing": (b"", 1),
    "not UTF-8": (b"\xff\xfe\x00", 1),
    "not YAML": (b"kind: RefitCase\ntrainer: ]", 2),
    "a tab": (b"kind: RefitCase\n\tname: x", 2),
    "a list": (b"- 1\n- 2", 1),
    "an alias of itself": (b"kind: RefitCase\ntrainer: &a [*a]\ngenerator: {coordinates: []}", 2),
    "a date that does not exist": (b"kind: 2001-13-41", 1),
    "a key twice": (b"kind: RefitCase\nname: a\nname: b\ntrainer: {ranks: []}\ngenerator: {coordinates: []}", 3),
    "deep": (b"[" * 5000, 1),
    "a truth that is none": (b"kind: !!bool foo", 1),
    "an integer without digits": (b'kind: !!int ""', 1),
    "a number without digits": (b'kind: !!float ""', 1),
    "a time that is none": (b"kind: !!timestamp foo", 1),
    "a rank of thousands of digits": (b"kind: RefitCase\ntrainer:\n  ranks:\n    - rank: 0x" + b"f" * 5000 + b"\ngenerator: {coordinates: []}", 4),
    "a field of thousands of digits": (b"kind: RefitCase\n0x" + b"f" * 5000 + b": 1", 2),
    "a key twice, behind one that is a list": (b"kind: RefitCase\n? [a]\n: 1\nname: a\nname: b", 5),
    "half of a surrogate pair": (b'kind: RefitCase\nname: "\\ud800"\ntrainer: {ranks: []}\ngenerator: {coordinates: []}', 2),
}


@pytest.mark.parametrize(("content", "line"), TEXTS.values(), ids=TEXTS)
def test_text(content: bytes, line: int) -> None:
    with pytest.raises(InvalidCase) as caught:
        read_case(content)
    assert int(caught.value.facts["line"]) == line


def test_what_aliases_multiply_is_refused_in_a_line() -> None:
    """Each level is the one below nine times: written out, more than any memory."""
    levels = ["  - &a0 [x]"] + [f"  - &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    content = "\n".join(["kind: RefitCase", "expect:", *levels, "options: *a29", "trainer: {ranks: []}", "generator: {coordinates: []}"])
    with pytest.raises(InvalidCase, match=r"options: expected a mapping, found .{,80}$"):
        read_case(content.encode())


def test_many_keys_are_read_as_fast_as_they_are_many() -> None:
    """Each is looked for among those before it."""
    content = "kind: RefitCase\ntrainer: {ranks: []}\ngenerator: {coordinates: []}\nexpect:\n" + "".join(f"  k{i}: 1\n" for i in range(100_000))
    assert read_case(content.encode()).name == ""


def test_line_is_where_the_field_stands() -> None:
    text = "# a comment\nkind: RefitCase\ntrainer:\n  ranks:\n    - rank: 0\n      shards:\n        - tensor: x\n          dtype: float31\n"
    _, found = answer(f"{text}          shape: [1]\n          box: [[0, 1]]\ngenerator: {{coordinates: []}}\n".encode())
    assert (found["error"]["line"], found["error"]["field"]) == (8, "trainer.ranks[0].shards[0].dtype")


def test_the_file_comes_before_the_layout() -> None:
    case = yaml.safe_load(written(RANKS))
    case["generator"]["coordinates"][0]["needs"][0]["tensor"] = "nobody"
    assert answer(written(case))[1]["error"]["type"] == "UnknownTensor"
    case["options"]["chunkBytes"] = 0
    assert answer(written(case))[1]["error"]["field"] == "options.chunkBytes"


def test_fields_of_an_unknown_role_are_not_judged() -> None:
    case = copy.deepcopy(ROLES)
    case["trainer"]["modules"][0] = {"role": "mamba", "state": None}
    assert answer(written(case))[1]["error"]["type"] == "UnsupportedLayout"


def test_a_module_larger_than_any_machine_is_refused() -> None:
    case = copy.deepcopy(ROLES)
    case["trainer"]["modules"][3] |= {"vocab": 1 << 40, "hidden": 1 << 40}
    assert answer(written(case))[1]["error"]["type"] == "UnsupportedLayout"

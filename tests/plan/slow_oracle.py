"""What the answer to a case file must be, element by element, in nested loops: no boxes are intersected, no array is sliced, nothing is grouped.

An element is (tensor, index). A rank's memory is a list of elements (None: padding), a parameter is a table from its indices to elements; bytes come last.
The file itself is taken to be well-formed.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from itertools import product
from typing import Any

Fields = dict[str, Any]
Index = tuple[int, ...]
Element = tuple[str, Index]

ITEM = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
MASK = (1 << 64) - 1


class Refused(Exception):
    def __init__(self, kind: str, **boxes: list[Fields]) -> None:
        super().__init__(kind)
        self.kind, self.boxes = kind, boxes


def judge(case: Fields) -> Fields:
    """`refused` with the type and the boxes concerned, or what `--json --run` must say of bytes, parameters and memory."""
    try:
        return _answer(case)
    except Refused as refusal:
        return {"verdict": "refused", "type": refusal.kind, **refusal.boxes}


# ---------------------------------------------------------------- elements


def indices(box: Any) -> list[Index]:
    return list(product(*(range(lo, hi) for lo, hi in box)))


def of_shape(shape: Any) -> list[Index]:
    return list(product(*(range(extent) for extent in shape)))


def content(tensor: str, count: int, item: int) -> list[bytes]:
    """Of every element of a tensor, in row-major order."""
    start = int.from_bytes(hashlib.sha256(tensor.encode()).digest()[:8], "little")
    found = b""
    word = 0
    while len(found) < count * item:
        x = (start + word * 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
        found += (x ^ x >> 31).to_bytes(8, "little")
        word += 1
    return [found[i * item : (i + 1) * item] for i in range(count)]


def boxes(marked: set[Index], shape: Any) -> list[list[list[int]]]:
    """Along dim 0 in groups of equal consecutive slices, then each group along dim 1, and so on."""
    if not shape:
        return [[]] if marked else []
    slices = [{index[1:] for index in marked if index[0] == i} for i in range(shape[0])]
    found, lo = [], 0
    for hi in range(1, shape[0] + 1):
        if hi == shape[0] or slices[hi] != slices[lo]:
            found += [[[lo, hi], *rest] for rest in boxes(slices[lo], shape[1:])]
            lo = hi
    return found


# ---------------------------------------------------------------- what ranks hold


class Held:
    """`memory` by rank, in the order of the file; `shards`: (rank, replica, tensor, its elements) ; `specs`: (tensor, dtype, shape, box) as stated."""

    def __init__(self) -> None:
        self.memory: dict[int, list[Element | None]] = defaultdict(list)
        self.shards: list[tuple[int, int, str, frozenset[Index]]] = []
        self.specs: list[tuple[str, str, Index, Any]] = []


def _explicit(trainer: Fields) -> Held:
    held = Held()
    for entry in trainer["ranks"]:
        for shard in entry["shards"]:
            inside = indices(shard["box"])
            held.memory[entry["rank"]] += [(shard["tensor"], index) for index in inside]
            held.shards.append((entry["rank"], entry.get("replica", 0), shard["tensor"], frozenset(inside)))
            held.specs.append((shard["tensor"], shard["dtype"], tuple(shard["shape"]), shard["box"]))
    return held


def _demand(condition: bool) -> None:
    if not condition:
        raise Refused("UnsupportedLayout")


def _megatron(trainer: Fields) -> Held:
    held, sizes = Held(), trainer["megatron"]
    tp, pp, ep, etp, dp = (sizes.get(axis, 1) for axis in ("tp", "pp", "ep", "etp", "dp"))
    names: Counter[str] = Counter()
    for module in trainer["modules"]:
        _demand(module["role"] in PARTS)
        _demand(module.get("stage", 0) < pp)
        _demand(module.get("order") in (None, "perGroup" if module["role"] == "qkv" else "gateUp"))
        names.update({} if module.get("tied") else _names(module))
    _demand(max(names.values(), default=1) == 1)
    for module in trainer["modules"]:
        stage = module.get("stage", 0)
        if module.get("tied"):
            twins = [other for other in trainer["modules"] if other["role"] == "embedding" and _vocabulary(other) == _vocabulary(module)]
            _demand(bool(twins))
            if twins[0].get("stage", 0) == stage:
                continue
        for d in range(dp):
            for e in range(ep):
                for t in range(tp):
                    rank = t + tp * (e + ep * (d + dp * stage))
                    for shapes, elements in PARTS[module["role"]](module, t, tp, e, ep, etp):
                        held.memory[rank] += elements
                        for tensor, shape in shapes.items():
                            mine = [element[1] for element in elements if element is not None and element[0] == tensor]
                            if mine:
                                held.shards.append((rank, d, tensor, frozenset(mine)))
                                held.specs.append((tensor, sizes["dtype"], tuple(shape), [[0, extent] for extent in shape]))
    return held


def _names(module: Fields) -> Counter[str]:
    if module["role"] == "experts":
        return Counter(name.replace("{e}", str(e)) for name in module["hf"].values() for e in range(module["experts"]))
    return Counter([module["hf"]] if isinstance(module["hf"], str) else [*module["hf"], *module.get("hfBias", [])])


def _vocabulary(module: Fields) -> Any:
    return module["hf"], module["vocab"], module.get("vocabPadded", module["vocab"]), module["hidden"]


def _share(rows: list[Any], t: int, tp: int) -> list[Any]:
    _demand(len(rows) % tp == 0)
    return rows[t * len(rows) // tp : (t + 1) * len(rows) // tp]


def _flat(rows: list[list[Any]]) -> list[Any]:
    return [element for row in rows for element in row]


def _rows(tensor: str, shape: Any) -> list[list[Element | None]]:
    """A list of elements for each row."""
    return [[(tensor, (row, *rest)) for rest in of_shape(shape[1:])] for row in range(shape[0])]


def _words(module: Fields, t: int, tp: int, *_: int) -> Any:
    tensor, vocab, padded, hidden = _vocabulary(module)
    _demand(padded >= vocab)
    rows = _rows(tensor, (vocab, hidden)) + [[None] * hidden for _ in range(padded - vocab)]
    yield {tensor: (vocab, hidden)}, _flat(_share(rows, t, tp))


def _qkv(module: Fields, t: int, tp: int, *_: int) -> Any:
    q, kv, dim = module["qHeads"], module["kvHeads"], module["headDim"]
    _demand(q % kv == 0)
    for names, columns in ((module["hf"], [module["hidden"]]), (module.get("hfBias"), [])):
        if names:
            fused: list[Any] = []
            for group in range(kv):
                for name, heads in zip(names, (q // kv, 1, 1), strict=True):
                    fused += _rows(name, ((group + 1) * heads * dim, *columns))[group * heads * dim :]
            shapes = {name: (heads * dim, *columns) for name, heads in zip(names, (q, kv, kv), strict=True)}
            yield shapes, _flat(_share(fused, t, tp))


def _column(module: Fields, t: int, tp: int, *_: int) -> Any:
    _demand(len(module["shape"]) > 0)
    yield {module["hf"]: module["shape"]}, _flat(_share(_rows(module["hf"], module["shape"]), t, tp))


def _row(module: Fields, t: int, tp: int, *_: int) -> Any:
    tensor, shape = module["hf"], module["shape"]
    if len(shape) == 1:
        yield from _replicated(module)
        return
    _demand(len(shape) > 1)
    mine = _share(list(range(shape[1])), t, tp)
    yield {tensor: shape}, [(tensor, index) for index in of_shape(shape) if index[1] in mine]


def _replicated(module: Fields, *_: int) -> Any:
    yield {module["hf"]: module["shape"]}, [(module["hf"], index) for index in of_shape(module["shape"])]


def _gated(module: Fields, t: int, tp: int, *_: int) -> Any:
    _demand(len(module["shape"]) > 0)
    halves = [_share(_rows(name, module["shape"]), t, tp) for name in module["hf"]]
    yield dict.fromkeys(module["hf"], module["shape"]), _flat(halves[0] + halves[1])


def _experts(module: Fields, t: int, tp: int, e: int, ep: int, etp: int) -> Any:
    _demand(tp % etp == 0)
    count, ffn, hidden, where = module["experts"], module["ffn"], module["hidden"], module["map"]
    _demand(ffn % etp == 0)
    if where == "linear":
        _demand(count % ep == 0)
        local = [expert for expert in range(count) if expert // (count // ep) == e]
    elif where == "roundRobin":
        local = [expert for expert in range(count) if expert % ep == e]
    else:
        _demand(isinstance(where, list) and len(where) == ep and all(len(set(ids)) == len(ids) for ids in where))
        _demand({expert for ids in where for expert in ids} == set(range(count)))
        local = [expert for expert in range(count) if expert in where[e]]
    for expert in local:
        gate, up, down = (module["hf"][name].replace("{e}", str(expert)) for name in ("gate", "up", "down"))
        yield from _gated({"hf": [gate, up], "shape": [ffn, hidden]}, t % etp, etp)
        yield from _row({"hf": down, "shape": [hidden, ffn]}, t % etp, etp)


PARTS: Any = {
    "embedding": _words, "output": _words, "qkv": _qkv, "column": _column, "row": _row, "replicated": _replicated, "gatedMlp": _gated, "experts": _experts,
}  # fmt: skip


# ---------------------------------------------------------------- the answer


def _within(box: Any, shape: Any) -> bool:
    return len(box) == len(shape) and all(hi <= extent for (_, hi), extent in zip(box, shape, strict=True))


def _answer(case: Fields) -> Fields:
    held = _explicit(case["trainer"]) if "ranks" in case["trainer"] else _megatron(case["trainer"])
    coordinates, entries = case["generator"]["coordinates"], case["generator"].get("unwritten", [])
    needs = [(coordinate["id"], need) for coordinate in coordinates for need in coordinate["needs"]]
    stated = [((c, need["param"]), need["dtype"], tuple(need["paramShape"])) for c, need in needs]
    stated += [((c["id"], u["param"]), u["dtype"], tuple(u["paramShape"])) for c in coordinates for u in entries if isinstance(u, dict)]
    dtypes = {tensor: dtype for tensor, dtype, _, _ in reversed(held.specs)}
    shapes = {tensor: shape for tensor, _, shape, _ in reversed(held.specs)}

    if any(need["tensor"] not in dtypes for _, need in needs):
        raise Refused("UnknownTensor")
    first = {key: facts for key, *facts in reversed(stated)}
    param_dtypes, param_shapes = ({key: first[key][i] for key, *_ in stated} for i in (0, 1))
    alike = all(dtypes[tensor] == dtype for tensor, dtype, _, _ in held.specs) and all(dtypes[need["tensor"]] == need["dtype"] for _, need in needs)
    if not alike or any(param_dtypes[key] != dtype for key, dtype, _ in stated):
        raise Refused("DtypeMismatch")
    wrong = any(shapes[tensor] != shape or not _within(box, shape) for tensor, _, shape, box in held.specs)
    if wrong or any(param_shapes[key] != shape for key, _, shape in stated):
        raise Refused("ShapeMismatch")
    for _, need in needs:
        extents = [hi - lo for lo, hi in need["box"]]
        moved = [extents[dim] for dim in need.get("perm", range(len(extents)))]
        to = [hi - lo for lo, hi in need["at"]]
        extra = len(to) - len(moved)
        if not _within(need["box"], shapes[need["tensor"]]) or not _within(need["at"], need["paramShape"]) or extra < 0 or to != [1] * extra + moved:
            raise Refused("ShapeMismatch")

    _check_shards(held, shapes)
    return _move(case, held, needs, param_dtypes, param_shapes)


def _check_shards(held: Held, shapes: dict[str, Index]) -> None:
    doubled: dict[str, set[Index]] = defaultdict(set)
    for i, (rank, replica, tensor, mine) in enumerate(held.shards):
        for other_rank, other_replica, other_tensor, theirs in held.shards[:i]:
            if tensor == other_tensor and (rank == other_rank or (replica == other_replica and mine != theirs)):
                doubled[tensor] |= mine & theirs
    in_order = dict.fromkeys(tensor for tensor, _, _, _ in held.specs)
    found = [{"tensor": tensor, "box": box} for tensor in in_order for box in boxes(doubled[tensor], shapes[tensor])]
    if found:
        raise Refused("OverlappingPlan", doubled=found)


def _move(case: Fields, held: Held, needs: Any, dtypes: Any, shapes: Any) -> Fields:
    holders = {element for memory in held.memory.values() for element in memory}
    params: dict[Any, dict[Index, Element]] = {key: {} for key in shapes}
    times: dict[Any, Counter[Index]] = {key: Counter() for key in shapes}
    wanted: dict[str, dict[Element, int]] = {coordinate["id"]: {} for coordinate in case["generator"]["coordinates"]}
    item = {need["tensor"]: ITEM.get(need["dtype"], 1) for _, need in needs}
    tensor_shapes = {tensor: shape for tensor, _, shape, _ in held.specs}
    holes: dict[str, set[Index]] = defaultdict(set)
    for c, need in needs:
        perm = need.get("perm", range(len(need["box"])))
        extra = len(need["at"]) - len(need["box"])
        for index in indices(need["box"]):
            steps = [index[dim] - need["box"][dim][0] for dim in perm]
            to = (*(lo for lo, _ in need["at"][:extra]), *(lo + step for (lo, _), step in zip(need["at"][extra:], steps, strict=True)))
            times[c, need["param"]][to] += 1
            if (need["tensor"], index) not in holders:
                holes[need["tensor"]].add(index)
            if _selected(case, need["tensor"]):
                params[c, need["param"]][to] = (need["tensor"], index)
                wanted[c][need["tensor"], index] = item[need["tensor"]]
    doubled = [
        {"coordinate": c, "param": p, "box": box} for (c, p), counts in times.items() for box in boxes({i for i, n in counts.items() if n > 1}, shapes[c, p])
    ]
    if doubled:
        raise Refused("OverlappingPlan", doubled=doubled)
    declared = [u if isinstance(u, str) else u["param"] for u in case["generator"].get("unwritten", [])]
    missing = [{"tensor": tensor, "box": box} for tensor in tensor_shapes for box in boxes(holes[tensor], tensor_shapes[tensor])]
    for (c, p), counts in times.items():
        if p not in declared:
            missing += [{"coordinate": c, "param": p, "box": box} for box in boxes(set(of_shape(shapes[c, p])) - set(counts), shapes[c, p])]
    if missing:
        raise Refused("IncompletePlan", missing=missing)
    return {
        "verdict": "ok",
        "bytes": {c: sum(found.values()) for c, found in wanted.items()},
        "params": _params(params, dtypes, shapes, tensor_shapes),
        "memory": _memory(held),
    }


def _selected(case: Fields, tensor: str) -> bool:
    subset = case.get("options", {}).get("subset", {})
    parts = [f".layers.{n}." for n in subset.get("layers", [])] + subset.get("layerGroups", [])
    everything = not subset.get("params") and not parts
    return everything or tensor in subset.get("params", []) or any(part in tensor for part in parts)


def _lookup(tensor: str, shape: Index, item: int) -> dict[Index, bytes]:
    everywhere = of_shape(shape)
    return dict(zip(everywhere, content(tensor, len(everywhere), item), strict=True))


def _params(params: Any, dtypes: Any, shapes: Any, tensor_shapes: Any) -> Fields:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    tables: dict[Any, dict[Index, bytes]] = {}
    for (c, p), elements in params.items():
        item = ITEM.get(dtypes[c, p], 1)
        digest = hashlib.sha256()
        for index in of_shape(shapes[c, p]):
            if index not in elements:
                digest.update(bytes(item))
                continue
            tensor, source = elements[index]
            if tensor not in tables:
                tables[tensor] = _lookup(tensor, tensor_shapes[tensor], item)
            digest.update(tables[tensor][source])
        found[c][p] = digest.hexdigest()
    return found


def _memory(held: Held) -> dict[str, str]:
    items = {tensor: ITEM.get(dtype, 1) for tensor, dtype, _, _ in held.specs}
    shapes = {tensor: shape for tensor, _, shape, _ in held.specs}
    tables = {tensor: _lookup(tensor, shapes[tensor], items[tensor]) for tensor in items}
    padding = bytes([0xEE]) * max(items.values(), default=1)
    return {
        str(rank): hashlib.sha256(b"".join(tables[element[0]][element[1]] if element is not None else padding for element in memory)).hexdigest()
        for rank, memory in held.memory.items()
    }

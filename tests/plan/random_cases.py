"""Random case files from a seed: trainers by rank and by role, generators that slice, fuse, stack, transpose and tie, and faults of every type.

About half of the cases are broken in one way, a few in several. Sizes are small, so that an oracle may look at single elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise, product
from math import prod
from random import Random
from typing import Any

Fields = dict[str, Any]
Ranges = list[list[int]]

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8"]


def random_case(seed: int) -> Fields:
    rng = Random(seed)
    trainer, tensors = rng.choice([_explicit, _megatron])(rng)
    case = {"kind": "RefitCase", "name": f"seed-{seed}", "trainer": trainer, "generator": _generator(rng, tensors), "options": _options(rng, list(tensors))}
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        rng.choice(FAULTS)(rng, case)
    return case


# ---------------------------------------------------------------- trainers


def _name(rng: Random, i: int) -> str:
    return rng.choice([f"model.layers.{i}.w{i}.weight", f"t{i}.weight", f"model.layers.{i % 3}.x{i}", f"embed.{i}"])


def _cuts(rng: Random, extent: int, most: int = 3) -> Ranges:
    inner = rng.sample(range(1, extent), min(extent - 1, rng.randrange(most))) if extent > 1 else []
    edges = [0, *sorted(inner), extent]
    return [[lo, hi] for lo, hi in pairwise(edges)]


def _explicit(rng: Random) -> tuple[Fields, dict[str, Fields]]:
    replicas = rng.choice([1, 1, 2, 3])
    ranks = [{"rank": 0, "replica": r % replicas, "shards": []} for r in range(rng.randint(replicas, replicas + 3))]
    for entry, number in zip(ranks, rng.sample(range(12), len(ranks)), strict=True):
        entry["rank"] = number
    tensors = {}
    for i in range(rng.randint(1, 5)):
        name, shape, dtype = _name(rng, i), [rng.randint(1, 6) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3]))], rng.choice(DTYPES)
        tensors[name] = {"shape": shape, "dtype": dtype}
        for replica in rng.sample(range(replicas), rng.randint(1, replicas)):
            for box in product(*(_cuts(rng, extent) for extent in shape)):
                mine = [entry for entry in ranks if entry["replica"] == replica]
                for entry in rng.sample(mine, 1 if rng.random() < 0.8 else rng.randint(1, len(mine))):
                    entry["shards"].append({"tensor": name, "dtype": dtype, "shape": shape, "box": copy.deepcopy(list(box))})
    for entry in ranks:
        rng.shuffle(entry["shards"])
    return {"ranks": ranks}, tensors


def _megatron(rng: Random) -> tuple[Fields, dict[str, Fields]]:
    etp = rng.choice([1, 1, 2])
    sizes = {"tp": etp * rng.choice([1, 1, 2]), "pp": rng.choice([1, 1, 2]), "ep": rng.choice([1, 1, 2, 3]), "etp": etp, "dp": rng.choice([1, 1, 2])}
    tp, pp, ep = sizes["tp"], sizes["pp"], sizes["ep"]
    modules: list[Fields] = []
    tensors: dict[str, Fields] = {}
    dtype = rng.choice(DTYPES)

    def hold(name: str, *shape: int) -> str:
        tensors[name] = {"shape": list(shape), "dtype": dtype}
        return name

    for i in range(rng.randint(1, 5)):
        at, hidden = f"model.layers.{i}", rng.randint(1, 4)
        role = rng.choice(["embedding", "output", "tied", "qkv", "qkv", "column", "row", "replicated", "gatedMlp", "experts"])
        module: Fields = {"role": role}
        if role in ("embedding", "output", "tied"):
            vocab = rng.randint(1, 9)
            padded = -(-(vocab + rng.choice([0, 0, 1, 5])) // tp) * tp
            module |= {"hf": hold(f"{at}.words", vocab, hidden), "vocab": vocab, "vocabPadded": padded, "hidden": hidden}
            if role == "tied":
                module["role"] = "embedding"
                modules.append({**module, "role": "output", "tied": True, "stage": rng.randrange(pp)})
        elif role == "qkv":
            kv, per, dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([1, 2, 4]) * tp
            names = [hold(f"{at}.{n}", heads * dim, hidden) for n, heads in zip("qkv", (kv * per, kv, kv), strict=True)]
            module |= {"hf": names, "qHeads": kv * per, "kvHeads": kv, "headDim": dim, "hidden": hidden}
            if rng.random() < 0.4:
                module |= {"bias": True, "hfBias": [hold(f"{n}.bias", tensors[n]["shape"][0]) for n in names]}
        elif role in ("column", "row", "replicated"):
            shape = [rng.randint(1, 3) * tp, rng.randint(1, 3) * tp][: rng.choice([1, 2, 2])]
            module |= {"hf": hold(f"{at}.{role}", *shape), "shape": shape}
        elif role == "gatedMlp":
            shape = [rng.randint(1, 3) * tp, hidden]
            module |= {"hf": [hold(f"{at}.gate", *shape), hold(f"{at}.up", *shape)], "shape": shape}
        else:
            module |= _experts(rng, at, hidden, ep, etp, hold)
        if "order" not in module and role in ("qkv", "gatedMlp", "experts") and rng.random() < 0.2:
            module["order"] = "perGroup" if role == "qkv" else "gateUp"
        modules.append({**module, "stage": rng.randrange(pp)})
    rng.shuffle(modules)
    return {"megatron": {**{k: v for k, v in sizes.items() if v > 1 or rng.random() < 0.5}, "dtype": dtype}, "modules": modules}, tensors


def _experts(rng: Random, at: str, hidden: int, ep: int, etp: int, hold: Callable[..., str]) -> Fields:
    count, ffn = rng.randint(1, 3) * ep, rng.randint(1, 2) * etp
    kind = rng.choice(["linear", "roundRobin", "listed"])
    listed: list[list[int]] = [[] for _ in range(ep)]
    for expert in range(count):
        for which in rng.sample(range(ep), 1 if rng.random() < 0.8 else rng.randint(1, ep)):
            listed[which].append(expert)
    for expert in range(count):
        hold(f"{at}.e{expert}.gate", ffn, hidden)
        hold(f"{at}.e{expert}.up", ffn, hidden)
        hold(f"{at}.e{expert}.down", hidden, ffn)
    names = {name: f"{at}.e{{e}}.{name}" for name in ("gate", "up", "down")}
    return {"hf": names, "experts": count, "ffn": ffn, "hidden": hidden, "map": listed if kind == "listed" else kind}


# ---------------------------------------------------------------- generators


def _generator(rng: Random, tensors: dict[str, Fields]) -> Fields:
    count = rng.choice([1, 1, 2, 2, 3, 4])
    unwritten: list[Any] = []
    coordinates = [{"id": f"c{i}", "needs": []} for i in range(count)]
    plan = [
        (name, rng.choice([_whole, _sliced, _sliced, _boxes, _turned, _padded, _tied, _fused]))
        for name in rng.sample(list(tensors), rng.randint(1, len(tensors)))
    ]
    for i, coordinate in enumerate(coordinates):
        for name, style in plan:
            if rng.random() < 0.9:
                coordinate["needs"] += style(rng, name, tensors, i, count, unwritten)
        rng.shuffle(coordinate["needs"])
    if rng.random() < 0.1:
        unwritten.append({"param": "rotary.inv_freq", "paramShape": [rng.randint(1, 4)], "dtype": "float32"})
    return {"coordinates": coordinates, **({"unwritten": unwritten} if unwritten or rng.random() < 0.1 else {})}


def _need(name: str, tensor: Fields, box: Ranges, param: str, shape: list[int], at: Ranges) -> Fields:
    return {"tensor": name, "box": box, "param": param, "paramShape": shape, "dtype": tensor["dtype"], "at": at}


def _full(shape: list[int]) -> Ranges:
    return [[0, extent] for extent in shape]


def _whole(rng: Random, name: str, tensors: dict[str, Fields], i: int, count: int, unwritten: list[Any]) -> list[Fields]:
    shape = tensors[name]["shape"]
    extra = [1] * rng.choice([0, 0, 1, 2])
    return [_need(name, tensors[name], _full(shape), name, [*extra, *shape], _full([*extra, *shape]))]


def _sliced(rng: Random, name: str, tensors: dict[str, Fields], i: int, count: int, unwritten: list[Any]) -> list[Fields]:
    """A part along one dim, as tensor parallelism cuts it; uneven where it does not divide."""
    shape = tensors[name]["shape"]
    dims = [dim for dim, extent in enumerate(shape) if extent >= count]
    if not dims:
        return _whole(rng, name, tensors, i, count, unwritten)
    dim = dims[0] if rng.random() < 0.5 else dims[-1]
    lo, hi = shape[dim] * i // count, shape[dim] * (i + 1) // count
    box = [[lo, hi] if d == dim else [0, extent] for d, extent in enumerate(shape)]
    local = [b - a for a, b in box]
    return [_need(name, tensors[name], box, name, local, _full(local))]


def _boxes(rng: Random, name: str, tensors: dict[str, Fields], i: int, count: int, unwritten: list[Any]) -> list[Fields]:
    """A random box, in parts that fill the parameter."""
    shape = tensors[name]["shape"]
    outer = [sorted(rng.sample(range(extent + 1), 2)) for extent in shape]
    local = [hi - lo for lo, hi in outer]
    needs = []
    for at in product(*(_cuts(rng, extent) for extent in local)):
        box = [[lo + a, lo + b] for (lo, _), (a, b) in zip(outer, at, strict=True)]
        needs.append(_need(name, tensors[name], box, name, local, copy.deepcopy(list(at))))
    return needs


def _turned(rng: Random, name: str, tensors: dict[str, Fields], i: int, count: int, unwritten: list[Any]) -> list[Fields]:
    shape = tensors[name]["shape"]
    perm = rng.sample(range(len(shape)), len(shape))
    turned = [shape[dim] for dim in perm]
    return [{**_need(name, tensors[name], _full(shape), name, turned, _full(turned)), "perm": perm}]


def _padded(rng: Random, name: str, tensors: dict[str, Fields], i: int, count: int, unwritten: list[Any]) -> list[Fields]:
    """A parameter with more rows than are written, declared."""
    shape = tensors[name]["shape"]
    if not shape:
        return _whole(rng, name, tensors, i, count, unwritten)
    unwritten.append(name)
    start = rng.randint(0, 2)
    param = [shape[0] + start + rng.randint(0, 2), *shape[1:]]
    return [_need(name, tensors[name], _full(shape), name, param, [[start, start + shape[0]], *_full(shape[1:])])]


def _tied(rng: Random, name: str, tensors: dict[str, Fields], i: int, count: int, unwritten: list[Any]) -> list[Fields]:
    one = _sliced(rng, name, tensors, i, count, unwritten)
    return one + [{**need, "param": f"{need['param']}.again"} for need in copy.deepcopy(one)]


def _fused(rng: Random, name: str, tensors: dict[str, Fields], i: int, count: int, unwritten: list[Any]) -> list[Fields]:
    """Several tensors in one parameter: rows after rows, or stacked along an extra dim."""
    tensor = tensors[name]
    shape = tensor["shape"]
    alike = [n for n, t in tensors.items() if t["dtype"] == tensor["dtype"] and t["shape"] == shape]
    members = rng.sample(alike, rng.randint(1, len(alike)))
    if not shape or rng.random() < 0.4:
        param = [len(members), *shape]
        return [_need(n, tensors[n], _full(shape), f"{name}.fused", param, [[k, k + 1], *_full(shape)]) for k, n in enumerate(members)]
    param = [len(members) * shape[0], *shape[1:]]
    rows = [[k * shape[0], (k + 1) * shape[0]] for k in range(len(members))]
    return [_need(n, tensors[n], _full(shape), f"{name}.fused", param, [rows[k], *_full(shape[1:])]) for k, n in enumerate(members)]


def _options(rng: Random, names: list[str]) -> Fields:
    options: Fields = {}
    if rng.random() < 0.5:
        options["redundancy"] = rng.randint(1, 3)
    if rng.random() < 0.3:
        options["chunkBytes"] = rng.choice([1, 7, 64, 1 << 20])
    if rng.random() < 0.3:
        subset: Fields = {"params": rng.sample(names, rng.randint(0, 1)), "layers": rng.sample(range(5), rng.randint(0, 2))}
        options["subset"] = subset | ({"layerGroups": [rng.choice([".gate", "words", "nothing", ".w"])]} if rng.random() < 0.5 else {})
    return options


# ---------------------------------------------------------------- faults: each changes a case in place, if it has what to change


def _any_need(rng: Random, case: Fields) -> Fields | None:
    needs = [need for coordinate in case["generator"]["coordinates"] for need in coordinate["needs"]]
    return rng.choice(needs) if needs else None


def _any_shards(rng: Random, case: Fields) -> list[Fields]:
    lists = [entry["shards"] for entry in case["trainer"].get("ranks", []) if entry["shards"]]
    return rng.choice(lists) if lists else []


def _drop_shard(rng: Random, case: Fields) -> None:
    shards = _any_shards(rng, case)
    if shards:
        shards.pop(rng.randrange(len(shards)))


def _repeat_shard(rng: Random, case: Fields) -> None:
    shards = _any_shards(rng, case)
    if shards:
        rng.choice(case["trainer"]["ranks"])["shards"].append(copy.deepcopy(rng.choice(shards)))


def _move_edge(rng: Random, box: Ranges) -> None:
    if box:
        side = rng.choice(box)
        end = rng.randrange(2)
        side[end] = max(0, side[end] + rng.choice([-1, 1]))
        if side[0] >= side[1]:
            side[1] = side[0] + 1


def _bend_shard(rng: Random, case: Fields) -> None:
    shards = _any_shards(rng, case)
    if shards:
        _move_edge(rng, rng.choice(shards)["box"])


def _bend_need(rng: Random, case: Fields) -> None:
    need = _any_need(rng, case)
    if need:
        for which in rng.choice([["box"], ["at"], ["box", "at"]]):
            _move_edge(rng, need[which])


def _drop_need(rng: Random, case: Fields) -> None:
    coordinate = rng.choice(case["generator"]["coordinates"])
    if coordinate["needs"]:
        coordinate["needs"].pop(rng.randrange(len(coordinate["needs"])))


def _repeat_need(rng: Random, case: Fields) -> None:
    need = _any_need(rng, case)
    if need:
        rng.choice(case["generator"]["coordinates"])["needs"].append(copy.deepcopy(need))


def _other_tensor(rng: Random, case: Fields) -> None:
    need = _any_need(rng, case)
    if need:
        need["tensor"] = rng.choice(["nobody.weight", need["tensor"]])


def _other_dtype(rng: Random, case: Fields) -> None:
    shards = _any_shards(rng, case)
    target = rng.choice(shards) if shards and rng.random() < 0.5 else _any_need(rng, case)
    if target:
        target["dtype"] = rng.choice(DTYPES)


def _other_shape(rng: Random, case: Fields) -> None:
    shards = _any_shards(rng, case)
    need = _any_need(rng, case)
    if shards and rng.random() < 0.5:
        shard = rng.choice(shards)
        shard["shape"] = [extent + rng.randint(0, 1) for extent in shard["shape"]]
    elif need:
        need["paramShape"] = [max(1, extent + rng.choice([-1, 0, 1])) for extent in need["paramShape"]] + ([1] if rng.random() < 0.1 else [])


def _other_sizes(rng: Random, case: Fields) -> None:
    sizes = case["trainer"].get("megatron")
    if sizes:
        axis = rng.choice(["tp", "pp", "ep", "etp", "dp"])
        sizes[axis] = max(1, sizes.get(axis, 1) + rng.choice([-1, 1]))


def _other_module(rng: Random, case: Fields) -> None:
    modules = case["trainer"].get("modules")
    if not modules:
        return
    module = rng.choice(modules)
    numbers = [name for name, value in module.items() if type(value) is int]
    change = rng.choice(["number", "number", "order", "role", "stage", "twice", "map", "drop"])
    if change == "number" and numbers:
        name = rng.choice(numbers)
        module[name] = max(0 if name == "stage" else 1, module[name] + rng.choice([-1, 1]))
    elif change == "order" and module["role"] in ("qkv", "gatedMlp", "experts"):
        module["order"] = rng.choice(["upGate", "gateUp", "perGroup", "interleaved"])
    elif change == "role":
        module["role"] = rng.choice(["mamba", "router"])
    elif change == "stage":
        module["stage"] = rng.randint(0, 3)
    elif change == "twice":
        modules.append(copy.deepcopy(module))
    elif change == "map" and isinstance(module.get("map"), list) and module["map"]:
        ids = rng.choice(module["map"])
        rng.choice([lambda: ids.append(rng.randint(-1, 6)), lambda: ids.clear(), lambda: module["map"].append([0])])()
    elif change == "drop":
        modules.remove(module)


def _undeclare(rng: Random, case: Fields) -> None:
    case["generator"].pop("unwritten", None)


def _declare(rng: Random, case: Fields) -> None:
    need = _any_need(rng, case)
    if need:
        shape = [extent + rng.choice([0, 0, 0, 1]) for extent in need["paramShape"]]
        dtype = rng.choice([need["dtype"], need["dtype"], "int8"])
        case["generator"].setdefault("unwritten", []).append({"param": need["param"], "paramShape": shape, "dtype": dtype})


def _other_replica(rng: Random, case: Fields) -> None:
    ranks = case["trainer"].get("ranks")
    if ranks:
        rng.choice(ranks)["replica"] = rng.randint(0, 2)


FAULTS = [
    _drop_shard, _repeat_shard, _bend_shard, _bend_need, _bend_need, _drop_need, _repeat_need, _other_tensor, _other_dtype, _other_shape,
    _other_sizes, _other_module, _other_module, _undeclare, _declare, _other_replica,
]  # fmt: skip


def elements(case: Fields) -> int:
    """Of all parameters: how much an oracle has to look at."""
    return sum(prod(need["paramShape"]) for coordinate in case["generator"]["coordinates"] for need in coordinate["needs"])

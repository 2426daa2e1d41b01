"""The bytes of a case: what every tensor contains, and what every rank's memory holds, built the way Megatron builds it.

Fused memory is made whole and then sliced, without the pieces of `roles`: reading tensors back through the pieces checks one against the other.

Invariant: content does not depend on dtype. An array here is uint8 of shape (*shape, item bytes), so bytes move whatever their dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray
from refit_api.tensors import Box, Dtype, Shape

from refit_runtime.plan.cases.file import Case, Experts, Gated, Heads, Megatron, Module, Plain, Vocabulary
from refit_runtime.plan.cases.layout import Holding, Place, RankMemory

Bytes = NDArray[np.uint8]
PADDING = 0xEE


def fill(tensor: str, dtype: Dtype, shape: Shape) -> Bytes:
    """The whole tensor: splitmix64 of its words, seeded by its name."""
    total = prod(shape) * dtype.bytes
    seed = int.from_bytes(hashlib.sha256(tensor.encode()).digest()[:8], "little")
    words = np.arange(-(-total // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    return words.astype("<u8").view(np.uint8)[:total].reshape(*shape, dtype.bytes)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


def rank_bytes(case: Case, memory: RankMemory) -> list[Bytes]:
    """Of each holding."""
    contents = {}
    if isinstance(case.trainer, Megatron):
        for number in dict.fromkeys(holding.module for holding in memory.holdings):
            if number is not None:
                place = next(holding.place for holding in memory.holdings if holding.module == number)
                contents[number] = iter(_module(case.trainer.modules[number], case.trainer, place or Place(0, 0)))
    return [next(contents[holding.module]) if holding.module is not None else by_pieces(holding) for holding in memory.holdings]


def by_pieces(holding: Holding) -> Bytes:
    """The same memory, put together from its pieces."""
    memory = np.full((*holding.shape, holding.dtype.bytes), PADDING, np.uint8)
    for piece in holding.pieces:
        memory[index(piece.local)] = fill(piece.tensor, holding.dtype, piece.shape)[index(piece.box)]
    return memory


def _module(module: Module, trainer: Megatron, place: Place) -> list[Bytes]:
    """The parameters of one rank, in the order of its memory."""
    body, sizes = module.body, trainer.sizes

    def content(name: str, *shape: int) -> Bytes:
        return fill(name, sizes.dtype, shape)

    def mine(whole: Bytes, axis: int = 0) -> Bytes:
        return np.split(whole, sizes.tp, axis)[place.t]

    if isinstance(body, Vocabulary):
        padding = np.full((body.padded - body.vocab, body.hidden, sizes.dtype.bytes), PADDING, np.uint8)
        return [mine(np.concatenate([content(body.hf, body.vocab, body.hidden), padding]))]
    if isinstance(body, Heads):
        return [mine(_by_group(names, body, columns, content)) for names, columns in ((body.hf, (body.hidden,)), (body.bias, ())) if names]
    if isinstance(body, Gated):
        return [np.concatenate([mine(content(name, *body.shape)) for name in body.hf])]
    if isinstance(body, Experts):
        return _experts(body, trainer, place, content)
    assert isinstance(body, Plain)
    whole = content(body.hf, *body.shape)
    axis = {"column": 0, "row": 1}.get(module.role)
    return [whole if axis is None or (axis == 1 and len(body.shape) == 1) else mine(whole, axis)]


def _by_group(names: tuple[str, ...], heads: Heads, columns: Shape, content: Callable[..., Bytes]) -> Bytes:
    """For each KV group: its queries, its K, its V."""
    bands = []
    for name, count in zip(names, (heads.q, heads.kv, heads.kv), strict=True):
        rows = content(name, count * heads.dim, *columns)
        bands.append(rows.reshape(heads.kv, -1, *rows.shape[1:]))
    fused = np.concatenate(bands, axis=1)
    return fused.reshape(-1, *fused.shape[2:])


def _experts(body: Experts, trainer: Megatron, place: Place, content: Callable[..., Bytes]) -> list[Bytes]:
    sizes, found = trainer.sizes, []
    for expert in range(body.experts):
        if body.map == "linear":
            local = expert * sizes.ep // body.experts == place.e
        else:
            local = expert % sizes.ep == place.e if isinstance(body.map, str) else expert in body.map[place.e]
        if local:
            gate, up, down = body.named(expert)
            halves = [np.split(content(name, body.ffn, body.hidden), sizes.etp)[place.t % sizes.etp] for name in (gate, up)]
            found += [np.concatenate(halves), np.split(content(down, body.hidden, body.ffn), sizes.etp, 1)[place.t % sizes.etp]]
    return found

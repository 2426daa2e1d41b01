"""Which part of a checkpoint tensor each part of a rank's memory is, by the role of the module that holds it.

The one statement of Megatron's layouts: the adapter for live models and the case files both build on it. A rank is given by its place on the axis that
cuts the module (`rank` of `ranks`); nothing reads a process group. Names, sizes and maps are facts of the model: what does not divide is refused here.

    role             memory of a rank                                            function
    column           rows of dim 0 (of a weight, or of its bias)                 column
    row              columns of dim 1 of a weight; its bias is whole             row
    replicated       everything                                                  replicated
    embedding, head  rows of the padded vocabulary; padding is no tensor         vocabulary
    qkv              rows of the fused tensor: for each KV group its query       qkv
                     rows, its K rows, its V rows; the bias by the same rows
    gated MLP        gate rows, then the same up rows                            gated
    experts          linear, round-robin or listed ids, each cut over ETP        local_experts, then gated (fc1) and row (fc2)

Invariant: the pieces of all ranks together hold each element of a tensor once, and the pieces of a rank lie in its memory in the order returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Box, Shape, whole


@dataclass(frozen=True, slots=True)
class Piece:
    """`memory[local]` of a parameter on this rank is `box` of a tensor of `shape`; both boxes have the same extents."""

    tensor: str
    shape: Shape
    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class Band:
    """Rows `local` of fused memory are rows `rows` of tensor number `which` (qkv: q, k, v; gated MLP: gate, up)."""

    which: int
    rows: tuple[int, int]
    local: tuple[int, int]


def part(what: str, extent: int, rank: int, ranks: int) -> tuple[int, int]:
    """One of the equal parts of an extent; `what` names it in a refusal."""
    if extent % ranks:
        raise UnsupportedLayout(f"{what}: {extent} is not divisible by {ranks} ranks; choose sizes that divide", seen=extent, expected=f"a multiple of {ranks}")
    return rank * (extent // ranks), (rank + 1) * (extent // ranks)


def sliced(tensor: str, shape: Shape, dim: int, rank: int, ranks: int) -> Piece:
    """One of the equal parts along a dim."""
    if dim >= len(shape):
        raise UnsupportedLayout(f"{tensor}: shape {list(shape)} has no dim {dim} to cut", tensor=tensor, seen=list(shape))
    lo, hi = part(f"{tensor}, dim {dim}", shape[dim], rank, ranks)
    rest = whole(shape)
    return Piece(tensor, shape, (*rest[:dim], (lo, hi), *rest[dim + 1 :]), (*rest[:dim], (0, hi - lo), *rest[dim + 1 :]))


def replicated(tensor: str, shape: Shape) -> Piece:
    return Piece(tensor, shape, whole(shape), whole(shape))


def column(tensor: str, shape: Shape, rank: int, ranks: int) -> Piece:
    return sliced(tensor, shape, 0, rank, ranks)


def row(tensor: str, shape: Shape, rank: int, ranks: int) -> Piece:
    """The bias of a row-parallel module is added after its sum over the ranks: every rank holds all of it."""
    return replicated(tensor, shape) if len(shape) == 1 else sliced(tensor, shape, 1, rank, ranks)


def vocabulary_rows(what: str, vocab: int, padded: int, rank: int, ranks: int) -> tuple[tuple[int, int] | None, int]:
    """The words that this rank holds (None: padding only), and how many rows its memory has."""
    if padded < vocab:
        raise UnsupportedLayout(f"{what}: a vocabulary of {vocab} words does not fit into {padded} rows", seen=padded, expected=f"at least {vocab}")
    lo, hi = part(f"{what}, padded vocabulary", padded, rank, ranks)
    return ((lo, min(hi, vocab)) if lo < vocab else None), hi - lo


def vocabulary(tensor: str, vocab: int, padded: int, hidden: int, rank: int, ranks: int) -> tuple[Piece, ...]:
    """The words first in memory, padding after them."""
    words, _ = vocabulary_rows(tensor, vocab, padded, rank, ranks)
    if words is None:
        return ()
    return (Piece(tensor, (vocab, hidden), (words, (0, hidden)), ((0, words[1] - words[0]), (0, hidden))),)


def qkv_bands(what: str, q_heads: int, kv_heads: int, head_dim: int, rank: int, ranks: int) -> tuple[Band, ...]:
    """The rows of q (0), k (1) and v (2) that lie in this rank's rows of the fused tensor; a cut may fall inside a head."""
    if q_heads % kv_heads:
        raise UnsupportedLayout(f"{what}: {q_heads} query heads are not divisible by {kv_heads} KV heads", seen=q_heads, expected=f"a multiple of {kv_heads}")
    sizes = (q_heads // kv_heads * head_dim, head_dim, head_dim)
    lo, hi = part(f"{what}, fused rows", kv_heads * sum(sizes), rank, ranks)
    bands = []
    for group in range(lo // sum(sizes), -(-hi // sum(sizes))):
        start = group * sum(sizes)
        for which, size in enumerate(sizes):
            first, last = max(lo, start), min(hi, start + size)
            if first < last:
                offset = group * size - start
                bands.append(Band(which, (first + offset, last + offset), (first - lo, last - lo)))
            start += size
    return tuple(bands)


def qkv(names: Sequence[str], q_heads: int, kv_heads: int, head_dim: int, hidden: int | None, rank: int, ranks: int) -> tuple[Piece, ...]:
    """`names` of q, k, v; without `hidden` it is the bias."""
    shapes = [(heads * head_dim, *_columns(hidden)) for heads in (q_heads, kv_heads, kv_heads)]
    return _pieces(names, shapes, qkv_bands(names[0], q_heads, kv_heads, head_dim, rank, ranks))


def gated_bands(what: str, rows: int, rank: int, ranks: int) -> tuple[Band, Band]:
    """Gate (0), then the same rows of up (1); `rows` are those of each."""
    lo, hi = part(f"{what}, rows", rows, rank, ranks)
    return Band(0, (lo, hi), (0, hi - lo)), Band(1, (lo, hi), (hi - lo, 2 * (hi - lo)))


def gated(names: Sequence[str], shape: Shape, rank: int, ranks: int) -> tuple[Piece, ...]:
    """`names` of gate and up, `shape` of each."""
    if not shape:
        raise UnsupportedLayout(f"{names[0]}: a scalar has no rows to cut", tensor=names[0])
    return _pieces(names, [shape, shape], gated_bands(names[0], shape[0], rank, ranks))


def local_experts(what: str, experts: int, map_: str | Sequence[Sequence[int]], rank: int, ranks: int) -> tuple[int, ...]:
    """Global ids of the experts of an EP rank, in the order of its memory. `map_`: linear, roundRobin, or the ids of each EP rank."""
    if map_ == "linear":
        return tuple(range(*part(f"{what}, experts", experts, rank, ranks)))
    if map_ == "roundRobin":
        return tuple(range(rank, experts, ranks))
    if isinstance(map_, str):
        raise UnsupportedLayout(f"{what}: unknown expert map {map_}; use linear, roundRobin or a list of ids for each rank", seen=map_)
    if len(map_) != ranks:
        raise UnsupportedLayout(f"{what}: the expert map has {len(map_)} entries for {ranks} expert-parallel ranks", seen=len(map_), expected=ranks)
    listed = {expert for ids in map_ for expert in ids}
    wrong = sorted(listed ^ set(range(experts)))
    if wrong:
        raise UnsupportedLayout(f"{what}: experts missing from the map, or out of range: {wrong}", seen=wrong, expected=f"each of 0 to {experts - 1}")
    twice = [which for which, ids in enumerate(map_) if len(set(ids)) < len(ids)]
    if twice:
        raise UnsupportedLayout(f"{what}: expert-parallel rank {twice[0]} lists an expert twice", seen=list(map_[twice[0]]))
    return tuple(sorted(map_[rank]))


def _columns(hidden: int | None) -> Shape:
    return () if hidden is None else (hidden,)


def _pieces(names: Sequence[str], shapes: Sequence[Shape], bands: Sequence[Band]) -> tuple[Piece, ...]:
    columns = whole(shapes[0][1:])
    return tuple(Piece(names[band.which], shapes[band.which], (band.rows, *columns), (band.local, *columns)) for band in bands)

"""The two kernels of the data plane on CUDA: tiles are copied, blocks are digested. What they compute is said in `cuda_tiles` and `digest`.

Sizes and keys change with every version, so nothing is compiled for their values: a warm round compiles nothing.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton gives the arguments their types.

from __future__ import annotations

import triton
import triton.language as tl

from refit_runtime.digest import BLOCK, FIRST, SECOND

WORDS, MASK = tl.constexpr(BLOCK // 8), tl.constexpr((1 << 64) - 1)
PHI, MIX_A, A_LEFT, A_RIGHT = (tl.constexpr(value) for value in FIRST)
PSI, MIX_B, B_LEFT, B_RIGHT = (tl.constexpr(value) for value in SECOND)
SLICE, LANES, DIGEST_WARPS = 1 << 14, 1 << 9, 4  # words of a program, of a step
COPY_WARPS = 4


@triton.jit
def copy_tiles(
    table, fields: tl.constexpr, to_type: tl.constexpr, from_type: tl.constexpr, vector: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
    strided: tl.constexpr,
):  # fmt: skip
    """A program copies a tile, with the cast."""
    at = table + tl.program_id(0).to(tl.int64) * fields
    target, source = tl.load(at), tl.load(at + 1)
    rows, columns = tl.load(at + 2), tl.multiple_of(tl.load(at + 3), vector)
    to_row, from_row = tl.multiple_of(tl.load(at + 4), vector), tl.multiple_of(tl.load(at + 5), vector)
    row, column = tl.arange(0, tile_rows)[:, None].to(tl.int64), tl.arange(0, tile_columns)[None, :].to(tl.int64)
    inside = (row < rows) & (column < columns)
    to_column, from_column = column, column
    if strided:
        to_column, from_column = column * tl.load(at + 6), column * tl.load(at + 7)
    sources = source.to(tl.pointer_type(from_type)) + row * from_row + from_column
    targets = target.to(tl.pointer_type(to_type)) + row * to_row + to_column
    if vector > 1:  # addresses come from memory: only the table's maker knows what they are multiples of
        sources = tl.multiple_of(tl.max_contiguous(sources, (1, tile_columns)), (1, 16))
        targets = tl.multiple_of(tl.max_contiguous(targets, (1, tile_columns)), (1, 16))
    tl.store(targets, tl.load(sources, mask=inside).to(to_type), mask=inside)


@triton.jit(do_not_specialize=["size", "k0", "k1"])
def digest_blocks(data, sums, size: tl.int64, k0: tl.uint64, k1: tl.uint64, slice_: tl.constexpr, lanes: tl.constexpr):
    """A program adds what the words of a slice give to the sums of its block; the first slice of a block adds what its length gives.

    Bound by the integer units as much as by memory: keys grow by a constant, as a multiplication for each word would cost a tenth of the speed.
    """
    part = tl.program_id(0).to(tl.int64)
    block, first = part // (WORDS // slice_), part % (WORDS // slice_) * slice_
    words = data.to(tl.pointer_type(tl.int64)) + block * WORDS + first
    left = size - (block * WORDS + first) * 8
    lane = tl.arange(0, lanes)
    place = (first + lane + 1).to(tl.uint64)
    key_a, key_b = place * PHI + k0, place * PSI
    a, b = tl.zeros([lanes], tl.uint64), tl.zeros([lanes], tl.uint64)
    if left >= slice_ * 8:
        for at in tl.range(0, slice_, lanes, loop_unroll_factor=4):
            word = tl.load(words + at + lane, eviction_policy="evict_first").to(tl.uint64, bitcast=True)
            a += mixed(word + key_a, MIX_A, A_LEFT, A_RIGHT)
            b += mixed(word ^ key_b ^ k1, MIX_B, B_LEFT, B_RIGHT)
            key_a += (lanes * PHI) & MASK
            key_b += (lanes * PSI) & MASK
    else:
        for at in range(0, slice_, lanes):
            there = left - (at + lane).to(tl.int64) * 8
            word = tl.load(words + at + lane, mask=there > 0, other=0).to(tl.uint64, bitcast=True)
            beyond = tl.minimum(tl.maximum(8 - there, 0), 7).to(tl.uint64) * 8
            word = (word << beyond) >> beyond
            a += tl.where(there > 0, mixed(word + key_a, MIX_A, A_LEFT, A_RIGHT), 0)
            b += tl.where(there > 0, mixed(word ^ key_b ^ k1, MIX_B, B_LEFT, B_RIGHT), 0)
            key_a += (lanes * PHI) & MASK
            key_b += (lanes * PSI) & MASK
    total_a, total_b = tl.sum(a), tl.sum(b)
    if first == 0:
        length = tl.minimum(left, WORDS * 8).to(tl.uint64)
        total_a += mixed(length + k1, MIX_A, A_LEFT, A_RIGHT)
        total_b += mixed(length ^ k0, MIX_B, B_LEFT, B_RIGHT)
    tl.atomic_add(sums + 2 * block, total_a.to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + 2 * block + 1, total_b.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def mixed(x, factor: tl.constexpr, left: tl.constexpr, right: tl.constexpr):
    x = (x ^ (x >> left)) * factor
    return x ^ (x >> right)

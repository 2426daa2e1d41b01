"""Two different contents never have one digest: whatever an error of memory, of the wire or of a plan can do to bytes is tried, and compared pairwise.

The peers' sums were blind to swaps; these are the swaps, and what else keeps a sum, an xor or a multiset of words as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from refit_runtime.digest import BLOCK, Digests, root, run_root

from tests.examples import examples

Bytes = NDArray[np.uint8]
DIGESTS = Digests("00000000-0000-0000-0000-000000000001", 7)
WORDS = 96


def _random(seed: int, size: int = WORDS * 8) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def _bf16(rows: int, columns: int) -> Bytes:
    """Random bf16 as training leaves it: the upper halves of floats."""
    return (np.random.default_rng(5).standard_normal((rows, columns)).astype("<f4").view("<u4") >> 16).astype("<u2").reshape(-1).view(np.uint8)


def _flips(data: Bytes) -> Iterator[Bytes]:
    for at in range(data.size * 8):
        other = data.copy()
        other[at // 8] ^= 1 << at % 8
        yield other


def _the_same_bit_of_two_words(data: Bytes) -> Iterator[Bytes]:
    for one, two in combinations(range(WORDS), 2):
        other = data.copy()
        other[[8 * one + 7, 8 * two + 7]] ^= 0x80  # the top bits cancel in a sum modulo 2^64, and in an xor
        yield other


def _one_more_and_one_less(data: Bytes) -> Iterator[Bytes]:
    words = data.view("<u8")
    for one, two in combinations(range(WORDS), 2):
        other = words.copy()
        other[one : one + 1] += np.uint64(1)
        other[two : two + 1] -= np.uint64(1)
        yield other.view(np.uint8)


def _swapped_words(data: Bytes) -> Iterator[Bytes]:
    words = data.view("<u8")
    for one, two in combinations(range(WORDS), 2):
        if words[one] != words[two]:
            other = words.copy()
            other[[one, two]] = words[[two, one]]
            yield other.view(np.uint8)


def _moved_words(data: Bytes) -> Iterator[Bytes]:
    """Rotated, and by bytes that are no words."""
    return (np.roll(data, shift) for shift in range(1, data.size) if not np.array_equal(np.roll(data, shift), data))


def _truncated(data: Bytes) -> Iterator[Bytes]:
    for size in range(data.size):
        yield data[:size]
        if data[size - 1 :].any():
            yield np.concatenate([data[: max(0, size - 1)], np.zeros(data.size - max(0, size - 1), np.uint8)])


def _longer_by_zeros(data: Bytes) -> Iterator[Bytes]:
    return (np.concatenate([data, np.zeros(more, np.uint8)]) for more in range(1, 65))


CHANGES: list[Callable[[Bytes], Iterator[Bytes]]] = [
    _flips, _the_same_bit_of_two_words, _one_more_and_one_less, _swapped_words, _moved_words, _truncated, _longer_by_zeros,
]  # fmt: skip
CONTENTS = {
    "random": _random(1),
    "zeros": np.zeros(WORDS * 8, np.uint8),
    "ones": np.full(WORDS * 8, 255, np.uint8),
    "counting": np.arange(WORDS * 2, dtype="<i4").view(np.uint8),
    "bf16": _bf16(4, WORDS),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_no_change_of_a_block_goes_unseen(content: Bytes, change: Callable[[Bytes], Iterator[Bytes]]) -> None:
    """Nor are two changed contents taken for each other."""
    seen = {content.tobytes(): DIGESTS.of(content)} | {other.tobytes(): DIGESTS.of(other) for other in change(content)}
    assert len(set(seen.values())) == len(seen), "as many digests as contents"
    assert content.tobytes() in seen


def test_zero_blocks_of_all_lengths_differ() -> None:
    zeros = np.zeros(4096, np.uint8)
    digests = {DIGESTS.of(zeros[:size]) for size in range(4097)} | {DIGESTS.of(np.zeros(size, np.uint8)) for size in (BLOCK - 8, BLOCK - 1, BLOCK)}
    assert len(digests) == 4100


@examples(40)
@given(seed=st.integers(0, 1 << 30), dim=st.integers(0, 1), shape=st.sampled_from([(512, 4), (64, 64), (8, 2048)]))
def test_permuted_rows_and_columns_differ(seed: int, dim: int, shape: tuple[int, int]) -> None:
    """Rows, and columns two at a time, so that words move whole."""
    data = _bf16(*shape).view("<u2").reshape(shape)
    units = data if dim == 0 else data.reshape(shape[0], -1, 2).transpose(1, 0, 2)
    order = np.random.default_rng(seed).permutation(len(units))
    moved = units[order]
    moved = np.ascontiguousarray(moved if dim == 0 else moved.transpose(1, 0, 2).reshape(shape))
    if not np.array_equal(moved, data):
        assert DIGESTS.of(moved.reshape(-1).view(np.uint8)) != DIGESTS.of(data.reshape(-1).view(np.uint8))


@examples(10)
@given(one=st.integers(0, 3), two=st.integers(0, 3), tail=st.integers(1, BLOCK))
def test_swapped_blocks_give_another_run_root(one: int, two: int, tail: int) -> None:
    """A block's digest says nothing of its place in the run: the root does."""
    data = _random(2, 4 * BLOCK + tail)
    blocks = [DIGESTS.of(data[at : at + BLOCK]) for at in range(0, data.size, BLOCK)]
    assert b"".join(blocks) == DIGESTS.of(data)
    swapped = list(blocks)
    swapped[one], swapped[two] = blocks[two], blocks[one]
    assert (run_root(b"".join(swapped)) == run_root(b"".join(blocks))) == (one == two)


def test_swapped_tensors_of_equal_size_differ() -> None:
    """Within a block and over its borders: what a plan with two names exchanged would move."""
    for size in (64, 1000, BLOCK // 2, BLOCK, BLOCK + 4096):
        one, two = _random(3, size), _random(4, size)
        first, second = (DIGESTS.of(np.concatenate(order)) for order in ((one, two), (two, one)))
        assert run_root(first) != run_root(second)


def test_no_other_group_or_version_has_the_same_digests() -> None:
    data = _random(6)
    uids = [f"00000000-0000-0000-0000-{i:012d}" for i in range(40)]
    assert len({Digests(uid, version).of(data) for uid in uids for version in range(1, 41)}) == 1600


def test_the_digest_is_of_the_values_wherever_they_lie() -> None:
    """C76: views that were made contiguous, halves of buffers, odd offsets."""
    matrix = np.arange(64, dtype="<i4").reshape(8, 8)
    assert DIGESTS.of(np.ascontiguousarray(matrix[:, ::2]).reshape(-1).view(np.uint8)) == DIGESTS.of(matrix[:, ::2].copy().reshape(-1).view(np.uint8))
    for elements in (1409, 17):
        payload = _bf16(1, elements)
        for offset in (0, elements - 1, elements):
            buffer = np.zeros((offset + elements) * 2, np.uint8)
            buffer[offset * 2 :] = payload
            assert DIGESTS.of(buffer[offset * 2 :]) == DIGESTS.of(payload)


C76 = {
    "one element of 4096": (np.arange(4096, dtype="<i4"), lambda data: data.__setitem__(77, 5)),
    "a quarter for another": (np.arange(8192, dtype="<i4"), lambda data: data.__setitem__(slice(0, 2048), np.roll(data[:2048], 1024).copy())),
    "the last of 1031": (np.arange(1031, dtype="<i2"), lambda data: data.__setitem__(1030, 0)),
    "words 0 and 5": (np.arange(4096, dtype="<i4"), lambda data: data.__setitem__([0, 5], data[[5, 0]])),
}


@pytest.mark.parametrize(("content", "change"), C76.values(), ids=C76)
def test_c76_is_told_apart(content: NDArray[np.int32], change: Callable[[NDArray[np.int32]], None]) -> None:
    before = DIGESTS.of(content.view(np.uint8))
    changed = content.copy()
    change(changed)
    assert DIGESTS.of(changed.view(np.uint8)) != before


@examples(60)
@given(runs=st.lists(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=4), min_size=1, max_size=4), data=st.data())
def test_a_version_root_covers_every_block_of_every_run(runs: list[list[bytes]], data: st.DataObject) -> None:
    """Merkle: any bit of any block digest, and where one run ends and the next begins."""
    before = root(run_root(b"".join(run)) for run in runs)
    which = data.draw(st.integers(0, len(runs) - 1))
    block = data.draw(st.integers(0, len(runs[which]) - 1))
    bit = data.draw(st.integers(0, 127))
    changed = [list(run) for run in runs]
    changed[which][block] = (int.from_bytes(changed[which][block], "little") ^ 1 << bit).to_bytes(16, "little")
    assert root(run_root(b"".join(run)) for run in changed) != before
    if len(runs) > 1:
        joined = [runs[0] + runs[1], *runs[2:]]
        assert root(run_root(b"".join(run)) for run in joined) != before

"""Digests are what a reader trusts: the published vectors, every length, every position and every bit count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refit_runtime.digest import BLOCK, DIGEST_BYTES, Digests, block_count, root, run_root

from tests.examples import examples

UID, VERSION = "00000000-0000-0000-0000-000000000001", 7
VECTORS = {
    "bytes 0 to 255": (bytes(range(256)), "5586743343ce5bdc a69f4f982554b56d"),
    "nothing": (b"", "dd284b1572a55a07 30c9da50a4258abc"),
    "five bytes": (b"refit", "15f8b954d0752b82 d294c34fd3e8abec"),
    "a zero byte more": (b"refit\0", "5162ad592b74f3fa 3dc4798f7c360be2"),
}
MASK = (1 << 64) - 1


def digest(data: bytes, version: int = VERSION) -> bytes:
    return Digests(UID, version).of(np.frombuffer(data, np.uint8))


def slow(data: bytes) -> bytes:
    """The definition, word by word."""
    import hashlib

    seed = hashlib.sha256(UID.encode() + VERSION.to_bytes(8, "little")).digest()
    k0, k1 = int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:16], "little")

    def m(x: int) -> int:
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & MASK
        return x ^ x >> 27

    def n(y: int) -> int:
        y ^= y >> 31
        y = y * 0x94D049BB133111EB & MASK
        return y ^ y >> 29

    out = b""
    for at in range(0, max(len(data), 1), BLOCK):
        block = data[at : at + BLOCK]
        a, b = m((len(block) + k1) & MASK), n(len(block) ^ k0)
        for i in range(0, len(block), 8):
            word = int.from_bytes(block[i : i + 8], "little")
            a += m((word + (i // 8 + 1) * 0x9E3779B97F4A7C15 + k0) & MASK)
            b += n(word ^ ((i // 8 + 1) * 0xC2B2AE3D27D4EB4F & MASK) ^ k1)
        out += (a & MASK).to_bytes(8, "little") + (b & MASK).to_bytes(8, "little")
    return out


@pytest.mark.parametrize(("data", "expected"), VECTORS.values(), ids=VECTORS.keys())
def test_published_vectors(data: bytes, expected: str) -> None:
    a, b = (int.from_bytes(digest(data)[at : at + 8], "little") for at in (0, 8))
    assert f"{a:016x} {b:016x}" == expected


@given(st.binary(max_size=3000), st.sampled_from([0, 131_072 - 1500]))
@examples(15)
@example(b"over the border of a block" * 50, BLOCK - 700)
def test_equal_to_the_definition_at_every_length(tail: bytes, zeros: int) -> None:
    """Around the borders of words, of the pieces that are computed at once and of blocks."""
    data = bytes(zeros) + tail
    assert digest(data) == slow(data)


@given(st.integers(0, 3 * BLOCK // 2 - 1), st.integers(0, 7))
@examples(15)
def test_a_flipped_bit_changes_its_block_only(at: int, bit: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * BLOCK // 2, dtype=np.uint8)
    before = Digests(UID, VERSION).of(data)
    data[at] ^= 1 << bit
    after = Digests(UID, VERSION).of(data)
    assert len(before) == DIGEST_BYTES * block_count(data.size) == 32
    changed = [before[i : i + 16] != after[i : i + 16] for i in (0, 16)]
    assert changed == [at < BLOCK, at >= BLOCK]


def test_swapped_words_and_other_versions_differ() -> None:
    first = bytes(8) + b"\1" * 8
    assert digest(first) != digest(first[8:] + first[:8])
    assert digest(first) != digest(first, version=8)


def test_roots_depend_on_order() -> None:
    one, two = run_root(b"1" * 16), run_root(b"2" * 16)
    assert root([one, two]) != root([two, one])

"""Digests of a run's bytes: they prove that what a generator installs is what the trainer published.

A run is cut into blocks of 1 MiB from its start (the last one short). A block of L bytes is words w_i, little-endian, the last zero-padded;
all arithmetic is modulo 2^64, k0 and k1 come from the group's UID and the version:
    A = m(L + k1) + sum of m(w_i + (i+1) phi + k0)            m(x): x ^= x>>30; x *= MA; x ^= x>>27
    B = n(L ^ k0) + sum of n(w_i ^ (i+1) psi ^ k1)            n(y): y ^= y>>31; y *= MB; y ^= y>>29
Sums commute, so a device may compute them in any order; the result is the same everywhere. 16 bytes a block: A then B, little-endian.
A run's root is the SHA-256 of its block digests; roots of slots, coordinates and versions are the SHA-256 of run roots in plan order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
DIGEST_BYTES = 16

_WORDS = BLOCK // 8
_PIECE = 1 << 14  # words at a time: scratch, keys and data stay in a core's cache
_MASK = (1 << 64) - 1
FIRST = _PHI, _MA, _A1, _A2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 30, 27
SECOND = _PSI, _MB, _B1, _B2 = 0xC2B2AE3D27D4EB4F, 0x94D049BB133111EB, 31, 29

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


class Digests:
    """Of one version of one group; safe to share between threads, which compute without the interpreter lock."""

    def __init__(self, group_uid: str, version: int) -> None:
        seed = hashlib.sha256(group_uid.encode() + version.to_bytes(8, "little")).digest()
        self.keys = self._k0, self._k1 = int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:16], "little")
        place = np.arange(1, _WORDS + 1, dtype=np.uint64)
        self._keys_a = place * np.uint64(_PHI) + np.uint64(self._k0)
        self._keys_b = place * np.uint64(_PSI) ^ np.uint64(self._k1)

    def of(self, data: Bytes) -> bytes:
        """The block digests of contiguous bytes that start at a block of their run."""
        scratch = (np.empty(_PIECE, np.uint64), np.empty(_PIECE, np.uint64))
        return b"".join(self._block(data[at : at + BLOCK], scratch) for at in range(0, max(data.size, 1), BLOCK))

    def _block(self, data: Bytes, scratch: tuple[Words, Words]) -> bytes:
        whole = data.size // 8 * 8
        a = _mix((data.size + self._k1) & _MASK, _A1, _MA, _A2)
        b = _mix(data.size ^ self._k0, _B1, _MB, _B2)
        parts = [data[:whole].view(np.uint64)]
        if whole < data.size:
            parts.append(np.concatenate([data[whole:], np.zeros(8 - data.size + whole, np.uint8)]).view(np.uint64))
        at = 0
        for part in parts:
            for start in range(0, part.size, _PIECE):
                words = part[start : start + _PIECE]
                x, y = scratch[0][: words.size], scratch[1][: words.size]
                np.add(words, self._keys_a[at : at + words.size], out=x)
                a += _mixed_sum(x, y, _A1, _MA, _A2)
                np.bitwise_xor(words, self._keys_b[at : at + words.size], out=x)
                b += _mixed_sum(x, y, _B1, _MB, _B2)
                at += words.size
        return (a & _MASK).to_bytes(8, "little") + (b & _MASK).to_bytes(8, "little")


def _mix(x: int, first: int, factor: int, second: int) -> int:
    x ^= x >> first
    x = x * factor & _MASK
    return x ^ x >> second


def _mixed_sum(x: Words, spare: Words, first: int, factor: int, second: int) -> int:
    """Sum of the mixed words; both arrays are overwritten."""
    np.right_shift(x, np.uint64(first), out=spare)
    np.bitwise_xor(x, spare, out=x)
    np.multiply(x, np.uint64(factor), out=x)
    np.right_shift(x, np.uint64(second), out=spare)
    np.bitwise_xor(x, spare, out=x)
    return int(np.add.reduce(x))


def block_count(size: int) -> int:
    return max(1, -(-size // BLOCK))


def run_root(digests: bytes) -> bytes:
    """Of a run's block digests, in order."""
    return hashlib.sha256(digests).digest()


def root(run_roots: Iterable[bytes]) -> bytes:
    """Of a slot, a coordinate or a version: its run roots in plan order."""
    return hashlib.sha256(b"".join(run_roots)).digest()

"""Digests of a run's bytes: they prove that what a generator installs is what the trainer published.

A run is cut into blocks of 1 MiB from its start (the last one short). A block of L bytes is words w_i, little-endian, the last zero-padded;
all arithmetic is modulo 2^64, k0 and k1 come from the group's UID and the version:
    A = m(L + k1) + sum of m(w_i + (i+1) phi + k0)            m(x): x ^= x>>30; x *= MA; x ^= x>>27
    B = n(L ^ k0) + sum of n(w_i ^ (i+1) psi ^ k1)            n(y): y ^= y>>31; y *= MB; y ^= y>>29
Sums commute, so a device may compute them in any order; the result is the same everywhere. 16 bytes a block: A then B, little-endian.
A run's root is the SHA-256 of its block digests; roots of slots, coordinates and versions are the SHA-256 of run roots in plan order.

The sums are compiled (ADR 0015): array operations would pass over the words a dozen times, at a sixth of the speed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray
from refit_api.errors import SpecError

BLOCK = 1 << 20
DIGEST_BYTES = 16

FIRST = _PHI, _MA, _A1, _A2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 30, 27
SECOND = _PSI, _MB, _B1, _B2 = 0xC2B2AE3D27D4EB4F, 0x94D049BB133111EB, 31, 29

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


class Digests:
    """Of one version of one group; safe to share between threads, which compute without the interpreter lock."""

    def __init__(self, group_uid: str, version: int) -> None:
        seed = hashlib.sha256(group_uid.encode() + version.to_bytes(8, "little")).digest()
        self.keys = int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:16], "little")
        self._keys = np.array(self.keys, np.uint64)

    def of(self, data: Bytes) -> bytes:
        """The block digests of contiguous bytes that start at a block of their run."""
        whole = data.size // 8 * 8
        tail = np.zeros(8, np.uint8)
        tail[: data.size - whole] = data[whole:]
        found = np.empty((block_count(data.size), 2), "<u8")
        _sums()(data[:whole].view(np.uint64), tail.view(np.uint64)[0], np.uint64(data.size), self._keys, found)
        return found.tobytes()


@cache
def _sums() -> Callable[[Words, np.uint64, np.uint64, Words, Words], None]:
    """Compiled with the first digest of a process, in about 2 s; not kept on disk, which may be read-only."""
    try:
        import numba
    except ImportError as error:
        raise SpecError(f"digests on a CPU need numba, which cannot be used in this image ({error}): install refit[runtime] there, or a newer numba") from error

    u64 = np.uint64
    phi, ma, a1, a2 = (u64(value) for value in FIRST)
    psi, mb, b1, b2 = (u64(value) for value in SECOND)
    block, word = u64(BLOCK), u64(8)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def first(x: np.uint64) -> np.uint64:
        x ^= x >> a1
        x *= ma
        return x ^ (x >> a2)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def second(y: np.uint64) -> np.uint64:
        y ^= y >> b1
        y *= mb
        return y ^ (y >> b2)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def sums(words: Words, tail: np.uint64, size: np.uint64, keys: Words, found: Words) -> None:
        """Of each block: `words` are the whole ones, `tail` the rest, zero-padded, `size` all bytes."""
        for number in range(found.shape[0]):
            start = u64(number) * block
            length = min(block, size - start)
            a, b = first(length + keys[1]), second(length ^ keys[0])
            key, place = keys[0], u64(0)
            for at in range(start // word, (start + length) // word):
                key += phi
                place += psi
                a += first(words[at] + key)
                b += second(words[at] ^ place ^ keys[1])
            if length % word:
                a += first(tail + key + phi)
                b += second(tail ^ (place + psi) ^ keys[1])
            found[number, 0] = a
            found[number, 1] = b

    return cast("Callable[[Words, np.uint64, np.uint64, Words, Words], None]", sums)


def block_count(size: int) -> int:
    return max(1, -(-size // BLOCK))


def run_root(digests: bytes) -> bytes:
    """Of a run's block digests, in order."""
    return hashlib.sha256(digests).digest()


def root(run_roots: Iterable[bytes]) -> bytes:
    """Of a slot, a coordinate or a version: its run roots in plan order."""
    return hashlib.sha256(b"".join(run_roots)).digest()

"""Where a run lies in memory that was never packed: rows of tensors one after the other, as manifests state it and readers ask for it.

A piece is `times` times `size` bytes, `stride` apart, from `address` on: four little-endian 64-bit numbers. A run's pieces follow each other in its
order and have its bytes, no more and no fewer.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from refit_api.errors import WireMismatch

if TYPE_CHECKING:
    import torch

_FIELDS = 4


class Piece(NamedTuple):
    """Bytes in a holder's memory."""

    address: int
    size: int
    stride: int
    times: int


def pieces_of(array: torch.Tensor) -> list[Piece] | None:
    """Of a strided array in row-major order; None if its last dim is strided too: element by element nobody reads."""
    if array.dim() and array.shape[-1] > 1 and array.stride(-1) != 1:
        return None
    dims = [(extent, stride) for extent, stride in zip(array.shape, array.stride(), strict=True) if extent > 1]
    size = array.element_size()
    inner = 1
    while dims and dims[-1][1] == inner:
        inner *= dims.pop()[0]
    *outer, (count, stride) = dims or [(1, 0)]
    starts = (sum(at * step for at, (_, step) in zip(index, outer, strict=True)) for index in product(*(range(extent) for extent, _ in outer)))
    return [Piece(array.data_ptr() + start * size, inner * size, stride * size, count) for start in starts]


def encode(pieces: Iterable[Piece]) -> bytes:
    """Neighbours that touch become one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.times == piece.times == 1 and last.address + last.size == piece.address:
            joined[-1] = Piece(last.address, last.size + piece.size, 0, 1)
        else:
            joined.append(piece)
    return np.array(joined, "<i8").tobytes()


def parts_of(pieces: bytes, offset: int, size: int) -> tuple[tuple[int, int], ...]:
    """The (address, bytes) of a run's bytes from `offset` on. Raises WireMismatch."""
    if len(pieces) % (8 * _FIELDS):
        raise WireMismatch(f"pieces of {len(pieces)} bytes: expected {8 * _FIELDS} bytes each; run one release of Refit everywhere")
    table = np.frombuffer(pieces, "<i8").reshape(-1, _FIELDS)
    if bool((table[:, [1, 3]] < 1).any()):
        raise WireMismatch("pieces without bytes: run one release of Refit everywhere")
    ends = np.cumsum(table[:, 1] * table[:, 3])
    parts: list[tuple[int, int]] = []
    end = offset + size
    for which in range(int(np.searchsorted(ends, offset, side="right")), len(table)):
        address, row, stride, count = (int(field) for field in table[which])
        start = int(ends[which]) - row * count
        if start >= end:
            break
        for index in range(max(0, (offset - start) // row), min(count, -(-(end - start) // row))):
            lo, hi = max(start + index * row, offset), min(start + (index + 1) * row, end)
            parts.append((address + index * stride + lo - start - index * row, hi - lo))
    return tuple(parts)

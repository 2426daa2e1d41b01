"""Facts about tensors: frozen, hashable, without torch.

Shapes and boxes are in elements, row-major; ranges are half-open. A scalar has shape `()` and the box `()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""One `(lo, hi)` for each dim, `lo < hi`."""


class Dtype(str, Enum):
    """Element types by their torch names; the values travel in layouts and case files."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"  # also packed 4-bit

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]


_ITEM_BYTES = {
    Dtype.FLOAT64: 8, Dtype.FLOAT32: 4, Dtype.FLOAT16: 2, Dtype.BFLOAT16: 2, Dtype.FLOAT8_E4M3FN: 1, Dtype.FLOAT8_E5M2: 1,
    Dtype.INT64: 8, Dtype.INT32: 4, Dtype.INT16: 2, Dtype.INT8: 1, Dtype.UINT8: 1,
}  # fmt: skip


def whole(shape: Shape) -> Box:
    """The box of everything."""
    return tuple((0, extent) for extent in shape)


def box_shape(box: Box) -> Shape:
    return tuple(hi - lo for lo, hi in box)


def box_elements(box: Box) -> int:
    return prod(hi - lo for lo, hi in box)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole logical parameter, by checkpoint name; `dtype` is the dtype its shards are published in."""

    name: str
    dtype: Dtype
    shape: Shape


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one rank holds. Where its bytes lie is the `WeightSource`'s affair.

    `plus` is added to the live values, before the cast: to norms that a trainer keeps around zero and checkpoints have around one.
    """

    tensor: TensorSpec
    box: Box
    plus: float = 0.0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A live parameter of an engine rank, as its loader sees it."""

    name: str
    dtype: Dtype
    shape: Shape


@dataclass(frozen=True, slots=True)
class Need:
    """`box` of a tensor, its dims permuted by `perm` (as numpy.transpose), goes to `at` in a parameter.

    `at` may have more dims than the box: the extra ones come first and have extent 1.
    `shape` is the whole tensor's, as the engine's loader expects it, or None where the loader does not tell.
    """

    tensor: str
    box: Box
    parameter: Parameter
    at: Box
    perm: tuple[int, ...] | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class RankShards:
    """What one trainer rank publishes. Ranks of different replicas may hold equal boxes."""

    rank: int
    replica: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class CoordinateNeeds:
    """What one engine rank needs. `id` is its place on the mesh axes, such as `tp0` or `tp1-pp0`.

    `unwritten` may stay unwritten, wholly or in parts: rotary tables and the like, declared by the engine adapter.
    """

    id: str
    needs: tuple[Need, ...]
    unwritten: tuple[Parameter, ...] = ()

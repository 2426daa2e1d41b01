"""Which box of a tensor a place of a device mesh holds, from DTensor placements. No torch.

`Shard` cuts as torch.chunk does: parts of the extent over the ranks, rounded up, the last ones shorter or empty. Mesh dims that cut the same tensor dim
do so from left to right, each what the one before left. `_StridedShard` stands where a mesh dim cuts after those to its right, as FSDP does to tensors
that are cut for tensor parallelism already; its split factor is the number of parts that they made. Those parts must be equal: of others torch itself has
two readings.

Invariant: the boxes of all places of a mesh hold each element once for each combination of places along the dims that replicate. What is not known by
name is refused: a partial sum is not the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Box, Shape


def local_box(tensor: str, shape: Shape, sizes: Sequence[int], place: Sequence[int], placements: Sequence[Any]) -> Box | None:
    """`place` on a mesh of `sizes`; None where nothing is left for it. Raises UnsupportedLayout."""
    box = []
    cuts = _cuts(tensor, shape, sizes, place, placements)
    for dim, extent in enumerate(shape):
        lo, hi = 0, extent
        for rank, ranks in cuts[dim]:
            step = -(-(hi - lo) // ranks)
            lo, hi = min(lo + rank * step, hi), min(lo + (rank + 1) * step, hi)
        if lo == hi:
            return None
        box.append((lo, hi))
    return tuple(box)


def replicates(placement: Any) -> bool:
    return type(placement).__name__ == "Replicate"


def _cuts(tensor: str, shape: Shape, sizes: Sequence[int], place: Sequence[int], placements: Sequence[Any]) -> defaultdict[int, list[tuple[int, int]]]:
    """By tensor dim: (rank, ranks) of every mesh dim that cuts it, in the order in which they cut."""
    cuts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    strided: dict[int, Any] = {}
    for rank, ranks, placement in reversed(list(zip(place, sizes, placements, strict=True))):
        kind = type(placement).__name__
        if kind == "Shard":
            cuts[placement.dim].insert(0, (rank, ranks))
        elif kind == "_StridedShard":
            if placement.split_factor != prod(parts for _, parts in cuts[placement.dim]):
                raise _refusal(tensor, placement, placements, "its split factor is not the number of parts that the mesh dims to its right make")
            cuts[placement.dim].append((rank, ranks))
            strided[placement.dim] = placement
        elif not replicates(placement):
            raise _refusal(tensor, placement, placements, "it holds no part of the tensor's values: redistribute it to Shard or Replicate before binding")
    for dim, placement in strided.items():
        parts = prod(parts for _, parts in cuts[dim][:-1])
        if shape[dim] % parts:
            raise _refusal(
                tensor, placement, placements, f"an extent of {shape[dim]} is not divisible by the {parts} parts that it cuts: choose sizes that are"
            )
    return cuts


def _refusal(tensor: str, placement: Any, placements: Sequence[Any], why: str) -> UnsupportedLayout:
    return UnsupportedLayout(f"{tensor}: placement {placement!r} of {list(placements)}: {why}", tensor=tensor, seen=repr(placement))

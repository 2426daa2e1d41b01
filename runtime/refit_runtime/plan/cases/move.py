"""`--run`: real bytes through the plan, from the ranks' memory to the parameters, and the answer they must give.

The moved bytes go the way of the product: snapshot copies into each rank's arena, runs read from the first owner's arena chunk by chunk, install copies.
The expected ones are cut out of whole tensors, need by need; there are no runs, atoms or arenas in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from refit_api.tensors import CoordinateNeeds, Dtype, Shape, TensorSpec

from refit_runtime.plan.cases.file import Case
from refit_runtime.plan.cases.layout import RankMemory
from refit_runtime.plan.cases.memory import Bytes, by_pieces, fill, index, rank_bytes
from refit_runtime.plan.plan import Plan, SourcePlan, chunks

CLASS = ""  # a case has one, without a name

Parameters = dict[str, Bytes]


@dataclass(frozen=True, slots=True)
class Moved:
    """Parameters by coordinate and memory by rank, as they are and as they must be."""

    params: dict[str, Parameters]
    expected_params: dict[str, Parameters]
    memory: dict[int, bytes]
    expected_memory: dict[int, bytes]

    @property
    def right(self) -> bool:
        same = self.params.keys() == self.expected_params.keys() and self.memory == self.expected_memory
        return same and all(
            one.keys() == self.expected_params[id_].keys() and all(np.array_equal(content, self.expected_params[id_][name]) for name, content in one.items())
            for id_, one in self.params.items()
        )


def move(case: Case, plan: Plan, memory: Sequence[RankMemory], coordinates: Sequence[CoordinateNeeds]) -> Moved:
    sources = {each.rank: plan.source(each.rank) for each in memory}
    arenas, held = {}, {}
    for each in memory:
        contents = rank_bytes(case, each)
        arenas[each.rank] = _snapshot(sources[each.rank], each, contents)
        held[each.rank] = b"".join(content.tobytes() for content in contents)
    specs = {shard.tensor.name: shard.tensor for each in memory for shard in each.shards().shards}
    return Moved(
        {needs.id: _pulled(case, plan, needs, sources, arenas) for needs in coordinates},
        {needs.id: _direct(case, specs, needs) for needs in coordinates},
        held,
        {each.rank: b"".join(by_pieces(holding).tobytes() for holding in each.holdings) for each in memory},
    )


def memory_to_move(plan: Plan, memory: Sequence[RankMemory], coordinates: Sequence[CoordinateNeeds]) -> int:
    """About what `move` takes: what both sides hold, once as it is and once as it must be, arenas, and one tensor while it is filled."""
    held = [(prod(holding.shape) * holding.dtype.bytes, holding) for each in memory for holding in each.holdings]
    stated = ({need.parameter for need in needs.needs}.union(needs.unwritten) for needs in coordinates)
    params = sum(prod(parameter.shape) * parameter.dtype.bytes for found in stated for parameter in found)
    arenas = sum(plan.source_bytes(each.rank) for each in memory) + max((plan.coordinate_bytes(CLASS, needs.id) for needs in coordinates), default=0)
    tensor = max((prod(piece.shape) * holding.dtype.bytes for _, holding in held for piece in holding.pieces), default=0)
    return 2 * sum(size for size, _ in held) + 2 * params + arenas + 3 * tensor


def _snapshot(source: SourcePlan, memory: RankMemory, contents: Sequence[Bytes]) -> Bytes:
    places = memory.places()
    arena = np.zeros(source.arena_bytes, np.uint8)
    for copy in source.copies:
        holding, local = places[copy.shard]
        shard = contents[holding][index(local)]
        arena[copy.offset : copy.offset + copy.nbytes] = shard[index(copy.box)].reshape(-1)
    return arena


def _pulled(case: Case, plan: Plan, needs: CoordinateNeeds, sources: dict[int, SourcePlan], arenas: dict[int, Bytes]) -> Parameters:
    planned = plan.coordinate(CLASS, needs.id)
    arena = np.zeros(planned.arena_bytes, np.uint8)
    for run, here in planned.offsets.items():
        owner = plan.runs[run].owners[0]
        there = sources[owner].offsets[run]
        for chunk in chunks(plan.runs[run], case.chunk_bytes):
            arena[here + chunk.offset :][: chunk.bytes] = arenas[owner][there + chunk.offset :][: chunk.bytes]
    params = _zeros(needs)
    for copy in planned.copies:
        piece = arena[copy.offset : copy.offset + copy.nbytes].reshape(*copy.shape, copy.dtype.bytes)
        target = params[copy.parameter][index(copy.at)]
        target[...] = _permuted(piece, copy.perm).reshape(target.shape)
    return params


def _direct(case: Case, specs: dict[str, TensorSpec], needs: CoordinateNeeds) -> Parameters:
    params = _zeros(needs)
    for need in needs.needs:
        if case.subset.keeps(need.tensor):
            spec = specs[need.tensor]
            target = params[need.parameter.name][index(need.at)]
            target[...] = _permuted(fill(spec.name, spec.dtype, spec.shape)[index(need.box)], need.perm).reshape(target.shape)
    return params


def _zeros(needs: CoordinateNeeds) -> Parameters:
    stated = (*(need.parameter for need in needs.needs), *needs.unwritten)
    return {parameter.name: _zero(parameter.dtype, parameter.shape) for parameter in stated}


def _zero(dtype: Dtype, shape: Shape) -> Bytes:
    return np.zeros((*shape, dtype.bytes), np.uint8)


def _permuted(piece: Bytes, perm: tuple[int, ...] | None) -> Bytes:
    return piece if perm is None else piece.transpose(*perm, len(perm))

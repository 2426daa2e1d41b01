"""What a case file means: the parts of every trainer rank's memory, and the needs of every coordinate.

A holding is one parameter of one rank, as contiguous row-major memory; its pieces say which parts of it are tensors, the rest is padding.

Invariant: the holdings of a rank stand in the order of the file, so their bytes one after the other are the rank's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Box, CoordinateNeeds, Dtype, Parameter, RankShards, Shape, Shard, TensorSpec, box_shape, whole

from refit_runtime.plan import roles
from refit_runtime.plan.cases.file import LARGEST, Case, Experts, Gated, Heads, Megatron, Module, Plain, Sizes, Vocabulary
from refit_runtime.plan.roles import Piece

ORDERS = {"qkv": "perGroup", "gatedMlp": "gateUp", "experts": "gateUp"}


@dataclass(frozen=True, slots=True)
class Place:
    """On the axes that cut modules."""

    t: int
    e: int


@dataclass(frozen=True, slots=True)
class Holding:
    """`module` is the number of the module in the file that it belongs to, `place` the rank's place; explicit ranks have neither."""

    shape: Shape
    dtype: Dtype
    pieces: tuple[Piece, ...]
    module: int | None = None
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class RankMemory:
    rank: int
    replica: int
    holdings: tuple[Holding, ...]

    def shards(self) -> RankShards:
        held = (Shard(TensorSpec(piece.tensor, holding.dtype, piece.shape), piece.box) for holding in self.holdings for piece in holding.pieces)
        return RankShards(self.rank, self.replica, tuple(held))

    def places(self) -> tuple[tuple[int, Box], ...]:
        """For each shard, the number of its holding and its box in there."""
        return tuple((i, piece.local) for i, holding in enumerate(self.holdings) for piece in holding.pieces)


def trainer_memory(trainer: tuple[RankShards, ...] | Megatron) -> tuple[RankMemory, ...]:
    if isinstance(trainer, Megatron):
        return tuple(_megatron(trainer))
    return tuple(RankMemory(entry.rank, entry.replica, tuple(_explicit(shard) for shard in entry.shards)) for entry in trainer)


def coordinate_needs(case: Case) -> tuple[CoordinateNeeds, ...]:
    found = []
    for id_, needs in case.needs:
        named = {need.parameter.name: need.parameter for need in reversed(needs)}
        unwritten = (entry if isinstance(entry, Parameter) else named.get(entry) for entry in case.unwritten)
        found.append(CoordinateNeeds(id_, needs, tuple(parameter for parameter in unwritten if parameter is not None)))
    return tuple(found)


def _explicit(shard: Shard) -> Holding:
    shape = box_shape(shard.box)
    return Holding(shape, shard.tensor.dtype, (Piece(shard.tensor.name, shard.tensor.shape, shard.box, whole(shape)),))


def _megatron(trainer: Megatron) -> Iterator[RankMemory]:
    sizes = trainer.sizes
    _check_modules(trainer.modules, sizes)
    for p, d, e, t in product(range(sizes.pp), range(sizes.dp), range(sizes.ep), range(sizes.tp)):
        place = Place(t, e)
        holdings = [
            Holding(shape, sizes.dtype, pieces, number, place)
            for number, module in enumerate(trainer.modules)
            if module.stage == p and not _is_shared(module, trainer.modules)
            for shape, pieces in _held(module, sizes, place)
        ]
        yield RankMemory(t + sizes.tp * (e + sizes.ep * (d + sizes.dp * p)), d, tuple(holdings))


# ---------------------------------------------------------------- modules as a whole


def _check_modules(modules: Sequence[Module], sizes: Sizes) -> None:
    given: set[str] = set()
    for number, module in enumerate(modules):
        what = f"trainer.modules[{number}], role {module.role}"
        if module.body is None:
            raise UnsupportedLayout(f"{what}: unknown role; use embedding, output, qkv, column, row, replicated, gatedMlp or experts", seen=module.role)
        if module.stage >= sizes.pp:
            raise UnsupportedLayout(f"{what}: stage {module.stage} of {sizes.pp}", seen=module.stage, expected=f"below {sizes.pp}")
        if module.order is not None and module.order != ORDERS[module.role]:
            raise UnsupportedLayout(f"{what}: memory order {module.order} is not {ORDERS[module.role]}", seen=module.order, expected=ORDERS[module.role])
        if not module.tied:
            for name in _names(module):
                if name in given:
                    raise UnsupportedLayout(f"{what}: {name} is given twice", tensor=name)
                given.add(name)
    for module in modules:
        _is_shared(module, modules)
        _check_size(module)


def _check_size(module: Module) -> None:
    body = module.body
    if isinstance(body, Vocabulary):
        elements = body.padded * body.hidden
    elif isinstance(body, Heads):
        elements = (body.q + 2 * body.kv) * body.dim * body.hidden
    else:
        elements = 2 * body.ffn * body.hidden if isinstance(body, Experts) else 0  # the others have a shape
    if elements > LARGEST:
        raise UnsupportedLayout(f"{next(_names(module))}: {elements} elements are more than any machine holds", seen=elements)


def _names(module: Module) -> Iterator[str]:
    body = module.body
    if isinstance(body, Experts):
        for expert in range(body.experts):
            yield from body.named(expert)
    elif isinstance(body, Heads):
        yield from (*body.hf, *body.bias)
    elif isinstance(body, Gated):
        yield from body.hf
    elif body is not None:
        yield body.hf


def _is_shared(module: Module, modules: Sequence[Module]) -> bool:
    """Whether a module has no memory of its own: a tied output on the stage of its embedding."""
    if not module.tied:
        return False
    for other in modules:
        if other.role == "embedding" and other.body == module.body:
            return other.stage == module.stage
    raise UnsupportedLayout(f"output {next(_names(module))}: tied, but no embedding has this name and these sizes", tensor=next(_names(module)))


# ---------------------------------------------------------------- what one rank holds of one module


def _held(module: Module, sizes: Sizes, place: Place) -> Iterator[tuple[Shape, tuple[Piece, ...]]]:
    """Shape and pieces of each parameter."""
    body, t, tp = module.body, place.t, sizes.tp
    if isinstance(body, Vocabulary):
        _, rows = roles.vocabulary_rows(body.hf, body.vocab, body.padded, t, tp)
        yield (rows, body.hidden), roles.vocabulary(body.hf, body.vocab, body.padded, body.hidden, t, tp)
    elif isinstance(body, Heads):
        rows = (body.q + 2 * body.kv) * body.dim // tp
        yield (rows, body.hidden), roles.qkv(body.hf, body.q, body.kv, body.dim, body.hidden, t, tp)
        if body.bias:
            yield (rows,), roles.qkv(body.bias, body.q, body.kv, body.dim, None, t, tp)
    elif isinstance(body, Gated):
        yield _fused(roles.gated(body.hf, body.shape, t, tp))
    elif isinstance(body, Experts):
        yield from _experts(body, sizes, place)
    elif isinstance(body, Plain):
        cut = {"column": roles.column, "row": roles.row}.get(module.role)
        piece = cut(body.hf, body.shape, t, tp) if cut is not None else roles.replicated(body.hf, body.shape)
        yield box_shape(piece.local), (piece,)


def _experts(body: Experts, sizes: Sizes, place: Place) -> Iterator[tuple[Shape, tuple[Piece, ...]]]:
    if sizes.tp % sizes.etp:
        raise UnsupportedLayout(f"{body.names[0]}: tp {sizes.tp} is not divisible by etp {sizes.etp}", seen=sizes.etp, expected=f"a divisor of {sizes.tp}")
    roles.part(f"{body.names[0]}, ffn", body.ffn, 0, sizes.etp)
    rank = place.t % sizes.etp
    for expert in roles.local_experts(body.names[0], body.experts, body.map, place.e, sizes.ep):
        gate, up, down = body.named(expert)
        yield _fused(roles.gated((gate, up), (body.ffn, body.hidden), rank, sizes.etp))
        piece = roles.row(down, (body.hidden, body.ffn), rank, sizes.etp)
        yield box_shape(piece.local), (piece,)


def _fused(pieces: tuple[Piece, ...]) -> tuple[Shape, tuple[Piece, ...]]:
    return (pieces[-1].local[0][1], *pieces[0].shape[1:]), pieces

"""How one Megatron tensor lies on a rank: its role in the words of `plan.roles`, with the model's sizes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from refit_api.tensors import Shape

from refit_runtime.adapters.megatron.mesh import ALONE, Axis
from refit_runtime.plan import roles


@dataclass(frozen=True, slots=True)
class Heads:
    """The rows are a fused query, key and value projection."""

    queries: int
    groups: int
    width: int


@dataclass(frozen=True, slots=True)
class Halves:
    """The rows are gate rows, then as many up rows, on each rank."""

    rows: int


@dataclass(frozen=True, slots=True)
class Words:
    """The rows are words, `count` of them; the rest is padding."""

    count: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`shape` is the whole tensor's as Megatron has it; dim `dim` is cut over `axis`, or nothing if None. `rows` says what else its rows are."""

    shape: Shape
    dim: int | None = None
    axis: Axis = ALONE
    rows: Heads | Halves | Words | None = None

    @property
    def parts(self) -> int:
        """How many checkpoint tensors it is made of."""
        return 3 if isinstance(self.rows, Heads) else 2 if isinstance(self.rows, Halves) else 1

    def local(self, what: str) -> Shape:
        """What a rank holds. Raises UnsupportedLayout where the cut does not divide."""
        return self.shape if self.dim is None else tuple(hi for _, hi in roles.sliced(what, self.shape, self.dim, self.axis.rank, self.axis.size).local)

    def pieces(self, tensors: tuple[str, ...]) -> tuple[roles.Piece, ...]:
        """In the order of memory; padding is none."""
        rank, ranks, columns = self.axis.rank, self.axis.size, self.shape[1:]
        match self.rows:
            case Heads(queries, groups, width):
                return roles.qkv(tensors, queries, groups, width, columns[0] if columns else None, rank, ranks)
            case Halves(rows):
                return roles.gated(tensors, (rows, *columns), rank, ranks)
            case Words(count):
                return roles.vocabulary(tensors[0], count, self.shape[0], columns[0], rank, ranks)
            case None:
                return (roles.replicated(tensors[0], self.shape) if self.dim is None else roles.sliced(tensors[0], self.shape, self.dim, rank, ranks),)

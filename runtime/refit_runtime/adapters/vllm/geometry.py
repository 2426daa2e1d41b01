"""Which elements of a row-major tensor a chain of view operations shows, and which boxes a copy of them fills.

Pure arithmetic: neither torch nor memory. A dim of a view is a tuple of factors, outermost first; the element at index
`i` (mixed radix over the extents) lies at `offset + sum(i_f * stride_f)` of the row-major source. So a copy that only
changes where elements lie (contiguous, clone, reshape) changes nothing here, and splitting or merging dims is exact.

Invariants: every operation keeps the map from logical index to source element; what cannot be written as whole factors
raises `Inexpressible`, it is never approximated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from refit_api.tensors import Box, Shape

MAX_PIECES = 65_536  # boxes of one copy; beyond it the layout is refused rather than planned element by element


class Inexpressible(ValueError):
    """A view or copy that is not a set of boxes."""


@dataclass(frozen=True, slots=True)
class Factor:
    extent: int
    stride: int


Dim = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of the source, its dims permuted by `perm`, fills `at` of the destination (fewer source dims: leading ones of extent 1)."""

    box: Box
    at: Box
    perm: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Geometry:
    """A view of a row-major source."""

    dims: tuple[Dim, ...]
    offset: int = 0

    @classmethod
    def whole(cls, shape: Shape) -> Geometry:
        return cls.strided(shape, _strides(shape))

    @classmethod
    def strided(cls, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Geometry:
        return cls(tuple((Factor(extent, stride),) for extent, stride in zip(shape, strides, strict=True)), offset)

    @property
    def shape(self) -> Shape:
        return tuple(_extent(dim) for dim in self.dims)

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> Geometry:
        kept, moved = _narrow(self.dims[dim], start, length, step)
        return Geometry((*self.dims[:dim], kept, *self.dims[dim + 1 :]), self.offset + moved)

    def select(self, dim: int, index: int) -> Geometry:
        one = self.narrow(dim, index, 1)
        return replace(one, dims=(*one.dims[:dim], *one.dims[dim + 1 :]))

    def permute(self, order: Sequence[int]) -> Geometry:
        return replace(self, dims=tuple(self.dims[dim] for dim in order))

    def view(self, shape: Sequence[int]) -> Geometry:
        """Row-major regrouping of all elements, as `reshape`."""
        if 0 in shape:
            return Geometry.strided(shape, _strides(tuple(shape)), self.offset)
        left = _merged(factor for dim in self.dims for factor in dim)
        dims = tuple(_take(left, extent) for extent in reversed(shape))
        return replace(self, dims=tuple(reversed(dims)))

    def expand(self, shape: Sequence[int]) -> Geometry:
        """Broadcasting: new leading dims, and dims of extent 1 repeated."""
        own: tuple[Dim, ...] = ((Factor(1, 0),),) * (len(shape) - len(self.dims)) + self.dims
        return replace(self, dims=tuple(dim if _extent(dim) == extent else (Factor(extent, 0),) for dim, extent in zip(own, shape, strict=True)))


@lru_cache(maxsize=4096)
def pieces(source: Geometry, source_shape: Shape, target: Geometry, target_shape: Shape) -> tuple[Piece, ...]:
    """The boxes that copying `source` (a view of a tensor) into `target` (an equally shaped view of a parameter) moves."""
    if 0 in target.shape:
        return ()
    terms = _coalesce(_located(_paired(source.expand(target.shape), target), source_shape, target_shape))
    kept, unrolled = _kept(terms, len(source_shape), len(target_shape))
    if prod(term.extent for term in unrolled) > MAX_PIECES:
        raise Inexpressible(f"the copy falls into more than {MAX_PIECES} boxes")
    base = (_index(source.offset, source_shape), _index(target.offset, target_shape))
    perm = _perm(kept, len(source_shape), len(target_shape))
    found = []
    for steps in product(*(range(term.extent) for term in unrolled)):
        origin, at = list(base[0]), list(base[1])
        for step, term in zip(steps, unrolled, strict=True):
            if term.step:  # 0: broadcast, the same source element every time
                origin[term.dim] += step * term.step
            at[term.at] += step * term.at_step
        found.append(Piece(_box(origin, {t.dim: t.extent for t in kept}, source_shape), _box(at, {t.at: t.extent for t in kept}, target_shape), perm))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Term:
    """`extent` steps: each `step` along `dim` of the source and `at_step` along `at` of the destination."""

    extent: int
    dim: int
    step: int
    at: int
    at_step: int


def _strides(shape: Shape) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _extent(dim: Dim) -> int:
    return prod(factor.extent for factor in dim)


def _narrow(dim: Dim, start: int, length: int, step: int) -> tuple[Dim, int]:
    if len(dim) == 0:
        dim = (Factor(1, 0),)
    outer, rest = dim[0], dim[1:]
    if length == 0:
        return (Factor(0, 1),), 0
    if not rest:
        return (Factor(length, outer.stride * step),), start * outer.stride
    inner = _extent(rest)
    if step == 1 and start % inner == 0 and length % inner == 0:
        return (Factor(length // inner, outer.stride), *rest), start // inner * outer.stride
    row, first = divmod(start, inner)
    if first + (length - 1) * step < inner:
        kept, moved = _narrow(rest, first, length, step)
        return kept, moved + row * outer.stride
    raise Inexpressible(f"elements {start} to {start + length} of a dim merged from {[f.extent for f in dim]} are no box")


def _merged(factors: Iterable[Factor]) -> list[Factor]:
    """Neighbours that are one range become one factor."""
    found: list[Factor] = []
    for factor in factors:
        if found and found[-1].stride == factor.extent * factor.stride and factor.stride:
            found[-1] = Factor(found[-1].extent * factor.extent, factor.stride)
        elif factor.extent != 1:
            found.append(factor)
    return found


def _take(left: list[Factor], extent: int) -> Dim:
    """Removes from the end of `left` the factors that make a dim of `extent`."""
    taken: list[Factor] = []
    while extent > 1:
        factor = left.pop()
        if factor.extent > extent:
            if factor.extent % extent:
                raise Inexpressible(f"a dim of {factor.extent} elements does not split into parts of {extent}")
            left.append(Factor(factor.extent // extent, factor.stride * extent))
            factor = Factor(extent, factor.stride)
        elif extent % factor.extent:
            raise Inexpressible(f"a dim of {extent} elements is not made of whole dims of {factor.extent}")
        extent //= factor.extent
        taken.insert(0, factor)
    return tuple(taken) or (Factor(1, 0),)


def _paired(source: Geometry, target: Geometry) -> list[tuple[int, int, int]]:
    """`(extent, source stride, target stride)`: the finest common factors, extents of 1 left out."""
    found = []
    for ours, theirs in zip(source.dims, target.dims, strict=True):
        left, right = [f for f in ours if f.extent != 1], [f for f in theirs if f.extent != 1]
        while left and right:
            a, b = left.pop(), right.pop()
            extent = min(a.extent, b.extent)
            if a.extent % extent or b.extent % extent:
                raise Inexpressible(f"dims of {a.extent} and {b.extent} elements do not divide each other")
            found.append((extent, a.stride, b.stride))
            left += [Factor(a.extent // extent, a.stride * extent)] if a.extent > extent else []
            right += [Factor(b.extent // extent, b.stride * extent)] if b.extent > extent else []
        assert left == right == [], "equal shapes have equal extents"
    return found


def _located(pairs: Iterable[tuple[int, int, int]], source_shape: Shape, target_shape: Shape) -> list[_Term]:
    """Every pair on one dim of each side, split where it runs over the end of a dim."""
    waiting, found = list(pairs), []
    while waiting:
        extent, stride, at_stride = waiting.pop()
        dim, step, fits = _locate(extent, stride, source_shape)
        at, at_step, at_fits = _locate(extent, at_stride, target_shape)
        inner = min(fits, at_fits)
        if extent % inner or inner == 1:
            raise Inexpressible(f"{extent} elements cross dims of {source_shape} or {target_shape} unevenly")
        if inner < extent:
            waiting += [(extent // inner, stride * inner, at_stride * inner), (inner, stride, at_stride)]
        else:
            found.append(_Term(extent, dim, step, at, at_step))
    return found


def _locate(extent: int, stride: int, shape: Shape) -> tuple[int, int, int]:
    """The dim that `stride` moves along, its step there, and how many of `extent` steps fit into that dim."""
    if stride == 0:
        return -1, 0, extent
    for dim, (size, own) in enumerate(zip(shape, _strides(shape), strict=True)):
        if own <= stride and size > 1:
            if stride % own:
                break
            step = stride // own
            return dim, step, extent if (extent - 1) * step < size else max(size // step, 1)
    raise Inexpressible(f"a stride of {stride} elements follows no dim of {shape}")


def _coalesce(terms: list[_Term]) -> list[_Term]:
    ordered = sorted(terms, key=lambda term: (term.dim, term.at, -term.step, -term.at_step))
    found: list[_Term] = []
    for term in ordered:
        last = found[-1] if found else None
        if last and (last.dim, last.at) == (term.dim, term.at) and (last.step, last.at_step) == (term.extent * term.step, term.extent * term.at_step):
            found[-1] = replace(term, extent=last.extent * term.extent)
        else:
            found.append(term)
    return found


def _kept(terms: list[_Term], source_dims: int, target_dims: int) -> tuple[list[_Term], list[_Term]]:
    """Those that stay ranges of the boxes, at most one for a dim, and those that become one box a step."""
    kept: list[_Term] = []
    for term in sorted(terms, key=lambda term: -term.extent):
        fits = term.step == term.at_step == 1 and term.at >= target_dims - source_dims
        if fits and term.dim not in {other.dim for other in kept} and term.at not in {other.at for other in kept}:
            kept.append(term)
    return kept, [term for term in terms if term not in kept]


def _perm(kept: list[_Term], source_dims: int, target_dims: int) -> tuple[int, ...] | None:
    if source_dims > target_dims:
        raise Inexpressible(f"the tensor has {source_dims} dims, the parameter only {target_dims}")
    by_target = {term.at: term.dim for term in kept}
    free = [dim for dim in range(source_dims) if dim not in by_target.values()]
    perm = tuple(by_target[at] if at in by_target else free.pop(0) for at in range(target_dims - source_dims, target_dims))
    return None if perm == tuple(range(source_dims)) else perm


def _index(offset: int, shape: Shape) -> list[int]:
    return [offset // stride % extent for extent, stride in zip(shape, _strides(shape), strict=True)]


def _box(origin: list[int], extents: dict[int, int], shape: Shape) -> Box:
    box = tuple((lo, lo + extents.get(dim, 1)) for dim, lo in enumerate(origin))
    if any(hi > size for (_, hi), size in zip(box, shape, strict=True)):
        raise Inexpressible(f"the copy runs over the end of a dim of {shape}")
    return box

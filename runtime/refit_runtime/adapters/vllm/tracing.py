"""Tensors without storage that stand for a checkpoint's, and remember which of its elements they show.

A loader that gets one may cut, reshape and transpose it; when it copies the result into real memory the copy is handed to
a `Sink` instead of being made. Whatever needs the values (arithmetic, item, comparisons) raises `Untraceable`, naming the
operation, before anything was written. One value is known: a tensor that its loader sets to zero is zero from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from refit_runtime.adapters.vllm.geometry import Geometry, Inexpressible

aten = torch.ops.aten


class Untraceable(Exception):
    """A loader did something with `tensor` of the checkpoint that is not a view or a copy."""

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(reason)
        self.tensor = tensor


class Sink(Protocol):
    def copied(self, source: Traced, target: torch.Tensor) -> None:
        """`target` (live memory) would receive what `source` shows. Raises Untraceable."""
        ...

    def zeroed(self, source: Traced, target: torch.Tensor | None) -> None:
        """The loader set `source` to zero (no target), or copies such a tensor into `target`. Raises Untraceable."""
        ...


class Traced(torch.Tensor):
    """Shape, dtype and device of a tensor, without memory. Always looks contiguous: geometry knows better."""

    origin: str
    origin_shape: tuple[int, ...]
    geometry: Geometry
    sink: Sink
    zero: bool

    @staticmethod
    def __new__(cls, origin: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, sink: Sink) -> Traced:
        return cls._made(origin, tuple(shape), Geometry.whole(tuple(shape)), dtype, device, sink)

    @classmethod
    def _made(cls, origin: str, shape: tuple[int, ...], geometry: Geometry, dtype: torch.dtype, device: torch.device, sink: Sink) -> Traced:
        tensor: Traced = torch.Tensor._make_wrapper_subclass(cls, geometry.shape, dtype=dtype, device=device, requires_grad=False)
        tensor.origin, tensor.origin_shape, tensor.geometry, tensor.sink, tensor.zero = origin, shape, geometry, sink, False
        return tensor

    def showing(self, geometry: Geometry, dtype: torch.dtype | None = None) -> Traced:
        shown = self._made(self.origin, self.origin_shape, geometry, dtype if dtype is not None else self.dtype, self.device, self.sink)
        shown.zero = self.zero
        return shown

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({self.origin}, shape={tuple(self.geometry.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        traced = next(item for item in flat((*args, *(kwargs or {}).values())) if isinstance(item, Traced))
        if func.overloadpacket is aten.copy_:
            return _copy(*args[:2])
        operation = _OPERATIONS.get(func.overloadpacket)
        if operation is None or args[0] is not traced or func is aten.view.dtype:
            raise Untraceable(traced.origin, f"its loader needs the values ({func})")
        try:
            return operation(*args, **(kwargs or {}))
        except Inexpressible as error:
            raise Untraceable(traced.origin, f"{func}: {error}") from error


def flat(items: Sequence[Any]) -> list[Any]:
    return [leaf for item in items for leaf in (flat(item) if isinstance(item, list | tuple) else [item])]


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if isinstance(target, Traced) or not isinstance(source, Traced):
        traced = target if isinstance(target, Traced) else source
        assert isinstance(traced, Traced), "dispatched here because one is"
        raise Untraceable(traced.origin, "its loader writes into it")
    if source.zero:
        source.sink.zeroed(source, target)
    else:
        source.sink.copied(source, target)
    return target


def _zero(x: Traced) -> Traced:
    x.sink.zeroed(x, None)
    x.zero = True
    return x


def _same(x: Traced, *_: Any, **__: Any) -> Traced:
    return x.showing(x.geometry)


def _cast(x: Traced, *, dtype: torch.dtype | None = None, **_: Any) -> Traced:
    return x.showing(x.geometry, dtype)


def _dim(x: Traced, dim: int) -> int:
    return dim % max(x.ndim, 1)


def _view(x: Traced, shape: Sequence[int], **_: Any) -> Traced:
    known = [extent for extent in shape if extent != -1]
    missing = x.numel() // max(torch.Size(known).numel(), 1)
    return x.showing(x.geometry.view(tuple(missing if extent == -1 else extent for extent in shape)))


def _slice(x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Traced:
    dim = _dim(x, dim)
    chosen = range(x.shape[dim])[slice(start, end, step)]
    return x.showing(x.geometry.narrow(dim, chosen.start, len(chosen), step))


def _select(x: Traced, dim: int, index: int) -> Traced:
    dim = _dim(x, dim)
    return x.showing(x.geometry.select(dim, range(x.shape[dim])[index]))


def _unbind(x: Traced, dim: int = 0) -> list[Traced]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _split(x: Traced, size: int | Sequence[int], dim: int = 0) -> list[Traced]:
    extent = x.shape[dim]
    sizes = [min(size, extent - lo) for lo in range(0, extent, size)] if isinstance(size, int) else list(size)
    return [_slice(x, dim, sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(len(sizes))]


def _permute(x: Traced, order: Sequence[int]) -> Traced:
    return x.showing(x.geometry.permute([_dim(x, dim) for dim in order]))


def _transpose(x: Traced, first: int, second: int) -> Traced:
    order = list(range(x.ndim))
    a, b = _dim(x, first), _dim(x, second)
    order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _t(x: Traced) -> Traced:
    return _permute(x, list(range(x.ndim))[::-1])


def _unsqueeze(x: Traced, dim: int) -> Traced:
    shape = list(x.shape)
    shape.insert(dim % (x.ndim + 1), 1)
    return _view(x, shape)


def _squeeze(x: Traced, dim: int | Sequence[int] | None = None) -> Traced:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(x, one) for one in dims}
    return _view(x, [extent for one, extent in enumerate(x.shape) if one not in gone or extent != 1])


def _index(x: Traced, indices: Sequence[torch.Tensor | None]) -> Traced:
    """Of one dim, at equal steps: the experts that a rank has."""
    chosen = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(chosen) != 1:
        raise Inexpressible(f"it is indexed by {len(chosen)} tensors")
    return _index_select(x, *chosen[0])


def _index_select(x: Traced, dim: int, index: torch.Tensor) -> Traced:
    dim, places = _dim(x, dim), [place % x.shape[_dim(x, dim)] for place in index.tolist()] if index.ndim == 1 and index.dtype != torch.bool else []
    step = places[1] - places[0] if len(places) > 1 else 1
    if not places or step < 1 or places != list(range(places[0], places[-1] + 1, step)):
        raise Inexpressible("it is indexed by places that are not at equal steps")
    return _slice(x, dim, places[0], places[-1] + 1, step)


def _expand(x: Traced, shape: Sequence[int], **_: Any) -> Traced:
    ours = [1] * (len(shape) - x.ndim) + list(x.shape)
    return x.showing(x.geometry.expand([own if extent == -1 else extent for own, extent in zip(ours, shape, strict=True)]))


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.alias: _same,
    aten.detach: _same,
    aten.clone: _same,
    aten.contiguous: _same,
    aten.lift_fresh: _same,
    aten._to_copy: _cast,
    aten.view: _view,
    aten._unsafe_view: _view,
    aten.reshape: _view,
    aten._reshape_alias: _view,
    aten.slice: _slice,
    aten.select: _select,
    aten.unbind: _unbind,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: _t,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.expand: _expand,
    aten.index: _index,
    aten.index_select: _index_select,
    aten.zero_: _zero,
}

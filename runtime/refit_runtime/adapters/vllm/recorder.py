"""What an engine's own loader does, as needs: the model's `load_weights`, run on tensors without storage.

Nothing is known here about model families: whichever box of which checkpoint tensor the loader copies into which bytes of
which parameter, is a need. Live memory is not touched, except by constants that the loader itself writes (padding rows).

Invariants: a tensor whose loader does anything else is named with module, loader and reason and does not stop the others;
a loader that computes with what lies in a parameter (a copy, then its exponential) is stopped before it does;
every element of every parameter is a need's, a constant of the loader's or declared (`UNWRITTEN`), or the parameter is named;
`require` refuses what is named.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from refit_api.errors import UnsupportedLayout
from refit_api.tensors import Box, Dtype, Need, Parameter, Shape, TensorSpec, whole
from torch.utils._python_dispatch import TorchDispatchMode

from refit_runtime.adapters.vllm.geometry import Geometry, Inexpressible, pieces
from refit_runtime.adapters.vllm.tracing import Traced, Untraceable, flat
from refit_runtime.plan.boxes import covered

UNWRITTEN = (
    "inv_freq", "cos_sin_cache", "cos_cached", "sin_cached", "q_scale", "k_scale", "v_scale", "prob_scale", "q_range", "k_range", "v_range",
)  # fmt: skip
"""Last parts of the names of parameters that engines compute by themselves: rotary tables, scales of an unquantised KV cache and their ranges."""


def computed(name: str) -> bool:
    """Engines keep some of them on the host as well."""
    return name.removesuffix("_cpu").endswith(UNWRITTEN)


_SHAPED_ALIKE = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
)
"""What asks a parameter for its shape and type only."""

MAX_FAILURES = 32  # a loader that fails on every tensor is one finding, not thousands

Weights = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Failure:
    """`name`: the tensor or parameter that could not be recorded; `module` it belongs to, and the function of the `loader` that was at it, if known."""

    name: str
    reason: str
    module: str = ""
    loader: str = ""

    def __str__(self) -> str:
        where = [f"of module {self.module}" if self.module else "", f"in {self.loader}" if self.loader else ""]
        return " ".join(filter(None, (self.name, *where))) + f": {self.reason}"


@dataclass(frozen=True, slots=True)
class Recording:
    """`unwritten`: parameters that may stay as they are, wholly or in parts. `constants`: places that the loader filled, with what."""

    needs: tuple[Need, ...]
    unwritten: tuple[Parameter, ...]
    failures: tuple[Failure, ...]
    constants: tuple[tuple[torch.Tensor, Any], ...] = field(default=(), compare=False)

    def fill(self) -> None:
        """Once more, where something else wrote after the recording."""
        with torch.no_grad():
            for place, value in self.constants:
                place.fill_(value)

    def require(self, model: str) -> None:
        """Refuses a recording with failures."""
        if self.failures:
            listed = "; ".join(map(str, self.failures[:8]))
            raise UnsupportedLayout(
                f"{model}: the engine's loader could not be followed for {len(self.failures)} tensors or parameters ({listed}); "
                "this model cannot be refitted in place until Refit supports its loader",
                model=model,
                failures=len(self.failures),
            )


def record(module: torch.nn.Module, tensors: Sequence[TensorSpec], load: Callable[[Weights], Any]) -> Recording:
    """`load` is the model's `load_weights`, `tensors` those of a checkpoint, by checkpoint name."""
    ledger = _Ledger.of(module)
    with torch.no_grad(), _Guard(ledger):
        _feed(ledger, tensors, load)
    ledger.failures += _replaced(ledger, module)
    ledger.failures += _holes(ledger)
    return Recording(tuple(ledger.needs), tuple(ledger.constant), tuple(ledger.failures), tuple(ledger.fills))


def live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; one that has several names has its first."""
    found = {name: parameter.data for name, parameter in module.named_parameters()}
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                found.setdefault(name, buffer)
    return found


@dataclass(frozen=True, slots=True)
class _Entry:
    facts: Parameter
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def module(self) -> str:
        return self.facts.name.rpartition(".")[0]


@dataclass(slots=True)
class _Ledger:
    """Where every storage belongs, and what was recorded; the sink of traced tensors."""

    parameters: list[_Entry]
    by_storage: dict[int, list[_Entry]]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)
    constant: dict[Parameter, list[Box]] = field(default_factory=dict)
    fills: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    overwritten: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Ledger:
        own = {name for name, _ in module.named_parameters()}
        entries = [
            _Entry(Parameter(name, Dtype(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape)), tensor, name in own)
            for name, tensor in live_tensors(module).items()
            if str(tensor.dtype).removeprefix("torch.") in Dtype._value2member_map_
        ]
        by_storage = defaultdict(list)
        for entry in entries:
            by_storage[storage(entry.tensor)].append(entry)
        return cls(entries, dict(by_storage))

    def copied(self, source: Traced, target: torch.Tensor) -> None:
        entry = self._owner_for(source, target)
        if source.origin in self.overwritten:
            raise Untraceable(source.origin, "its loader writes into a part of it")
        if source.dtype not in (self.dtypes[source.origin], target.dtype):
            raise Untraceable(source.origin, f"its loader casts it to {source.dtype} on the way to {target.dtype}")
        try:
            found = pieces(source.geometry, source.origin_shape, _place(entry, target), entry.facts.shape)
        except Inexpressible as error:
            raise Untraceable(source.origin, f"copied into {entry.facts.name}: {error}") from error
        self.needs += [Need(source.origin, piece.box, entry.facts, piece.at, piece.perm, source.origin_shape) for piece in found]

    def zeroed(self, source: Traced, target: torch.Tensor | None) -> None:
        self.overwritten.add(source.origin)
        if target is not None:
            self.filled(self._owner_for(source, target), target, 0)
            target.zero_()

    def filled(self, entry: _Entry, target: torch.Tensor, value: Any) -> None:
        """A constant takes the place of `target`."""
        shape = tuple(target.shape)
        boxes = [piece.at for piece in pieces(Geometry.whole(shape), shape, _place(entry, target), entry.facts.shape)]
        self.constant.setdefault(entry.facts, []).extend(boxes)
        self.fills.append((target.detach(), value))

    def _owner_for(self, source: Traced, target: torch.Tensor) -> _Entry:
        entry = self.owner(target)
        if entry is None:
            raise Untraceable(source.origin, f"its loader copies it into a tensor of shape {tuple(target.shape)} that is no parameter")
        return entry

    def last_into(self, entry: _Entry) -> str:
        """The tensor that was copied there last; the parameter's own name if none was."""
        return next((need.tensor for need in reversed(self.needs) if need.parameter == entry.facts), entry.facts.name)

    def owner(self, tensor: torch.Tensor) -> _Entry | None:
        """The parameter that `tensor` is a view of."""
        for entry in self.by_storage.get(storage(tensor), ()):
            first = tensor.storage_offset() - entry.tensor.storage_offset()
            if tensor.dtype == entry.tensor.dtype and 0 <= first < max(entry.tensor.numel(), 1) and entry.tensor.is_contiguous():
                return entry
        return None


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which parameters a loader fills with constants; the fills themselves happen. Nothing else is done with live memory, but to view it."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = [item for item in flat((*args, *(kwargs or {}).values())) if isinstance(item, torch.Tensor)]
        if not func.is_view and func.overloadpacket not in _SHAPED_ALIKE and not any(isinstance(item, Traced) for item in given):
            entry = next(filter(None, map(self.ledger.owner, given)), None)
            if entry is not None:
                self._used(func, entry, args)
        return func(*args, **(kwargs or {}))

    def _used(self, func: Any, entry: _Entry, args: tuple[Any, ...]) -> None:
        if func.overloadpacket not in (torch.ops.aten.fill_, torch.ops.aten.zero_) or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
            raise Untraceable(self.ledger.last_into(entry), f"its loader computes with what lies in {entry.facts.name} ({func})")
        if args[0].numel():
            self.ledger.filled(entry, args[0], args[1] if len(args) > 1 else 0)


def _feed(ledger: _Ledger, tensors: Sequence[TensorSpec], load: Callable[[Weights], Any]) -> None:
    """Runs the loader over all tensors, and again over the rest after each failure."""
    device = next((entry.tensor.device for entry in ledger.parameters), torch.device("cpu"))
    ledger.dtypes = {spec.name: getattr(torch, spec.dtype.value) for spec in tensors}
    pending = list(tensors)
    while pending:
        fed: list[str] = []
        try:
            load(_yielding(pending, fed, lambda spec: Traced(spec.name, spec.shape, ledger.dtypes[spec.name], device, ledger)))
            return
        except Untraceable as error:
            culprit, failure = error.tensor, Failure(error.tensor, str(error), *_place_of(error, ledger))
        except Exception as error:  # noqa: BLE001  loaders are foreign code: an assert or a KeyError is a finding about one tensor
            culprit = fed[-1] if fed else "load_weights"
            failure = Failure(culprit, f"{type(error).__name__}: {error}", *_place_of(error, ledger))
        ledger.failures.append(failure)
        ledger.needs = [need for need in ledger.needs if need.tensor != culprit]
        if len(ledger.failures) >= MAX_FAILURES or not fed:
            return
        pending = _rest(pending, fed, culprit, {need.tensor for need in ledger.needs})


def _yielding(specs: Iterable[TensorSpec], fed: list[str], traced: Callable[[TensorSpec], Traced]) -> Weights:
    for spec in specs:
        fed.append(spec.name)
        yield spec.name, traced(spec)


def _rest(pending: list[TensorSpec], fed: list[str], culprit: str, done: set[str]) -> list[TensorSpec]:
    """What comes after the culprit; with a loader that collects tensors before it uses them, whatever was not used yet."""
    if fed[-1] == culprit:
        return pending[len(fed) :]
    return [spec for spec in pending if spec.name != culprit and spec.name not in done]


def _place_of(error: Exception, ledger: _Ledger) -> tuple[str, str]:
    """The module whose parameter the loader had in hand when it failed, and the loader's function."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if not frame.f_globals.get("__name__", "").startswith(("refit_runtime.", "torch."))]
    frames.reverse()
    loader = ".".join((frames[0].f_globals["__name__"], getattr(frames[0].f_code, "co_qualname", frames[0].f_code.co_name))) if frames else ""
    held = (value for frame in frames for value in frame.f_locals.values() if isinstance(value, torch.Tensor) and not isinstance(value, Traced))
    entry = next(filter(None, map(ledger.owner, held)), None)
    return entry.module if entry is not None else "", loader


def _replaced(ledger: _Ledger, module: torch.nn.Module) -> list[Failure]:
    """Parameters that a loader gave other memory: copies into the memory recorded would change nothing."""
    now = live_tensors(module)
    lost = [entry for entry in ledger.parameters if entry.facts.name not in now or storage(now[entry.facts.name]) != storage(entry.tensor)]
    return [Failure(entry.facts.name, "its loader puts other memory in its place", entry.module) for entry in lost]


def _holes(ledger: _Ledger) -> list[Failure]:
    """Parameters with elements that nothing writes; they are declared from here on, so that a plan of the rest can be made."""
    written: dict[str, list[Box]] = defaultdict(list)
    for need in ledger.needs:
        written[need.parameter.name].append(need.at)
    found = []
    for entry in ledger.parameters:
        boxes = (*written[entry.facts.name], *ledger.constant.get(entry.facts, ()))
        holes = _uncovered(entry.facts.shape, boxes) if entry.is_parameter and not entry.facts.name.endswith(UNWRITTEN) else ()
        if holes:
            where = "it" if not boxes else f"{', '.join(str([list(side) for side in box]) for box in holes[:3])} of it"
            found.append(Failure(entry.facts.name, f"no tensor of the checkpoint is written into {where}", entry.module))
        if holes or (entry.is_parameter and not boxes):
            ledger.constant.setdefault(entry.facts, [])
    return found


@lru_cache(maxsize=256)
def _uncovered(shape: Shape, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    return () if whole(shape) in boxes else tuple(covered(shape, boxes, lambda counts: counts == 0))


def _place(entry: _Entry, view: torch.Tensor) -> Geometry:
    return Geometry.strided(view.shape, view.stride(), int(view.storage_offset() - entry.tensor.storage_offset()))


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""The start-up self-test of what the engine makes of weights after loading: it is tried for every module, in the place where the engine does it.

Nothing is assumed about kinds of modules. One whose processing does not touch weights is left at that. Any other is processed again: from the same
contents it must come to what the engine came to; of other contents an install must make what processing makes of them, plain numbers included; and
nothing that is derived from weights may be left outside the module's own tensors. Then it is made again after installs, else named and refused.

Invariants: one module at a time has copies; afterwards its tensors are bit for bit what the engine's own processing left; every rank takes the same
steps whatever they find, since processing may be collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from refit_api.errors import InstallError

from refit_runtime.adapters.vllm.derived import Derived
from refit_runtime.adapters.vllm.recorder import computed, storage
from refit_runtime.adapters.vllm.remade import Contents, Filled, Pristine, Remade, attends, contents, processor, same, tensors

_PROCESS = "process_weights_after_loading"
_DEPTH = 3  # of objects in objects, in which numbers are looked for
WORDS = 1 << 20  # of a tensor, weighed at a time

Marks = dict[str, tuple[Any, ...]]
"""By attribute: where each tensor of a module lies, how it is laid out, and a number that any change of its contents changes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`marks`: of the module after its own processing, if that touches weights. `remade`: if it must be made again. `refused`: why it cannot be."""

    marks: Marks | None = None
    remade: Remade | None = None
    refused: str = ""


UNTOUCHED = Outcome()


@dataclass(slots=True)
class SelfTest:
    """`outcomes` of the modules that were processed, by name; `seconds`: what trying them took."""

    config: Any
    clock: Callable[[], float]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Stands where the engine calls what processes a module; an instance's attribute is found before its class's."""
        names = {module: name for name, module in model.named_modules()}
        processors = {id(one): one for one in map(processor, names) if one is not None}.values()
        for one in processors:
            vars(one)[_PROCESS] = self._stand_in(one, names)
        try:
            yield
        finally:
            for one in processors:
                vars(one).pop(_PROCESS, None)

    def _stand_in(self, processor: Any, names: dict[torch.nn.Module, str]) -> Callable[..., None]:
        def process(*args: Any) -> None:
            module = processor if isinstance(processor, torch.nn.Module) and attends(processor) else args[0]
            vars(processor).pop(_PROCESS)
            try:
                if module in names and names[module] not in self.outcomes:
                    self.outcomes[names[module]] = self._tried(names[module], module, processor, args)
                else:
                    processor.process_weights_after_loading(*args)
            finally:
                vars(processor)[_PROCESS] = process

        return process

    def _tried(self, name: str, module: torch.nn.Module, processor: Any, args: tuple[Any, ...]) -> Outcome:
        """The engine's own processing, then ours."""
        began = self.clock()
        before = _Before.of(module, processor)
        ended = self.clock()
        processor.process_weights_after_loading(*args)
        resumed = self.clock()
        outcome = _Trial(name, module, processor, before, self.config).outcome()
        self.seconds += self.clock() - resumed + ended - began
        return outcome


@dataclass(frozen=True, slots=True)
class _Before:
    """What a module was when loaders had filled it. `copies`: of its tensors, by attribute."""

    contents: Contents
    filled: dict[str, Filled]
    live: dict[str, torch.Tensor]
    copies: dict[str, torch.Tensor]

    @classmethod
    def of(cls, module: torch.nn.Module, processor: Any) -> _Before:
        filled = {own: Filled.of(parameter) for own, parameter in module._parameters.items() if parameter is not None}
        live = {own: tensor.detach() for own, tensor in tensors(module).items()}
        return cls(contents(module, processor), filled, live, {own: tensor.clone() for own, tensor in live.items()})

    def changed(self, after: dict[str, torch.Tensor]) -> set[str]:
        """Other place, layout or contents; what the engine computes by itself is none of ours."""
        return {own for own in self.copies.keys() | after.keys() | self.filled.keys() if not computed(own) and not self._stayed(own, after)}

    def _stayed(self, own: str, after: dict[str, torch.Tensor]) -> bool:
        if own not in self.live or own not in after:
            return False
        then, now = self.live[own], after[own]
        return (then.data_ptr(), then.stride()) == (now.data_ptr(), now.stride()) and same(self.copies[own], now)


class _Trial:
    """One module, which the engine has just processed."""

    def __init__(self, name: str, module: torch.nn.Module, processor: Any, before: _Before, config: Any) -> None:
        self._module, self._processor, self._before = module, processor, before
        loaded = {own: replace(one, tensor=before.copies.get(own, one.tensor)) for own, one in before.filled.items()}
        self._again = Remade(name, Pristine.since(module, processor, before.contents), loaded, config)

    def outcome(self) -> Outcome:
        changed, after = self._before.changed(tensors(self._module)), marks(self._module)
        seen = Derived()
        found = [_reason(lambda: self._stays_in_reach(seen))]
        if not seen.used and not changed and not any(found):
            return UNTOUCHED
        found.append(_reason(self._comes_out_alike))
        ready = self._ready(changed)
        with _kept(self._tensors(), ready):
            found.append(_reason(lambda: self._follows(ready)))
        return Outcome(after, ready if changed else None, "; ".join(filter(None, found)))

    def _stays_in_reach(self, seen: Derived) -> str:
        """Where what is derived from weights goes."""
        weights = [tensor for one in self._module.modules() for own, tensor in tensors(one).items() if not computed(own)]
        with self._again.processed(lambda copies: seen.follow(weights, copies)):
            left = seen.left(tensor for one in self._module.modules() for tensor in tensors(one).values())
        if left:
            return f"{left} tensors made of its weights are kept outside of it"
        return f"its weights go into what is no tensor ({', '.join(sorted(set(seen.handles)))})" if seen.handles else ""

    def _comes_out_alike(self) -> str:
        """From the same contents, what the engine came to."""
        live = tensors(self._module)
        with self._again.processed():
            different = _different(tensors(self._module), live)
        return f"processing the same weights again comes to something else ({', '.join(different)})" if different else ""

    def _follows(self, ready: Remade) -> str:
        """With other contents, an install comes to what processing comes to."""
        _alter(self._module, ready)
        ready.make()
        made, kept = tensors(self._module), numbers(self._module, self._processor)
        with ready.processed():
            different, now = _different(tensors(self._module), made), numbers(self._module, self._processor)
        if different:
            return f"an install of other weights would not come to what processing comes to ({', '.join(different)})"
        stale = sorted(".".join(path) for path in now.keys() | kept.keys() if now.get(path) != kept.get(path))
        return f"it keeps numbers that follow from its weights ({', '.join(stale)})" if stale else ""

    def _ready(self, changed: set[str]) -> Remade:
        """For installs: only what processing changed is kept beside the module, in the memory that loaders filled where that is free now."""
        used = {storage(tensor) for tensor in tensors(self._module).values()}
        spare = {}
        for own in changed & self._again.spare.keys():
            filled = self._before.filled[own]
            free = not filled.tensor.is_meta and storage(filled.tensor) not in used
            spare[own] = filled if free else self._again.spare[own].apart()
            if free:
                filled.tensor.copy_(self._before.copies[own])
        return replace(self._again, spare=spare)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for one in self._module.modules() for tensor in tensors(one).values()]


def _reason(step: Callable[[], str]) -> str:
    try:
        return step()
    except InstallError as error:
        return error.message


@contextmanager
def _kept(live: list[torch.Tensor], ready: Remade) -> Iterator[None]:
    """Afterwards all of these have the contents that they have now."""
    held = [(tensor, tensor.detach().clone()) for tensor in (*live, *(one.tensor for one in ready.spare.values()))]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in held:
                if not same(tensor, copy):
                    tensor.data.copy_(copy)


def _different(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    return sorted(own for own in some.keys() | others.keys() if own not in some or own not in others or not same(some[own], others[own]))


def _alter(module: torch.nn.Module, ready: Remade) -> None:
    """Other contents for whatever loaders fill: in the module, in those it is made of, and in spare memory."""
    live = [(own, one) for part in module.modules() for own, one in part._parameters.items() if one is not None and not one.is_meta]
    for own, tensor in (*live, *((own, one.tensor) for own, one in ready.spare.items())):
        if not computed(own):
            with torch.no_grad():
                tensor.data.copy_(_other(tensor.data))


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of a weight's kind, or the same ones in another order where each must keep its meaning (indices, packed bits)."""
    random = torch.Generator(tensor.device).manual_seed(tensor.numel())
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, generator=random, device=tensor.device, dtype=torch.float32).add_(0.5).to(tensor.dtype)
    return tensor.reshape(-1)[torch.randperm(tensor.numel(), generator=random, device=tensor.device)].reshape(tensor.shape)


def numbers(*owners: Any) -> dict[tuple[str, ...], str]:
    """Plain numbers that these objects hold, and those of the engine's kinds in them: what no copy into a tensor reaches."""
    found: dict[tuple[str, ...], str] = {}

    def look(at: Any, path: tuple[str, ...]) -> None:
        for name, value in vars(at).items():
            if isinstance(value, bool | int | float):
                found[(*path, name)] = repr(value)
            elif len(path) < _DEPTH and _engines(value):
                look(value, (*path, name))

    for owner in owners:
        look(owner, (type(owner).__name__,))
    return found


def _engines(value: Any) -> bool:
    return type(value).__module__.startswith("vllm.") and not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__")


def marks(module: torch.nn.Module) -> Marks:
    return {own: _mark(tensor) for own, tensor in tensors(module).items() if not computed(own)}


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, _weight(tensor)


def _weight(tensor: torch.Tensor) -> int:
    """A sum over the bytes in which every place counts differently; wraps at 64 bits."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    places = torch.arange(1, WORDS + 1, dtype=torch.int64, device=data.device)
    total = 0
    for start in range(0, data.numel(), WORDS):
        part = data[start : start + WORDS].to(torch.int64) + 1
        total = (total * 1_000_003 + int((part * places[: part.numel()]).sum())) % (1 << 64)
    return total

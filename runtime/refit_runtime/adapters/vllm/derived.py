"""What comes out of a module's weights while the engine processes them: every tensor that was computed from them, wherever it is kept.

An install reaches tensors of modules. What processing derives and keeps elsewhere (in a closure, a kernel object, a table of the process, a handle of
a library's own) would stay that of the version before, and nobody would see it: so it is found while it is made. Storages are followed from the weights
through every operation, whatever names they get. A kernel that is launched past PyTorch's dispatcher is not seen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from refit_runtime.adapters.vllm.recorder import storage
from refit_runtime.adapters.vllm.tracing import flat


class Derived(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`handles`: operations that took weights and gave something else than tensors. `used`: whether any operation took weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._from: set[int] = set()
        self._made: dict[int, StorageWeakRef] = {}
        self.handles: list[str] = []
        self.used = False

    def follow(self, weights: Iterable[torch.Tensor], copies: Iterable[torch.Tensor]) -> Derived:
        """`copies` were made for the processing to come: they too must not be left anywhere."""
        self._from.update(storage(tensor) for tensor in weights)
        for tensor in copies:
            self._note(tensor)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(storage(tensor) in self._from for tensor in _tensors((*args, *(kwargs or {}).values()))):
            self.used = True
            given = out if isinstance(out, tuple | list) else (out,)
            if func.namespace != "aten" and any(one is not None and not isinstance(one, torch.Tensor) for one in flat(given)):
                self.handles.append(str(func))
            for tensor in (*_tensors(given), *_written(func, args, kwargs or {})):
                self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        where = storage(tensor)
        if where not in self._from:
            self._from.add(where)
            self._made[where] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def left(self, known: Iterable[torch.Tensor]) -> int:
        """How many storages were derived, are still there and are none of the `known` tensors'."""
        mine = {storage(tensor) for tensor in known}
        if self._alive(mine):
            gc.collect()
        return self._alive(mine)

    def _alive(self, mine: set[int]) -> int:
        return sum(where not in mine and not ref.expired() for where, ref in self._made.items())  # type: ignore[no-untyped-call]


def _tensors(items: Iterable[Any]) -> list[torch.Tensor]:
    return [item for item in flat(list(items)) if isinstance(item, torch.Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that the operation writes into."""
    arguments = func._schema.arguments
    written = {argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write}
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return _tensors(value for name, value in named.items() if name in written)

"""What fails on order, at the ports of a generator: the engine's door, the memory that copies, the catalog; and the client that would notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from refit_api.errors import RefitError
from refit_runtime.adapters.local_engine import Gate, LocalEngine
from refit_runtime.ports import Copies
from refit_runtime.wiring import DeviceMemory

from tests.runtime.steps import same


class EngineCoreDied(Exception):
    """As an engine's client raises it: none of ours."""


class Failing:
    """An engine that does at some calls something else than it was asked for: `raises`, `hangs`, or does it and `gives no answer`."""

    def __init__(self, *arguments: Any) -> None:
        self._engine = LocalEngine(*arguments)
        self.faults: dict[str, str] = {}
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Callable[..., Any]:
        async def asked(*arguments: Any) -> Any:
            fault = self.faults.get(call, "")
            self.calls.append(call)
            if fault == "raises":
                raise EngineCoreDied("see the stack trace above")
            done = None if fault == "hangs" else await getattr(self._engine, call)(*arguments)
            return await asyncio.Event().wait() if fault else done

        return asked


class Tripping(DeviceMemory):
    """`trips`: (place in the list, what happens there), one for each time that copies are run."""

    def __init__(self) -> None:
        super().__init__()
        self.trips: list[tuple[int, Callable[[], object]]] = []
        self.digest: Callable[[], object] = lambda: None

    def copies(self, pairs: Any) -> Copies:
        return TrippingCopies(self, super().copies(pairs), pairs)

    def digests(self, data: Any, digests: Any) -> bytes:
        self.digest()
        return super().digests(data, digests)


class TrippingCopies:
    def __init__(self, memory: Tripping, whole: Copies, pairs: Any) -> None:
        self._memory, self._whole, self._pairs = memory, whole, pairs

    def start(self) -> None:
        if not self._memory.trips:
            self._whole.start()
            return
        place, trip = self._memory.trips.pop(0)
        with torch.no_grad():
            for number, (to, source) in enumerate(self._pairs):
                if number == place % len(self._pairs):
                    trip()
                to.copy_(source)

    def wait(self) -> None:
        """All is done when they have started."""


class Client:
    """Asks all the time, and compares what answers with the version that it names."""

    def __init__(self, gate: Gate, targets: list[torch.nn.Module]) -> None:
        self.published: dict[int, torch.nn.Module] = {}
        self.answered: set[int] = set()
        self.wrong: list[int] = []
        self._gate, self._targets, self._stop = gate, targets, threading.Event()

    def ask(self) -> None:
        while not self._stop.wait(0.002):
            try:
                with self._gate.request(0.05) as version:
                    whole = all(same(self.published[version], target) for target in self._targets)
            except RefitError:
                continue
            self.answered.add(version)
            if not whole:
                self.wrong.append(version)

    @contextmanager
    def asking(self) -> Iterator[None]:
        thread = threading.Thread(target=self.ask)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(30)
        assert self.wrong == []


class Answers:
    """The catalog, but for some calls."""

    def __init__(self, inner: Any, answers: dict[str, Any]) -> None:
        self._inner, self._answers = inner, answers

    def __getattr__(self, name: str) -> Any:
        answer = self._answers.get(name)
        return (lambda *arguments: answer(self._inner, *arguments)) if answer is not None else getattr(self._inner, name)

"""The client of an orchestrator: which versions there are, wait for them, end them. Optional; everything works without it.

A version is created by the trainers' `publish`, which alone know its slots: `create` waits for the one with a run's step. Each call has an
asyncio twin of the same name in `aio`, which runs it in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from refit_api.errors import CatalogUnavailable, TransferTimeout, VersionRetired
from refit_api.wire import EndVersion, GetVersion, GroupRef, ListVersions, Version, VersionFacts, VersionPhase

from refit_runtime.ports import Catalog, Clock
from refit_runtime.settings import RuntimeSettings

WAIT_SECONDS = 15.0
LOOK_SECONDS = 0.2
T = TypeVar("T")


class ControlClient:
    """Of one group. The caller's token needs to read the RefitGroup, or to be that of a pod of the group."""

    def __init__(self, settings: RuntimeSettings, catalog: Catalog, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock
        self._group = GroupRef(settings.group.namespace, settings.group.name)
        self.aio = AsyncControl(self)

    def create(self, run_id: str, step: int, timeout: float) -> Version:
        """The version of a step, once a trainer rank has begun to publish it."""
        key = f"{run_id}:{step}"
        return self._until(timeout, f"step {step} of run {run_id}", lambda: next((version for version in self.list() if version.key == key), None))

    def wait_ready(self, number: int, timeout: float) -> Version:
        """Raises VersionRetired if it failed or was ended, TransferTimeout."""

        def ready() -> Version | None:
            version = self._facts(number, min(timeout, WAIT_SECONDS)).version
            return version if version.phase is not VersionPhase.PUBLISHING else None

        version = self._until(timeout, f"version {number}", ready)
        if version.phase is not VersionPhase.READY:
            raise VersionRetired(f"version {number} is {version.phase.value} ({version.reason})", seen=version.phase.value)
        return version

    def wait_converged(self, number: int, timeout: float) -> VersionFacts:
        """Every registered generator serves it on all its ranks."""

        def converged() -> VersionFacts | None:
            facts = self._facts(number, 0.0)
            return facts if 0 < facts.generators == facts.serving else None

        return self._until(timeout, f"version {number} on all generators", converged)

    def retire(self, number: int, drain: float = 0.0) -> bool:
        """No new leases. Waits up to `drain` seconds until it is Released; tells whether it is."""
        self._catalog.retire_version(EndVersion(self._group, number, "retired by an orchestrator"))
        deadline = self._clock.monotonic() + drain
        while not (released := self._released(number)) and self._clock.monotonic() < deadline:
            self._clock.sleep(LOOK_SECONDS)
        return released

    def _released(self, number: int) -> bool:
        try:
            return self._facts(number, 0.0).version.phase in (VersionPhase.RELEASED, VersionPhase.FAILED)
        except VersionRetired:
            return True

    def abort(self, number: int, reason: str) -> None:
        """Fails a version that is still Publishing, or ends one that is Ready."""
        self._catalog.abort_version(EndVersion(self._group, number, reason))

    def list(self, after: int = 0) -> tuple[Version, ...]:
        """Oldest first."""
        return self._catalog.list_versions(ListVersions(self._group, after)).versions

    def watch(self, after: int = 0) -> Iterator[Version]:
        """Each version when it is created and whenever it changes; ends with CatalogUnavailable when the catalog goes away."""
        return self._catalog.watch_versions(ListVersions(self._group, after))

    def close(self) -> None:
        self._catalog.close()

    def _facts(self, number: int, wait: float) -> VersionFacts:
        return self._catalog.get_version(GetVersion(self._group, number, (), wait))

    def _until(self, timeout: float, what: str, look: Callable[[], T | None]) -> T:
        deadline = self._clock.monotonic() + timeout
        while True:
            try:
                found = look()
            except CatalogUnavailable:
                found = None
            if found is not None:
                return found
            if self._clock.monotonic() >= deadline:
                raise TransferTimeout(f"{what}: not there after {timeout:g} s")
            self._clock.sleep(LOOK_SECONDS)


class AsyncControl:
    """The same calls for asyncio."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    async def create(self, run_id: str, step: int, timeout: float) -> Version:
        return await asyncio.to_thread(self._control.create, run_id, step, timeout)

    async def wait_ready(self, number: int, timeout: float) -> Version:
        return await asyncio.to_thread(self._control.wait_ready, number, timeout)

    async def wait_converged(self, number: int, timeout: float) -> VersionFacts:
        return await asyncio.to_thread(self._control.wait_converged, number, timeout)

    async def retire(self, number: int, drain: float = 0.0) -> bool:
        return await asyncio.to_thread(self._control.retire, number, drain)

    async def abort(self, number: int, reason: str) -> None:
        await asyncio.to_thread(self._control.abort, number, reason)

    async def list(self, after: int = 0) -> tuple[Version, ...]:
        return await asyncio.to_thread(self._control.list, after)

    async def watch(self, after: int = 0) -> AsyncIterator[Version]:
        versions = self._control.watch(after)
        while (version := await asyncio.to_thread(next, versions, None)) is not None:
            yield version

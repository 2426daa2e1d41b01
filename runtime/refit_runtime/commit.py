"""The transaction of a generator: all ranks of all engine cores serve the version afterwards, or none does.

    prepare -> pause -> install -> label -> resume

| what goes wrong at | by an error | without an answer in time |
|---|---|---|
| prepare | the old version serves on | the old version serves on |
| pause (and the cache's reset with it) | resumed on the old version | resumed on the old version, else fenced and ended |
| install, on a rank | once more, then the version before if all ranks hold it, else fenced | fenced and ended |
| install, of the engine | fenced and ended: what its ranks have is not known | fenced and ended |
| label, resume | fenced | fenced and ended |

The label comes after the last install and before the first token (O10). From the pause until it serves or is fenced, what the ranks say is not yet true
of the generator: `open` is False. An agent that dies in between leaves the engine paused; the next one asks the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import structlog
from refit_api import codec
from refit_api.errors import EngineHung, MixedRanks, RefitError, StaleOrder, VersionRetired
from refit_api.wire import GetVersion, GroupRef, RankReport, Timing, VersionFacts, VersionPhase

from refit_runtime.fence import Fence
from refit_runtime.ports import Clock, CommitDriver, CommitOrder
from refit_runtime.settings import RuntimeSettings
from refit_runtime.stopwatch import Stopwatch

log = structlog.get_logger(__name__)
T = TypeVar("T")


class Record(Protocol):
    """Whether the version is still Ready, and its root."""

    def get_version(self, request: GetVersion) -> VersionFacts: ...


class Commit:
    """Of one generator; one at a time. The engine's calls end, and raise errors of ours only: an agent's is behind a `Door`."""

    def __init__(self, settings: RuntimeSettings, catalog: Record, engine: CommitDriver, fence: Fence, clock: Clock) -> None:
        self._settings, self._catalog, self._engine, self._fence, self._clock = settings, catalog, engine, fence, clock
        self._watch = Stopwatch(clock)
        self.timings: tuple[Timing, ...] = ()  # of the last commit, once it ended well, beside what ranks measured
        self.open = True
        self._group = GroupRef(settings.group.namespace, settings.group.name)

    async def run(self, order: CommitOrder) -> None:
        """Raises what kept it from serving the version; after it the engine serves one version, or is fenced."""
        before = await self._engine.status()
        if served(before) == order.number and not self._fence.reason:
            return
        self._watch, self.timings = Stopwatch(self._clock), ()
        with self._watch.timed("prepare"):
            await self._prepare(order, before)
        self.open = False
        try:
            await self._pause()
            failed = await self._install(order)
            if failed is None:
                await self._serve(order.number)
                return
            previous = served(before)
            if previous and await self._install(replace(order, number=previous)) is None:
                log.warning("the version before was put back", version=order.number, previous=previous, error=failed.message)
                await self._serve(previous)
                raise failed
            await self._fence.shut(f"version {order.number} could not be installed: {failed.message}")
            raise failed
        finally:
            self.open = True

    async def _prepare(self, order: CommitOrder, before: Sequence[RankReport]) -> None:
        """Every rank has the same whole version, the catalog's, in the process that staged it."""
        incarnations = {rank.worker.rank: rank.worker.incarnation for rank in before}
        ranks = await self._engine.prepare(order)
        errors = [rank.error for rank in ranks if rank.error is not None]
        if errors:
            raise codec.error_of(errors[0])
        seen = {(rank.arena, rank.plan_key, rank.arena_root) if rank.serving != order.number else (rank.serving, "", rank.serving_root) for rank in ranks}
        facts = await asyncio.to_thread(self._catalog.get_version, GetVersion(self._group, order.number, (0,)))
        version = facts.version
        if version.phase is not VersionPhase.READY:
            raise VersionRetired(f"version {order.number} is {version.phase.value}: it is not installed", seen=version.phase.value)
        expected = {(version.number, version.plan_key, version.root), (version.number, "", version.root)}
        if not seen <= expected or not ranks:
            raise MixedRanks(f"the ranks do not hold version {order.number} alike: nothing is installed", seen=sorted(number for number, _, _ in seen))
        changed = [rank.worker.rank for rank in ranks if incarnations.get(rank.worker.rank) != rank.worker.incarnation]
        if changed:
            raise StaleOrder(f"ranks {changed} started again since they staged: nothing is installed", seen=changed, retry_after=1.0)

    async def _pause(self) -> None:
        engine = self._settings.engine
        try:
            with self._watch.timed("pause"):
                await self._engine.pause(engine.pause.lower(), engine.kv == "Reset", engine.pause_timeout_seconds)
        except RefitError:
            if not self._fence.reason:
                await self._finish("resume", self._engine.resume())
            raise

    async def _install(self, order: CommitOrder) -> RefitError | None:
        """Twice, if the first try fails: the arena is intact. None: all ranks have it."""
        failed: RefitError | None = None
        for _ in range(2):
            ranks = await self._finish("install", self._engine.install(order))
            if ranks and served(ranks) == order.number:
                return None
            errors = [codec.error_of(rank.error) for rank in ranks if rank.error is not None]
            failed = errors[0] if errors else MixedRanks(f"not all ranks serve version {order.number} after its install")
            log.warning("install failed", version=order.number, error=failed.message, facts=failed.facts)
        return failed

    async def _serve(self, number: int) -> None:
        with self._watch.timed("label"):
            await self._finish("label", self._engine.label(number))
        with self._watch.timed("resume"):
            await self._finish("resume", self._engine.resume())
        self._fence.lift()
        self.timings = tuple(self._watch.timings)

    async def _finish(self, step: str, work: Coroutine[Any, Any, T]) -> T:
        """A step while paused: if it fails, nobody knows what the next request would meet."""
        try:
            return await work
        except RefitError as error:
            await self._fence.shut(error.message)
            if step == "install" or isinstance(error, EngineHung):
                await self._fence.end(error.message)
            error.retry_after = None  # a fenced generator gets a new order
            raise


def served(ranks: Sequence[RankReport]) -> int:
    """The version that all ranks serve, with one root; 0 if there is none."""
    seen = {(rank.serving, rank.serving_root) for rank in ranks}
    return next(iter(seen))[0] if len(seen) == 1 else 0

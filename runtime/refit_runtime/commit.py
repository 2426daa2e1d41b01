"""The transaction of a generator: all ranks of all engine cores serve the version afterwards, or none does.

    prepare -> pause -> install -> label -> resume

Before the install anything that goes wrong leaves the old version serving. A failed install is tried once more from the intact arena, then the version
before is put back if every rank still holds it; otherwise the engine stays fenced. A rank without an outcome in time is hung: the engine process ends.
The label comes after the last install and before the first token (O10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from refit_api import codec
from refit_api.errors import EngineBusy, InstallError, MixedRanks, RefitError, StaleOrder, VersionRetired
from refit_api.wire import GetVersion, GroupRef, RankReport, Timing, VersionPhase

from refit_runtime.ports import Catalog, Clock, CommitOrder, EngineDriver
from refit_runtime.settings import RuntimeSettings
from refit_runtime.stopwatch import Stopwatch

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Fence:
    """Why the engine refuses requests; empty: it does not."""

    reason: str = ""


class Commit:
    """Of one generator; one at a time."""

    def __init__(self, settings: RuntimeSettings, catalog: Catalog, driver: EngineDriver, fence: Fence, clock: Clock) -> None:
        self._settings, self._catalog, self._driver, self.fence, self._clock = settings, catalog, driver, fence, clock
        self._watch = Stopwatch(clock)
        self.timings: tuple[Timing, ...] = ()  # of the last commit, once it ended well, beside what ranks measured
        self._group = GroupRef(settings.group.namespace, settings.group.name)

    async def run(self, order: CommitOrder) -> None:
        """Raises what kept it from serving the version; after it the engine serves one version, or is fenced."""
        before = await self._driver.status()
        if served(before) == order.number and not self.fence.reason:
            return
        self._watch, self.timings = Stopwatch(self._clock), ()
        with self._watch.timed("prepare"):
            await self._prepare(order, before)
        engine = self._settings.engine
        try:
            with self._watch.timed("pause"):
                await self._driver.pause(engine.pause.lower(), engine.kv == "Reset", engine.pause_timeout_seconds)
        except EngineBusy:
            if not self.fence.reason:
                await self._driver.resume()
            raise
        failed = await self._install(order)
        if failed is None:
            await self._serve(order.number)
            return
        previous = served(before)
        if previous and await self._install(replace(order, number=previous)) is None:
            log.warning("the version before was put back", version=order.number, previous=previous, error=failed.message)
            await self._serve(previous)
            raise failed
        await self._shut(f"version {order.number} could not be installed: {failed.message}")
        raise failed

    async def _prepare(self, order: CommitOrder, before: Sequence[RankReport]) -> None:
        """Every rank has the same whole version, the catalog's, in the process that staged it."""
        incarnations = {rank.worker.rank: rank.worker.incarnation for rank in before}
        ranks = await self._driver.prepare(order)
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

    async def _install(self, order: CommitOrder) -> RefitError | None:
        """Twice, if the first try fails: the arena is intact. None: all ranks have it."""
        failed: RefitError | None = None
        for _ in range(2):
            try:
                ranks = await asyncio.wait_for(self._driver.install(order), self._settings.engine.pause_timeout_seconds)
            except asyncio.TimeoutError:
                failed = InstallError(f"a rank gave no outcome of installing version {order.number} in {self._settings.engine.pause_timeout_seconds:g} s")
                await self._shut(failed.message)
                await self._driver.end(failed.message)
                raise failed from None
            if ranks and served(ranks) == order.number:
                return None
            errors = [codec.error_of(rank.error) for rank in ranks if rank.error is not None]
            failed = errors[0] if errors else MixedRanks(f"not all ranks serve version {order.number} after its install")
            log.warning("install failed", version=order.number, error=failed.message, facts=failed.facts)
        return failed

    async def _serve(self, number: int) -> None:
        with self._watch.timed("label"):
            await self._driver.label(number)
        with self._watch.timed("resume"):
            await self._driver.resume()
        self.fence.reason, self.timings = "", tuple(self._watch.timings)

    async def _shut(self, reason: str) -> None:
        self.fence.reason = reason
        await self._driver.fence(reason)


def served(ranks: Sequence[RankReport]) -> int:
    """The version that all ranks serve, with one root; 0 if there is none."""
    seen = {(rank.serving, rank.serving_root) for rank in ranks}
    return next(iter(seen))[0] if len(seen) == 1 else 0

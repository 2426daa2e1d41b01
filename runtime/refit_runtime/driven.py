"""A rank of an engine that a framework drives through the engine's own calls: every rank is called by itself, and no agent compares what they did.

So the ranks compare. Each outcome is gathered from all of them, every rank decides the same from it, and the commit is the agent's, run by all in step.
Invariants: nothing is installed unless all ranks verified one version with one root; every rank raises what any of them met; a rank that is not heard
in time leaves the others fenced; a fenced rank runs nothing (`require`) before a whole install succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog
from refit_api.codec import detail_of, error_of
from refit_api.errors import EngineHung, MixedRanks, PeerUnavailable, RefitError, SpecError
from refit_api.wire import ErrorDetail, GetVersion, GroupRef, ListVersions, Order, RankPhase, RankReport, VersionFacts, VersionPhase

from refit_runtime.commit import Commit
from refit_runtime.fence import Fence
from refit_runtime.foreign import named
from refit_runtime.generator import GeneratorClient
from refit_runtime.ports import Ballot, Catalog, CommitOrder, Seams
from refit_runtime.rank import GeneratorRank, Staged
from refit_runtime.settings import RuntimeSettings

log = structlog.get_logger(__name__)

T = TypeVar("T")


class DrivenClient(GeneratorClient):
    """All ranks of the ballot get the same calls in the same order."""

    def __init__(self, settings: RuntimeSettings, coordinate: str, seams: Seams, ballot: Ballot, rank: int = 0, world: int = 1) -> None:
        super().__init__(settings, coordinate, seams, rank, world)
        self._ballot, self._world = ballot, world
        self._group = GroupRef(settings.group.namespace, settings.group.name)
        engine = _InStep(self._rank, ballot)
        self._commit = Commit(settings, _Recorded(ballot, seams.catalog), engine, Fence(settings, engine, seams.clock), seams.clock)

    def update(self, asked: int) -> int:
        """Stages and installs a version on all ranks, or on none; 0 asks for the newest that is Ready. The engine must be idle.

        Raises what kept any rank from it: then the version before is live, or the engine is fenced.
        """
        try:
            numbers = _all(self._ballot, lambda: asked or self._newest())
            if not asked and len(numbers) < self._world:
                raise SpecError(
                    "update_info.version: name it; this engine's cores act alone, and each would take its own newest", seen=len(numbers), expected=self._world
                )
            number = min(numbers)
            staged = _all(self._ballot, lambda: self._verified(number))
            if len(set(staged)) > 1:
                raise MixedRanks(f"the ranks do not hold version {number} alike: nothing is installed", seen=len(set(staged)), expected=1)
            order = CommitOrder(0, self._seq, number, Order.COMMIT, self._settings.engine.pause_timeout_seconds)
            asyncio.run(self._commit.run(order))
        except EngineHung as error:
            self._rank.fence(error.message)
            raise
        return number

    def _verified(self, number: int) -> Staged:
        """What was staged before the pause is not asked for again."""
        report = self._rank.report()
        ahead = report.phase is RankPhase.STAGED and report.arena == number
        return self._rank.staged(number) if ahead else self.stage(number)

    def require(self) -> None:
        """Raises MixedRanks while the live parameters must not be used."""
        if self._rank.live.torn:
            raise MixedRanks(f"this engine is fenced until a version is installed whole: {self._rank.failure().message}")

    def _newest(self) -> int:
        versions = self._seams.catalog.list_versions(ListVersions(self._group)).versions
        ready = [version.number for version in versions if version.phase is VersionPhase.READY]
        if not ready:
            raise PeerUnavailable(f"group {self._group.name}: no version is Ready; publish one, or wait for it", retry_after=1.0, seen=len(versions))
        return max(ready)


def _all(ballot: Ballot, work: Callable[[], T]) -> list[T]:
    """What each rank got. Raises, on all of them, what the first one that failed met."""
    mine: T | ErrorDetail
    try:
        with named("update"):
            mine = work()
    except RefitError as error:
        mine = detail_of(error)
    done: list[T] = []
    for outcome in ballot.gather(mine):
        if isinstance(outcome, ErrorDetail):
            raise error_of(outcome)
        done.append(outcome)
    return done


class _Recorded:
    """All ranks go by what the first one was told: two answers of a catalog may differ."""

    def __init__(self, ballot: Ballot, catalog: Catalog) -> None:
        self._ballot, self._catalog = ballot, catalog

    def get_version(self, request: GetVersion) -> VersionFacts:
        return _all(self._ballot, lambda: self._catalog.get_version(request))[0]


class _InStep:
    """The engine's ranks as a commit sees them, from one of them. Pausing, labels and the end of a process are the framework's."""

    silent_since = None  # who is not heard is the end of the ballot

    def __init__(self, rank: GeneratorRank, ballot: Ballot) -> None:
        self._rank, self._ballot = rank, ballot

    async def status(self) -> tuple[RankReport, ...]:
        return self._ballot.gather(self._rank.report())

    async def prepare(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return self._ballot.gather(self._rank.prepare(order))

    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None:
        """It is: the engine makes these calls between two steps."""

    async def install(self, order: CommitOrder) -> tuple[RankReport, ...]:
        return self._ballot.gather(self._rank.install(order))

    async def label(self, number: int) -> None:
        """With the framework's `finish_weight_update`."""

    async def resume(self) -> None:
        """When the framework resumes."""

    async def fence(self, reason: str) -> None:
        self._rank.fence(reason)

    async def end(self, reason: str) -> None:
        log.error("this engine must be restarted", reason=reason)

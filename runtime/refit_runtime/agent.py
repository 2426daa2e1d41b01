"""The pod agent: follows the operator's assignment, and is the one that commands all ranks of its generator.

- Orders are (catalogEpoch, seq); an older one is ignored. While the catalog is away the last assignment stands, and serving goes on.
- It stages while requests run and commits on order (`commit`), reports every move and once in a heartbeat, and leaves without breaking a reader.
- A restarted agent resumes the engine only if all ranks serve one version with one root; otherwise the engine is fenced (`fence`).
- An engine that gives no answer (`door`) keeps the agent from nothing: it goes on with what it heard last, and says so.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

import structlog
from refit_api import codec
from refit_api.errors import CatalogUnavailable, Denied, PeerUnavailable, RefitError, StaleOrder, TransferTimeout
from refit_api.wire import Assignment, GroupRef, Order, RankPhase, RankReport, Report, WatchAssignment, WorkerRef

from refit_runtime.commit import Commit, served
from refit_runtime.deadline import within
from refit_runtime.door import Door
from refit_runtime.fence import Fence
from refit_runtime.ports import Catalog, Clock, CommitOrder, EngineDriver, StageOrder
from refit_runtime.settings import RuntimeSettings

log = structlog.get_logger(__name__)

LOOK_SECONDS, MOVING_SECONDS = 1.0, 0.05
PROGRESS_SECONDS = 1.0
RETRY_SECONDS = (0.5, 2.0)
RETRIES = 5


@dataclass(frozen=True, slots=True)
class View:
    """For the pod's own endpoints. `version` 0: not ready."""

    version: int
    fenced: str
    target: int
    ranks: tuple[RankReport, ...]


class Agent:
    """`run` until cancelled; `leave` before the pod stops."""

    def __init__(self, settings: RuntimeSettings, catalog: Catalog, driver: EngineDriver, clock: Clock, random: Random) -> None:
        self._settings, self._catalog, self._clock, self._random = settings, catalog, clock, random
        self._group = GroupRef(settings.group.namespace, settings.group.name)
        self._engine = Door(driver, settings, clock)
        self._fence = Fence(settings, self._engine, clock)
        self._commit = Commit(settings, catalog, self._engine, self._fence, clock)
        self._assignment: Assignment | None = None
        self._worker: WorkerRef | None = None
        self._ranks: tuple[RankReport, ...] = ()
        self._error: RefitError | None = None  # of the last order
        self._silence: RefitError | None = None  # of an engine that does not say what its ranks do
        self._news, self._moved = asyncio.Event(), asyncio.Event()
        self._ended = threading.Event()
        self._leaving = False

    def view(self) -> View:
        return View(0 if self._fence.reason else served(self._ranks), self._fence.reason, self._assignment.target if self._assignment else 0, self._reported())

    async def run(self) -> None:
        try:
            await self._take_up()
        except RefitError as error:
            await self._fence.shut(error.message)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="refit-assignment", daemon=True).start()
        work = [asyncio.ensure_future(each) for each in (self._follow(), self._tell())]
        try:
            await asyncio.gather(*work)
        finally:  # when one fails: an agent that is half there would command the engine beside the next one
            self._ended.set()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._engine.close()

    async def _take_up(self) -> None:
        """An engine may have been left paused, or half installed."""
        self._ranks = await self._engine.status()
        number = served(self._ranks)
        if number:
            await self._engine.label(number)
            await self._engine.resume()
        elif any(rank.serving or rank.phase in (RankPhase.COMMITTING, RankPhase.FENCED) for rank in self._ranks):
            await self._fence.shut("the ranks do not serve one version: an install was left unfinished")

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """A thread: the catalog is a blocking client. Connects again at least every 2 s."""
        while not self._ended.is_set():
            try:
                if (worker := self._worker) is not None:
                    for assignment in self._catalog.watch_assignment(WatchAssignment(self._group, worker)):
                        loop.call_soon_threadsafe(self._take, assignment)
                        if self._ended.is_set():
                            return
            except StaleOrder:  # the rank has a new incarnation: the next look finds it
                log.info("the rank that speaks for this generator started again")
            except RefitError as error:
                log.info("assignments are not followed for now", error=error.message)
            except RuntimeError:  # the loop is closed
                return
            self._ended.wait(self._random.uniform(*RETRY_SECONDS) if self._worker is not None else MOVING_SECONDS)

    def _take(self, assignment: Assignment) -> None:
        known = self._assignment
        if known is None or (assignment.catalog_epoch, assignment.seq) > (known.catalog_epoch, known.seq):
            self._assignment = assignment
            self._news.set()

    async def _follow(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            assignment = self._assignment
            if assignment is None or not assignment.target or self._leaving:
                continue
            try:
                await self._carry_out(assignment)
                self._error = None
            except RefitError as error:
                self._error = error
                log.warning("assignment not carried out", target=assignment.target, order=assignment.order.value, error=error.message, facts=error.facts)
            self._moved.set()

    async def _carry_out(self, assignment: Assignment) -> None:
        """Again, a few times, while the error says when, no newer order is there, and the deadline is ahead."""
        deadline = self._clock.monotonic() + assignment.deadline_seconds
        for attempt in range(RETRIES):
            try:
                await self._once(assignment, deadline)
                return
            except RefitError as error:  # noqa: PERF203  a wait, not a loop over data
                wait = (error.retry_after or 0.0) * (1 + attempt) * self._random.uniform(0.5, 1.5)
                if error.retry_after is None or attempt == RETRIES - 1 or self._news.is_set() or self._clock.monotonic() + wait > deadline:
                    raise
                await asyncio.sleep(wait)

    async def _once(self, assignment: Assignment, deadline: float) -> None:
        left = max(1.0, deadline - self._clock.monotonic())
        if assignment.order is Order.ABORT:
            await self._engine.discard()
            return
        ranks = await self._engine.status()
        if served(ranks) == assignment.target and not self._fence.reason:
            return
        if not all(_has(rank, assignment.target) for rank in ranks):
            sources = {each.coordinate: each.relays for each in assignment.sources}
            await self._engine.stage(StageOrder(assignment.catalog_epoch, assignment.seq, assignment.target, sources, left))
            self._moved.set()
            if not await self._staged(assignment, deadline):
                return
        if assignment.order is Order.COMMIT:
            seconds = self._settings.engine.pause_timeout_seconds
            await self._commit.run(CommitOrder(assignment.catalog_epoch, assignment.seq, assignment.target, Order.COMMIT, seconds))

    async def _staged(self, assignment: Assignment, deadline: float) -> bool:
        """False: a newer order supersedes it. Raises what the first failed rank met."""
        while True:
            ranks = await self._engine.status()
            if all(_has(rank, assignment.target) for rank in ranks):
                return True
            ended = [rank for rank in ranks if rank.phase is not RankPhase.STAGING and not _has(rank, assignment.target)]
            for rank in ended:
                if rank.error is not None:
                    raise codec.error_of(rank.error)
            if self._news.is_set():
                return False
            if self._clock.monotonic() > deadline + LOOK_SECONDS:
                raise TransferTimeout(f"version {assignment.target} was not staged by all ranks in {assignment.deadline_seconds:g} s")
            await asyncio.sleep(MOVING_SECONDS)

    async def _tell(self) -> None:
        """Reports what changed; the same again once in a heartbeat, which is what a catalog without memory needs."""
        said: object = None
        last = 0.0
        while True:
            await self._look()
            now = self._clock.monotonic()
            facts = self._facts(now)
            due = facts != said or now - last > self._settings.versions.lease_seconds / 3
            if due and self._worker is not None and await self._report(self._worker):
                said, last = facts, now
            moving = any(rank.phase in (RankPhase.STAGING, RankPhase.COMMITTING) for rank in self._ranks) or facts != said
            with suppress(asyncio.TimeoutError):
                await within(MOVING_SECONDS if moving else LOOK_SECONDS, self._moved.wait())
                self._moved.clear()

    async def _look(self) -> None:
        """What its ranks do and whether that is fit to serve. Inside a commit nothing is said: it serves the version before, or none, until it ends."""
        try:
            ranks = await self._engine.status()
        except RefitError as error:
            if self._silence is None:
                log.warning("the engine does not say what its ranks do", error=error.message)
            self._silence = error
        else:
            self._silence = None
            if self._commit.open:
                self._ranks = ranks
                self._worker = min((rank.worker for rank in ranks), key=lambda worker: worker.rank, default=None)
                broken = next((rank for rank in ranks if rank.phase is RankPhase.FENCED), None)
                if broken is not None and not self._fence.reason:
                    await self._fence.shut(broken.error.message if broken.error is not None else "a rank is fenced")
        await self._fence.look()

    def _facts(self, now: float) -> object:
        """What makes a report worth sending; progress of a stage once a second."""
        ranks = tuple((r.worker, r.phase, r.serving, r.arena, r.arena_complete, r.kept, r.staging, r.plan_key, r.error) for r in self._ranks)
        staging = any(rank.phase is RankPhase.STAGING for rank in self._ranks)
        order = (self._assignment.catalog_epoch, self._assignment.seq) if self._assignment is not None else (0, 0)
        return ranks, order, self._commit.timings, self._fence.reason, self._error, self._silence is None, int(now / PROGRESS_SECONDS) if staging else 0

    def _reported(self) -> tuple[RankReport, ...]:
        """Ranks that serve know their own part of the commit; the agent's parts hold for all of them."""
        return tuple(replace(rank, timings=rank.timings + self._commit.timings) if rank.phase is RankPhase.SERVING else rank for rank in self._ranks)

    def _said(self, worker: WorkerRef, leaving: bool = False) -> Report:
        followed, error = self._assignment, self._error if self._error is not None else self._silence
        return Report(
            group=self._group,
            worker=worker,
            catalog_epoch=followed.catalog_epoch if followed is not None else 0,
            seq=followed.seq if followed is not None else 0,
            ranks=self._reported(),
            fenced=bool(self._fence.reason),
            error=codec.detail_of(error) if error is not None else None,
            leaving=leaving,
        )

    async def _report(self, worker: WorkerRef) -> bool:
        try:
            await asyncio.to_thread(self._catalog.report, self._said(worker))
        except CatalogUnavailable:
            await asyncio.sleep(self._random.uniform(*RETRY_SECONDS))
            return False
        except RefitError as error:
            log.warning("report refused", error=error.message, facts=error.facts)
        return True

    async def leave(self) -> None:
        """Before the pod stops: no new orders, no new readers; returns when the present readers are done.

        Only if the pod is being deleted, by the catalog's word: whoever reaches the engine's port can ask. Raises Denied, CatalogUnavailable, PeerUnavailable.
        """
        await self._confirm_leaving()
        self._leaving = True
        await self._engine.discard()
        for number in sorted({number for rank in await self._engine.status() for number in (rank.arena, rank.kept)} - {0}):
            await self._engine.release(number)
        self._moved.set()

    async def _confirm_leaving(self) -> None:
        """The catalog may see the deletion a little later than the kubelet, or start again just now."""
        if self._worker is None:
            raise PeerUnavailable("the ranks of this generator are not known yet: there is nothing to leave")
        for attempt in range(RETRIES):
            try:
                await asyncio.to_thread(self._catalog.report, self._said(self._worker, leaving=True))
                return
            except (Denied, CatalogUnavailable):  # noqa: PERF203  a wait, not a loop over data
                if attempt == RETRIES - 1:
                    raise
                await asyncio.sleep(self._random.uniform(*RETRY_SECONDS))


def _has(rank: RankReport, number: int) -> bool:
    """Whole and verified, or already live."""
    whole = (rank.arena if rank.arena_complete else 0, rank.kept)
    return rank.serving == number or (number in whole and rank.phase is not RankPhase.STAGING)

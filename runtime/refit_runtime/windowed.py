"""`staging: Windowed`: for ranks without room for an arena. What a version weighs moves through a ring of memory, while the engine is paused.

    stage:    plan, windows -> lease -> manifests, connections -> every chunk is offered      nothing has moved; the lease is kept
    install:  read window 0, 1 -> copy 0 -> read 2 -> copy 1 -> ...                           each block verified before its window is copied

Rules (each is a test):
- beside the live weights there is the ring, and nothing else: what an install leaves to check is read back through it too;
- a window's memory is read into again only after its bytes were copied, so after all its reads had ended and all its blocks were verified (O6, O8);
- the live parameters are as they were until the first window is copied: what fails before costs no fence;
- a try that fails while it reads goes on where it was, from whoever holds the version; one that fails while it copies begins anew, with everything;
- a commit of what could not be read does not pause the engine again before it was staged again;
- a lease that is lost before the install takes the promise back; one that is lost in the pause is asked for again, for a short time;
- the install ends before the agent stops waiting for it, and says how far it was and what `pauseTimeoutSeconds` this pace wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from refit_api.errors import InstallError, LeaseLost, PeerUnavailable, RefitError, TransferTimeout
from refit_api.wire import Source

from refit_runtime.arena import Holding, Holdings
from refit_runtime.finder import Finder
from refit_runtime.install import Checked, CopyList
from refit_runtime.lease import Lease
from refit_runtime.live import LiveParameters
from refit_runtime.plan.plan import Chunk, Subset
from refit_runtime.plan.windows import HALVES, Window, window_bytes, windows
from refit_runtime.planner import Planner
from refit_runtime.ports import Seams, WeightTarget
from refit_runtime.pull import SETTLE_SECONDS, Limit, Pull, Stuck
from refit_runtime.settings import RuntimeSettings
from refit_runtime.stage import STUCK_TRIES, Stager, Wanted
from refit_runtime.subset import subset_of
from refit_runtime.worker import Worker

AGAIN_SECONDS = 5.0  # in a pause: how long a lease is asked for again
SPARE_SECONDS = SETTLE_SECONDS + 1.0  # of a pause: what ending the last reads may take
SLACK = 1.5  # of the pause that is proposed, over the pace that was seen


@dataclass(slots=True, eq=False)
class Promise:
    """A version that an install can read. `placed`: the chunks of each window, with their place in the ring. `done`: windows that are live."""

    wanted: Wanted
    find: Finder
    holding: Holding
    subset: Subset | None = None
    windows: tuple[Window, ...] = ()
    placed: list[list[tuple[Chunk, int]]] = field(default_factory=list)
    lease: Lease | None = None
    pull: Pull | None = None  # with offers that nothing was read from
    done: int = 0

    @property
    def bytes(self) -> int:
        return sum(window.bytes for window in self.windows)

    @property
    def live_bytes(self) -> int:
        return sum(window.bytes for window in self.windows[: self.done])

    def is_of(self, wanted: Wanted, subset: Subset | None) -> bool:
        """It says the same, and nothing was read of it yet."""
        return self.pull is not None and self.subset == subset and self.wanted.facts.version == wanted.facts.version

    def restart(self) -> None:
        self.done = self.holding.verified_bytes = 0
        self.holding.chunks.clear()

    def unlease(self) -> None:
        lease, self.lease, self.pull = self.lease, None, None
        if lease is not None:
            lease.close()


class WindowStager(Stager):
    """Its arena is the ring; it holds nothing that others could read."""

    def __init__(self, settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str) -> None:
        super().__init__(settings, seams, worker, planner, coordinate, HALVES)
        self.holdings = Holdings(self.arena, seams.transport, lambda: worker.ref, 1)
        self._promise: Promise | None = None

    def reserve(self, total: int) -> None:
        self.arena.reserve(window_bytes(total, self._settings.transport.chunk_bytes))

    def _bring(self, wanted: Wanted, find: Finder, limit: Limit) -> Holding:
        """Everything but the bytes."""
        version, known = wanted.facts.version, self._promise
        subset = subset_of(version.select) if version.select is not None and version.base == wanted.serving else None
        if known is not None and known.is_of(wanted, subset) and self.lost() is None:
            self.progress.bytes = known.bytes
            return known.holding
        self._drop()
        promise = Promise(wanted, find, wanted.holding(0))
        self.cut(promise, subset)
        try:
            with self.progress.watch.timed("lease"):
                promise.lease = self._patience.until(limit.deadline, find.lease, limit.cancelled)
            with self.progress.watch.timed("connect"):
                promise.pull = self._pull_of(promise, promise.lease)
                promise.pull.meet(find.found, limit)
        except BaseException:
            promise.unlease()
            raise
        promise.holding.promised = True
        self._promise, self.holdings.parts[0] = promise, promise.holding
        return promise.holding

    def cut(self, promise: Promise, subset: Subset | None) -> None:
        """Into windows; of a subset whole blocks, since the base that would complete them is nowhere in the ring."""
        wanted, holding = promise.wanted, promise.holding
        promise.subset = subset
        promise.windows = windows(wanted.plan, wanted.class_, self.coordinate, self.arena.part_bytes, self._settings.transport.chunk_bytes, subset)
        starts = [self.arena.start(number % HALVES) for number in range(len(promise.windows))]
        promise.placed = [[(chunk, start + at) for chunk, at in window.chunks] for start, window in zip(starts, promise.windows, strict=True)]
        holding.missing = {run.index: ((0, run.bytes),) for run in holding.runs} if subset is not None else None
        self.progress.bytes = promise.bytes

    def _pull_of(self, promise: Promise, lease: Lease) -> Pull:
        placed = [piece for of_window in promise.placed for piece in of_window]
        goal = self.goal(promise.wanted, promise.holding)
        return Pull(goal, self.arena, self._seams, self._connections, lease, placed, lambda out: promise.find.more(lease, out))

    def promised(self, holding: Holding) -> Promise:
        assert self._promise is not None and self._promise.holding is holding, "it was found ready"  # noqa: PT018  one fact
        return self._promise

    def fill(self, promise: Promise, limit: Limit, copy: Callable[[int], None]) -> None:
        """Reads what is not live yet; `copy` brings window after window into the live parameters. Raises InstallError, and what a pull raises."""
        seconds = self._settings.engine.pause_timeout_seconds
        began, before = self._seams.clock.monotonic(), promise.live_bytes
        limit = replace(limit, deadline=limit.deadline - min(seconds / 2, SPARE_SECONDS))
        for attempt in range(STUCK_TRIES + 1):
            try:
                return self._read(promise, limit, copy)
            except (Stuck, LeaseLost) as error:  # noqa: PERF203  a pull, not a loop over data
                promise.unlease()  # under the name that took it: a new agent is a new incarnation
                if isinstance(error, Stuck):
                    self.replace_agent(error)
                if attempt == STUCK_TRIES or limit.cancelled():
                    raise
            except TransferTimeout as error:
                now = self._seams.clock.monotonic()
                if now <= limit.deadline:
                    raise
                raise _too_slow(promise, before, now - began, seconds) from error
        raise AssertionError("unreachable")

    def _read(self, promise: Promise, limit: Limit, copy: Callable[[int], None]) -> None:
        pull, promise.pull = promise.pull, None  # the next try has other offers
        sources: Sequence[Source] = ()
        if promise.lease is None:
            until = min(limit.deadline, self._seams.clock.monotonic() + AGAIN_SECONDS)
            promise.lease = self._patience.until(until, promise.find.lease, limit.cancelled)
            sources = promise.find.found
        elif pull is None:
            sources = promise.find.more(promise.lease, set())
        pull = pull if pull is not None else self._pull_of(promise, promise.lease)
        try:
            with self.progress.watch.timed("pull"), pull.reading(limit):
                pull.add(sources)
                self._through_the_ring(promise, pull, copy)
        finally:
            self.progress.read_from += pull.read_from

    def _through_the_ring(self, promise: Promise, pull: Pull, copy: Callable[[int], None]) -> None:
        asked = promise.done
        for number in range(promise.done, len(promise.windows)):
            for placed in promise.placed[asked : number + HALVES]:
                pull.ask(placed)
            asked = number + HALVES
            pull.finish(promise.placed[number])
            try:
                copy(number)
            except BaseException:
                promise.restart()
                raise
            promise.done = number + 1
            promise.holding.chunks.difference_update(chunk for chunk, _ in promise.placed[number])
        promise.restart()

    def lost(self) -> RefitError | None:
        promise = self._promise
        if promise is None:
            return None
        lease, begun = promise.lease, promise.pull is None
        if lease is None or (begun and not promise.done):  # else the next pause would wait for what this one waited for in vain
            error: RefitError | None = PeerUnavailable(f"version {promise.holding.number}: its install failed, so it has to be staged anew", retry_after=1.0)
        else:
            error = lease.lost()
        promise.holding.promised = error is None
        return error

    def installed(self, holding: Holding) -> None:
        if self._promise is not None and self._promise.holding is holding:
            self._drop()

    def give_up(self, unwanted: Callable[[Holding], bool]) -> None:
        if self._promise is not None and unwanted(self._promise.holding):
            self._drop()

    def _drop(self) -> None:
        promise, self._promise, self.holdings.parts[0] = self._promise, None, None
        if promise is not None:
            promise.holding.promised = False
            promise.unlease()

    def close(self) -> None:
        self._drop()
        super().close()


class WindowedParameters(LiveParameters):
    """Live parameters that are filled window by window."""

    def __init__(
        self, settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str, stager: WindowStager, target: WeightTarget
    ) -> None:
        super().__init__(settings, seams, worker, planner, coordinate, stager, target)
        self._ring = stager
        self._checks: dict[str, Checked] = {}
        self._copies: dict[tuple[str, Subset | None], list[CopyList]] = {}

    def prepare(self, holding: Holding) -> None:
        self._checked(holding)
        self._windows(self._ring.promised(holding))

    def _checked(self, holding: Holding) -> Checked:
        if holding.plan_key not in self._checks:
            arena = self._ring.arena
            made = Checked(self._planned(holding).copies, self._target, self._seams.memory, arena.whole.device, [arena.part(half) for half in range(HALVES)])
            if self._kind != "Off" and made.exact:
                made.prepare_check()
            self._checks = {holding.plan_key: made}
        return self._checks[holding.plan_key]

    def _windows(self, promise: Promise) -> list[CopyList]:
        """Kept for the next version of the plan, whole and of one subset."""
        key = (promise.holding.plan_key, promise.subset)
        if key not in self._copies:
            arena, memory = self._ring.arena, self._seams.memory
            made = [CopyList(window.copies, self._target, arena.part(number % HALVES), memory) for number, window in enumerate(promise.windows)]
            self._copies = {old: lists for old, lists in self._copies.items() if old == (key[0], None)} | {key: made}
        return self._copies[key]

    def _fill(self, holding: Holding, limit: Limit) -> None:
        promise = self._ring.promised(holding)
        if promise.done == 0 and promise.subset is not None and not self.serves(holding.base):
            promise.pull = None  # it knows no other chunks
            self._ring.cut(promise, None)
        lists = self._windows(promise)

        def copy(number: int) -> None:
            self.forget()
            lists[number].copy()

        self._ring.fill(promise, limit, copy)
        self._target.remake()

    def gather_back(self) -> None:
        """A ring holds no version."""


def stager(settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str) -> Stager:
    """The one that `staging` asks for."""
    if settings.engine.staging == "Windowed":
        return WindowStager(settings, seams, worker, planner, coordinate)
    return Stager(settings, seams, worker, planner, coordinate, 2 if settings.engine.keep_previous else 1)


def live_parameters(
    settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str, made: Stager, target: WeightTarget
) -> LiveParameters:
    """Those that the stager fills."""
    if isinstance(made, WindowStager):
        return WindowedParameters(settings, seams, worker, planner, coordinate, made, target)
    return LiveParameters(settings, seams, worker, planner, coordinate, made, target)


def _too_slow(promise: Promise, before: int, took: float, seconds: float) -> InstallError:
    moved, total = promise.live_bytes - before, promise.bytes
    pace = f"at {moved / took / 1e9:.3g} GB/s it wants {ceil(SLACK * total * took / moved + SPARE_SECONDS)}" if moved else "nothing arrived"
    return InstallError(
        f"version {promise.holding.number}: {promise.live_bytes} of {total} bytes are live after {took:.1f} s, when its pause had to end; "
        f"with staging Windowed all of them move inside spec.generators.engine.pauseTimeoutSeconds ({seconds:g}): {pace}",
        bytes=promise.live_bytes,
        total=total,
        seconds=round(took, 1),
    )

"""One engine rank: what it holds, what it serves, and the orders that move it from one version to the next.

    Idle -> Staging -> Staged -> Prepared -> Committing -> Serving          any failure before Committing leaves the old version serving
                                                  \\-> Fenced               live parameters are a mix, or not what they should be

- Orders are (catalogEpoch, seq); a lower one than the last is refused.
- A prepared rank keeps what it would install; its order's deadline, an abort or a newer order puts it back to Staged.
- Only verified bytes are installed (O6), only whole versions; after a failed copy the rank is fenced until a whole install succeeds.
- Installs never overlap; one that is fenced while it copies counts as failed, whenever it ends.
- No method raises for what an engine may meet: outcomes are in the report, since a reply that fails would stop the executor's other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog
from refit_api.codec import detail_of
from refit_api.errors import EngineBusy, EngineMismatch, InstallError, MixedRanks, RefitError, StaleOrder
from refit_api.mounted import Engine
from refit_api.tensors import box_elements
from refit_api.wire import RankPhase, RankReport, ReadFrom, Role, Timing, WorkerRef

from refit_runtime.arena import Holding, device_of
from refit_runtime.digest import Digests
from refit_runtime.foreign import named
from refit_runtime.live import LiveParameters
from refit_runtime.plan.key import encode_needs
from refit_runtime.planner import Planner
from refit_runtime.ports import CommitOrder, Seams, StageOrder, WeightTarget
from refit_runtime.pull import Limit
from refit_runtime.settings import RuntimeSettings
from refit_runtime.stage import Stager
from refit_runtime.stopwatch import Stopwatch
from refit_runtime.windowed import live_parameters, stager
from refit_runtime.worker import Worker

log = structlog.get_logger(__name__)

CHECK_PAUSE_SECONDS = 0.002  # after each window of a check beside the requests: the engine's own threads and kernels go first


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that is verified in spare memory and may be installed."""

    version: int
    plan_key: str
    root: bytes


class GeneratorRank:
    """Construct it before the process group of the same process (O1), bind it once when the model exists (O2). `changed` is called after each move."""

    def __init__(
        self, settings: RuntimeSettings, seams: Seams, coordinate: str, rank: int = 0, world: int = 1, instance: str = "0",
        changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._settings, self._seams, self._coordinate, self._changed = settings, seams, coordinate, changed
        self.worker = Worker(settings, seams, Role.GENERATOR, rank, world, instance)
        self.planner = Planner(seams.catalog, self.worker.group)
        self._stager = stager(settings, seams, self.worker, self.planner, coordinate)
        self._live: LiveParameters | None = None
        self._pool, self._lock, self._cancelled = ThreadPoolExecutor(1, "refit-stage"), threading.RLock(), threading.Event()
        self._job: Future[None] | None = None
        self._wanted, self._order, self._prepared_until = 0, (0, 0), 0.0
        self._phase = RankPhase.IDLE
        self._copying = self._void = False
        self._timings: tuple[Timing, ...] = ()
        self._error: RefitError | None = None

    def bind(self, target: WeightTarget) -> None:
        """Registers with the needs of the live parameters; allocates the arena. Raises SpecError, EngineMismatch and what the catalog answers."""
        assert self._live is None, "bind once"
        needs = target.needs()
        _refuse(needs.id, self._coordinate, self._settings.engine)
        self._live = live_parameters(self._settings, self._seams, self.worker, self.planner, self._coordinate, self._stager, target)
        wire = {(need.tensor, need.box): box_elements(need.box) * need.parameter.dtype.bytes for need in needs.needs}
        self._stager.arena.device = device_of((need.parameter.name, target.view(need.parameter.name)) for need in needs.needs)
        self._stager.reserve(sum(wire.values()))
        self._seams.memory.digests(self._stager.arena.whole[:8], Digests("", 0))  # compiled now, not while the first version waits
        layout = encode_needs(needs)
        answer = self._stager.holdings.answer if self._settings.engine.relays else None
        self.worker.join(layout, answer, self._changed, arena_bytes=self._stager.arena.bytes, coordinate=self._coordinate)
        self.planner.own(self.worker.layout, layout)

    @property
    def live(self) -> LiveParameters:
        assert self._live is not None, "bind first"
        return self._live

    def start(self, order: StageOrder) -> None:
        """Begins a stage, or takes up what is there; a stage of another version is superseded."""
        with self._lock, self._noted():
            self._obey(order.catalog_epoch, order.seq)
            if self._wanted == order.number and self._job is not None and not self._job.done():
                return
            self._stop()
            if self.live.serves(order.number):
                return
            self._wanted, self._error, self._phase = order.number, None, RankPhase.STAGING
            self._cancelled = cancelled = threading.Event()
            self._job = self._pool.submit(self._stage, order, cancelled)
        self._changed()

    def wait(self, timeout: float | None = None) -> None:
        """Until the present stage or check ended."""
        job = self._job
        if job is not None:
            futures.wait([job], timeout)

    def _stage(self, order: StageOrder, cancelled: threading.Event) -> None:
        failed: RefitError | None = None
        try:
            served = self.live.served
            with named("stage"):
                self.live.prepare(self._stager.stage(order, served.number if served is not None else 0, cancelled.is_set))
        except RefitError as error:
            failed = error
            log.warning("stage failed", version=order.number, error=error.message, facts=error.facts)
        with self._lock:
            if cancelled.is_set():
                return
            if failed is None:
                self._phase = RankPhase.STAGED
            else:
                self._error = failed
                self._rest()
        if self._error is not None and self._error.retry_after is None:  # else what is verified stays for the next try
            self._guarded(self.live.gather_back)
        self._changed()

    def _rest(self) -> None:
        """Back to what is true without the stage."""
        self._wanted = 0
        self._phase = RankPhase.FENCED if self.live.torn else RankPhase.SERVING if self.live.served is not None else RankPhase.IDLE

    def _obey(self, epoch: int, seq: int) -> None:
        self._alone()
        if (epoch, seq) < self._order:
            raise StaleOrder(f"order {epoch}.{seq} is older than {self._order[0]}.{self._order[1]}, which this rank follows", seen=f"{epoch}.{seq}")
        self._order = (epoch, seq)

    def _alone(self) -> None:
        if self._copying:
            raise EngineBusy("an install has not ended: nothing else is done until then", retry_after=1.0, seen=self._phase.value)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """What goes wrong is in the next report."""
        try:
            with named("order"):
                yield
        except RefitError as error:
            self._error = error
            log.warning("order not carried out", worker=self.worker.ref, error=error.message, facts=error.facts)

    def _stop(self) -> None:
        """The present job ends soon; the next one waits for it, since there is one thread."""
        self._cancelled.set()
        if self._phase in (RankPhase.STAGING, RankPhase.STAGED, RankPhase.PREPARED):
            self._rest()

    def prepare(self, order: CommitOrder) -> RankReport:
        """Says what it would install; keeps it until the order's deadline."""
        with self._lock, self._noted():
            self._obey(order.catalog_epoch, order.seq)
            if not self.live.serves(order.number):
                if self._stager.find(order.number) is None or self._phase is RankPhase.STAGING:
                    raise StaleOrder(f"version {order.number} is not staged here: this rank is {self._phase.value}", seen=self._wanted, expected=order.number)
                self._wanted, self._error = order.number, None
                self._prepared_until = self._seams.clock.monotonic() + order.deadline_seconds
                self._phase = RankPhase.PREPARED
        return self.report()

    def install(self, order: CommitOrder) -> RankReport:
        """Copies a whole held version into the live parameters; the engine is paused and idle. Also the second try, and the way back."""
        until = self._seams.clock.monotonic() + self._settings.engine.pause_timeout_seconds
        with self._noted():
            holding = self._begin(order)
            if holding is not None:
                self._install(holding, Limit(until, lambda: self._void))
        self._changed()
        return self.report()

    def _begin(self, order: CommitOrder) -> Holding | None:
        """None: it serves the version already."""
        with self._lock:
            self._obey(order.catalog_epoch, order.seq)
            if self.live.serves(order.number):
                return None
            holding = self._stager.holdings.ready(order.number)
            self._cancelled.set()
            self._wanted, self._phase, self._error = order.number, RankPhase.COMMITTING, None
            self._copying, self._void = True, False
        return holding

    def _install(self, holding: Holding, limit: Limit) -> None:
        watch = Stopwatch(self._seams.clock)
        try:
            self._settle(holding)
            with named("install", InstallError):
                unchecked = self.live.install(holding, watch, limit)
        finally:
            with self._lock:
                self._copying = False
                if self._void:
                    self.live.forget()
                self._rest()
        with self._lock:
            self._timings = (*self._stager.progress.watch.timings, *watch.timings)
            if (unchecked or holding.promised) and self.live.serves(holding.number):
                self._cancelled = cancelled = threading.Event()
                self._job = self._pool.submit(self._guarded, lambda: self.live.settle(holding, unchecked, lambda: cancelled.wait(CHECK_PAUSE_SECONDS)))

    def _settle(self, holding: Holding) -> None:
        """What ran on live parameters and arena has ended, and left the holding where it is. Raises EngineBusy, before the agent gives up, and MixedRanks."""
        self.wait(self._settings.engine.pause_timeout_seconds / 2)
        if self._job is not None and not self._job.done():
            raise EngineBusy(f"version {holding.number} cannot be installed: a stage or a check before it does not end", retry_after=1.0)
        if self._stager.holdings.ready(holding.number) is not holding:
            raise MixedRanks(f"version {holding.number} was staged anew while its install began", expected=holding.number)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Work on the live parameters beside the orders: damage that it finds fences."""
        try:
            with named("check"):
                work()
        except RefitError as error:
            with self._lock:
                self._error = error
                if not self._copying:
                    self._rest()
            log.warning("live parameters were not what they should be, or could not be read", error=error.message, facts=error.facts)
        self._changed()

    def discard(self) -> None:
        """Ends a stage, puts a prepared rank back, gives up what is staged and is a holder of the served version again."""
        with self._lock, self._noted():
            self._alone()
            self._stop()
            self._job = self._pool.submit(self._guarded, self._give_up)
        self._changed()

    def _give_up(self) -> None:
        self._stager.give_up(lambda holding: not self.live.serves(holding.number))
        self.live.gather_back()

    def release(self, number: int) -> None:
        """Closes a holding and waits until nobody reads it, at most drainSeconds + leaseSeconds. Raises PeerUnavailable."""
        self.wait(self._stager.drain_seconds)  # what a discarded stage leaves to do
        self._stager.give_up(lambda holding: holding.number == number)

    def fence(self, reason: str) -> None:
        with self._lock:
            self._stop()
            self._void = True
            self.live.forget()
            self._phase, self._error = RankPhase.FENCED, self._error or MixedRanks(reason)
        self._changed()

    def counters(self) -> dict[str, int]:
        """Of this process so far; a warm round adds to `reads` and `bytes` only."""
        return {"plans": self.planner.made, "allocations": self._stager.arena.allocations, **self._seams.transport.counters()}

    def held(self) -> tuple[int, ...]:
        """Versions that are whole here, oldest first."""
        return tuple(sorted(holding.number for holding in self._stager.holdings.all() if holding.complete))

    def staged(self, number: int) -> Staged:
        """Raises what the stage met. What is live already needs none."""
        holding = self.live.served if self.live.serves(number) else self._stager.holdings.find(number)
        if holding is None:
            raise self.failure()
        return Staged(number, holding.plan_key, holding.root)

    def failure(self) -> RefitError:
        """What went wrong last."""
        return self._error if self._error is not None else StaleOrder("the version was superseded by another one", seen=self._wanted)

    def report(self) -> RankReport:
        with self._lock:
            if self._phase is RankPhase.PREPARED and self._seams.clock.monotonic() > self._prepared_until:
                self._phase = RankPhase.STAGED
            if self._phase in (RankPhase.STAGED, RankPhase.PREPARED) and (lost := self._stager.lost()) is not None:
                self._error = lost
                self._rest()
            timings = self._timings if self._phase is RankPhase.SERVING else tuple(self._stager.progress.watch.timings)
            served = self._live.served if self._live is not None else None
            error = detail_of(self._error) if self._error is not None else None
            return replace(_contents(self.worker.ref, self._phase, self._stager, served, self._wanted), timings=timings, error=error)

    def close(self) -> None:
        """Ends the stage, gives up leases and holdings, deregisters. What is served stays in the live parameters."""
        self._cancelled.set()
        self._pool.shutdown(wait=True)
        self.worker.leave()
        self._stager.close()
        self._seams.transport.close()


def _refuse(target: str, coordinate: str, engine: Engine) -> None:
    if target != coordinate:
        raise EngineMismatch(f"the target is coordinate {target!r}, the rank {coordinate!r}: bind the one that belongs to it")
    if engine.commit == "Remap":
        raise EngineMismatch("spec.generators.engine: commit: Remap is not carried out by this release; use Copy", seen="Remap")


def _contents(ref: WorkerRef, phase: RankPhase, stager: Stager, served: Holding | None, wanted: int) -> RankReport:
    """What is in the arena and in the live parameters. `arena` is what may be installed, and read whole by others: the wanted version, else the served one."""
    progress, held = stager.progress, stager.holdings.all()
    whole = [holding for holding in held if holding.ready and not holding.closed]
    arena, kept, *_ = (*sorted(whole, key=lambda holding: (holding.number != wanted, served is None or holding.number != served.number)), None, None)
    staging = progress.number if phase is RankPhase.STAGING else 0
    here = next((holding for holding in held if holding.number == progress.number), None)
    key = progress.plan_key if staging else arena.plan_key if arena is not None else served.plan_key if served is not None else ""
    return RankReport(
        worker=ref,
        coordinate=stager.coordinate,
        phase=phase,
        serving=served.number if served is not None else 0,
        serving_root=served.root if served is not None else b"",
        arena=arena.number if arena is not None else 0,
        arena_complete=arena is not None,
        arena_root=arena.root if arena is not None else b"",
        kept=kept.number if kept is not None else 0,
        plan_key=key,
        staging=staging,
        verified=here.verified_bytes if here is not None else 0,
        bytes=progress.bytes,
        reads=tuple(ReadFrom(pod, role, size) for (pod, role), size in progress.read_from.items()),
    )

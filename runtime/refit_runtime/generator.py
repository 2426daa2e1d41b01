"""The client of frameworks that drive their generators themselves (`rollout.policy: Manual`): stage, install and release at their own safe points.

In a managed group these calls are refused: there the agent carries out the operator's orders, and two drivers would tear a generator apart.
What the rank does is told to the catalog beside the calls, so that leases, relays, readiness and status are right; each rank speaks for itself. While the
catalog is away nothing waits for it.
"""

from __future__ import annotations

import threading

import structlog
from refit_api.errors import ManagedByOperator, RefitError
from refit_api.wire import Order, RankPhase, Report

from refit_runtime.ports import CommitOrder, Seams, StageOrder, WeightTarget
from refit_runtime.rank import GeneratorRank, Staged
from refit_runtime.settings import RuntimeSettings

log = structlog.get_logger(__name__)


class GeneratorClient:
    """One engine rank. Construct it before the process group (O1), bind it once the model exists (O2)."""

    def __init__(self, settings: RuntimeSettings, coordinate: str, seams: Seams, rank: int = 0, world: int = 1, instance: str = "0") -> None:
        self._settings, self._seams = settings, seams
        self._rank = GeneratorRank(settings, seams, coordinate, rank, world, instance, self._tell)
        self._seq = 0
        self._news, self._closing = threading.Event(), threading.Event()
        self._teller = threading.Thread(target=self._report, name="refit-report", daemon=True)

    def bind(self, target: WeightTarget) -> None:
        """Registers with the needs of the live parameters; allocates the arena."""
        self._rank.bind(target)
        self._teller.start()

    def stage(self, version: int, timeout: float | None = None) -> Staged:
        """Returns when all of it is verified in spare memory; live parameters are untouched. Raises PeerError, TransferError, PlanError."""
        self.begin(version, timeout)
        self._rank.wait()
        return self._rank.staged(version)

    def begin(self, version: int, timeout: float | None = None) -> None:
        """A stage that goes on by itself; `stage` of the same version takes it up."""
        self._refuse_if_managed("stage")
        self._seq += 1
        seconds = timeout if timeout is not None else self._settings.rollout.progress_deadline_seconds
        self._rank.start(StageOrder(0, self._seq, version, {}, seconds))

    def install(self, staged: Staged) -> None:
        """The engine must be idle. Raises InstallError: then what is live is a mix, and must not serve before an install succeeds."""
        self._refuse_if_managed("install")
        self._seq += 1
        report = self._rank.install(CommitOrder(0, self._seq, staged.version, Order.COMMIT, self._settings.engine.pause_timeout_seconds))
        if report.error is not None:
            raise self._rank.failure()

    def discard(self) -> None:
        """Gives up what is staged; the served version is offered to others again."""
        self._refuse_if_managed("discard")
        self._rank.discard()
        self._rank.wait()

    def release(self) -> None:
        """Takes no new readers and returns when the present ones are done."""
        self._refuse_if_managed("release")
        for number in self._rank.held():
            self._rank.release(number)
        self._tell()

    def held(self) -> tuple[int, ...]:
        """Versions that are whole in the arena, oldest first."""
        return self._rank.held()

    def close(self) -> None:
        self._closing.set()
        self._news.set()
        if self._teller.is_alive():
            self._teller.join(15)
        self._rank.close()

    def _refuse_if_managed(self, call: str) -> None:
        if self._settings.rollout.managed:
            raise ManagedByOperator(
                f"{call}: the operator drives the generators of a group with spec.rollout.policy {self._settings.rollout.policy}. GeneratorClient needs "
                "Manual; in a managed group run refit_runtime.agent.Agent over refit_runtime.rank.GeneratorRank",
                seen=self._settings.rollout.policy,
                expected="Manual",
            )

    def _tell(self) -> None:
        self._news.set()

    def _report(self) -> None:
        """Each move, and once in a heartbeat: a catalog that lost its memory hears it again."""
        wait = self._settings.versions.lease_seconds / 3
        while not self._closing.is_set():
            self._news.wait(wait)
            self._news.clear()
            worker, rank = self._rank.worker, self._rank.report()
            fenced = rank.phase is RankPhase.FENCED
            try:
                self._seams.catalog.report(Report(worker.group, worker.ref, worker.registered.catalog_epoch, self._seq, (rank,), fenced, rank.error))
                wait = self._settings.versions.lease_seconds / 3
            except RefitError as error:
                log.info("report not delivered", error=error.message)
                wait = self._seams.random.uniform(1.0, 2.0)

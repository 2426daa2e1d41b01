"""What is in the live parameters of an engine rank: one whole version, or something that must not serve.

Invariants: only whole, verified holdings are installed (O6); `torn` is set before the first copy and cleared after the last, so a failure anywhere
in between leaves it set; a version that was found damaged is not served any more.
"""

from __future__ import annotations

from collections.abc import Callable

from refit_api.errors import DigestMismatch

from refit_runtime.arena import Holding
from refit_runtime.digest import Digests
from refit_runtime.install import Checked, CopyList
from refit_runtime.plan.plan import CoordinatePlan, Subset
from refit_runtime.planner import Planner
from refit_runtime.ports import Seams, WeightTarget
from refit_runtime.pull import Limit
from refit_runtime.settings import RuntimeSettings
from refit_runtime.stage import Stager
from refit_runtime.stopwatch import Stopwatch
from refit_runtime.subset import subset_of
from refit_runtime.worker import Worker


class LiveParameters:
    """`served` is the version in them, with its digests. Callers serialise installs."""

    def __init__(
        self, settings: RuntimeSettings, seams: Seams, worker: Worker, planner: Planner, coordinate: str, stager: Stager, target: WeightTarget
    ) -> None:
        self._kind = settings.verification.installed
        self._seams, self._worker, self._planner, self._coordinate, self._stager, self._target = seams, worker, planner, coordinate, stager, target
        self._lists: dict[tuple[int, str, int], CopyList] = {}
        self._installs = 0
        self.served: Holding | None = None
        self.torn = False

    def serves(self, number: int) -> bool:
        return self.served is not None and self.served.number == number

    def prepare(self, holding: Holding) -> None:
        """What its install and its check need; a stage does it, so that nothing is made in the pause."""
        self._copy_list(holding)

    def _planned(self, holding: Holding) -> CoordinatePlan:
        planned = self._planner.planned(holding.plan_key)
        return planned.plan.coordinate(planned.class_of(self._coordinate, self._worker.layout), self._coordinate)

    def _copy_list(self, holding: Holding) -> CopyList:
        """Made once for each plan, part and allocation."""
        key = (self._stager.arena.allocations, holding.plan_key, holding.part)
        if key not in self._lists:
            mine = self._planned(holding)
            self._lists = {old: copies for old, copies in self._lists.items() if old[:2] == key[:2]}
            self._lists[key] = made = CopyList(mine.copies, self._target, self._stager.arena.part(holding.part), self._seams.memory)
            if self._kind != "Off" and made.exact:
                made.prepare_check()
        subset = self._over_base(holding)
        if subset is not None:
            self._lists[key].prepare(subset)
        return self._lists[key]

    def _checked(self, holding: Holding) -> Checked:
        return self._copy_list(holding)

    def _over_base(self, holding: Holding) -> Subset | None:
        """What of it is not in the live parameters already; None: nothing is known to be."""
        return subset_of(holding.select) if holding.select is not None and self.serves(holding.base) else None

    def _fill(self, holding: Holding, limit: Limit) -> None:
        """All of it is live afterwards. Copies from an arena take as long as they take."""
        subset = self._over_base(holding)
        self.forget()
        self._copy_list(holding).install(subset)

    def install(self, holding: Holding, watch: Stopwatch, limit: Limit) -> bool:
        """True if what was installed is still to be checked. Raises InstallError, DigestMismatch: then nothing is served."""
        copies = self._checked(holding)
        kind = self._kind if copies.exact else "Off"
        with watch.timed("install"):
            self._fill(holding, limit)
        if kind == "Blocking" or (kind == "Async" and self._installs == 0):
            with watch.timed("check"):
                copies.check(holding, self._digests(holding), lambda: False)
        self.served, self.torn = holding, False
        self._installs += 1
        return kind == "Async" and self._installs > 1

    def settle(self, holding: Holding, unchecked: bool, cancelled: Callable[[], bool]) -> None:
        """What an install leaves to do once requests run again. Raises as `check` does."""
        self._stager.installed(holding)
        if unchecked:
            self.check(holding, cancelled)

    def check(self, holding: Holding, cancelled: Callable[[], bool]) -> None:
        """Raises DigestMismatch; then nothing is served."""
        try:
            self._checked(holding).check(holding, self._digests(holding), cancelled)
        except DigestMismatch:
            self.forget()
            raise

    def forget(self) -> None:
        """Whatever is there must not serve."""
        self.torn, self.served = True, None

    def gather_back(self) -> None:
        """The served version back into the arena that a stage began to overwrite; checked first. Raises DigestMismatch."""
        served = self.served
        holdings = self._stager.holdings
        if served is None or any(holding.number == served.number for holding in holdings.all()):
            return
        there = holdings.parts[served.part]
        if not self._checked(served).exact or (there is not None and there.complete):
            return
        self.check(served, lambda: False)
        holdings.parts[served.part] = None
        self._copy_list(served).gather()
        verified = {run.index: run.bytes for run in served.runs}
        self.served = Holding(served.number, served.plan_key, served.part, served.runs, served.offsets, served.root, served.digests, verified, served.chunks)
        holdings.parts[served.part] = self.served

    def _digests(self, holding: Holding) -> Digests:
        return Digests(self._worker.registered.group_uid, holding.number)

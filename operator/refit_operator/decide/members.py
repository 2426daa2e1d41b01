"""Generators as one thing each: the pod that the watch shows, and what its ranks told the catalog.

A generator serves a version when all of its ranks say so and none is fenced. While the catalog is not settled, a pod that was synced before
and has not registered again is taken to serve what it served: absence is not news.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from refit_api.wire import Order, RankPhase, RankReport, Role

from refit_operator.decide.facts import Generator, Observed, Pod

_BUSY = (RankPhase.PREPARED, RankPhase.COMMITTING)


@dataclass(frozen=True, slots=True)
class Member:
    """`serving`, `staged`, `kept`, `staging`: versions, 0 for none. `staged` is verified on every rank, and so is `kept`, an older one beside it.

    `progress`: share of the stage that is verified. `driven`: by a framework, so that it has no orders.
    """

    pod: Pod
    generator: Generator | None
    serving: int = 0
    staged: int = 0
    kept: int = 0
    staging: int = 0
    progress: float = 0.0
    busy: bool = False
    driven: bool = False

    @property
    def id(self) -> str:
        return member_id(self.generator) if self.generator else self.pod.uid

    @property
    def fenced(self) -> bool:
        return self.generator is not None and self.generator.fenced

    @property
    def ordered(self) -> int:
        """The version that it was last sent to."""
        return self.generator.assignment.target if self.generator and self.generator.assignment else 0

    @property
    def committing(self) -> bool:
        """Inside a commit, or about to be: its order is out and it does not serve the version yet."""
        assignment = self.generator.assignment if self.generator else None
        ordered = assignment is not None and assignment.order is Order.COMMIT
        return ordered and self.has(self.ordered) and self.ordered != self.serving and not self.failed

    @property
    def failed(self) -> bool:
        """Its agent follows the present order and could not carry it out, or ended up fenced; so did its framework."""
        generator = self.generator
        if generator is None or self.busy or (generator.error is None and not generator.fenced):
            return False
        if self.driven:
            return True
        return generator.assignment is not None and generator.heard >= (generator.assignment.catalog_epoch, generator.assignment.seq)

    def failed_at(self, version: int) -> bool:
        return self.failed and (self.driven or self.ordered == version) and self.serving != version

    def has(self, version: int) -> bool:
        """Verified on every rank: it can be installed without a pull."""
        return version > 0 and version in (self.staged, self.kept)


def member_id(generator: Generator) -> str:
    return f"{generator.pod_uid}/{generator.instance}"


def members(observed: Observed, before: int, driven: bool = False) -> tuple[Member, ...]:
    """Every generator whose pod is not going away; `before`: the version that was current, for those not heard of yet."""
    facts = observed.catalog
    by_pod: dict[str, list[Generator]] = {}
    for generator in facts.generators:
        by_pod.setdefault(generator.pod_uid, []).append(generator)
    found: list[Member] = []
    for pod in sorted(observed.pods, key=lambda p: (p.name, p.uid)):
        if pod.role is not Role.GENERATOR or pod.leaving or pod.ended:
            continue
        engines = by_pod.get(pod.uid, [])
        found += [replace(_member(pod, generator), driven=driven) for generator in sorted(engines, key=lambda g: g.instance)]
        if not engines:
            assumed = before if not facts.settled and pod.synced else 0
            found.append(Member(pod, None, serving=assumed))
    return tuple(found)


def _member(pod: Pod, generator: Generator) -> Member:
    reports = [rank.report for rank in generator.ranks if rank.report is not None]
    if not generator.whole or len(reports) < len(generator.ranks):
        return Member(pod, generator)
    serving = _same(report.serving for report in reports if report.phase is not RankPhase.FENCED)
    total = sum(report.bytes for report in reports)
    return Member(
        pod,
        generator,
        serving=0 if generator.fenced or any(report.phase is RankPhase.FENCED for report in reports) else serving,
        staged=_same(report.arena if report.arena_complete else 0 for report in reports),
        kept=_same(report.kept for report in reports),
        staging=_staging(reports),
        progress=sum(report.verified for report in reports) / total if total else 0.0,
        busy=any(report.phase in _BUSY for report in reports),
    )


def _same(values: Iterable[int]) -> int:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else 0


def _staging(reports: Iterable[RankReport]) -> int:
    return max((report.staging for report in reports if report.phase is RankPhase.STAGING), default=0)

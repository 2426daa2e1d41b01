"""Numbers of the last refit that every generator finished, from what their ranks measured themselves.

Stages by the names of the runtime's timeline: `pull` is the reads with their verification; the engine stands still in those of `STALL`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from refit_api.status import LastRefitStatus

from refit_operator.decide.facts import CatalogFacts
from refit_operator.decide.members import Member

PULL = "pull"
STALL = ("pause", "install", "check", "label", "resume")


def last(fleet: Sequence[Member], facts: CatalogFacts, target: int, before: Mapping[str, Any] | None) -> LastRefitStatus | None:
    """The numbers of `target` once all serve it; until then those of before."""
    kept = LastRefitStatus.model_validate(before) if before else None
    if target == 0 or not fleet or any(m.serving != target for m in fleet):
        return kept
    if kept is not None and kept.version == target:  # later joiners are no part of the rollout
        return kept
    created = next((s.created for s in facts.versions if s.version.number == target), None)
    pulls, stalls, ends = _measured(fleet)
    if created is None or not stalls:
        return kept
    return LastRefitStatus(
        version=target,
        bytes=max(sum(r.report.bytes for r in m.generator.ranks if r.report) for m in fleet if m.generator),
        wire_seconds=round(median(pulls), 4) if pulls else 0.0,
        stall_seconds_p50=round(median(stalls), 4),
        stall_seconds_max=round(max(stalls), 4),
        publish_to_serving_seconds=round(max(0.0, max(ends) - created), 3),
    )


def _measured(fleet: Sequence[Member]) -> tuple[list[float], list[float], list[float]]:
    """Per generator the slowest rank's pull and stall, and when it went on."""
    pulls, stalls, ends = [], [], []
    for member in fleet:
        ranks = [rank.report.timings for rank in (member.generator.ranks if member.generator else ()) if rank.report]
        pulled = [t.seconds for timings in ranks for t in timings if t.stage == PULL]
        stood = [[t for t in timings if t.stage in STALL] for timings in ranks]
        pulls += [max(pulled)] if pulled else []
        if any(stood):
            stalls.append(max(sum(t.seconds for t in timings) for timings in stood))
            ends.append(max(t.start + t.seconds for timings in stood for t in timings))
    return pulls, stalls, ends

"""Numbers of the last refit that every generator finished, from what their ranks measured themselves.

Stages by the names of the runtime's timeline: `pull` is the reads with their verification, `stall` from pausing to resuming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from refit_api.status import LastRefitStatus

from refit_operator.decide.facts import CatalogFacts
from refit_operator.decide.members import Member

PULL = "pull"
STALL = "stall"


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
        timings = [t for rank in (member.generator.ranks if member.generator else ()) if rank.report for t in rank.report.timings]
        pulls += [max(t.seconds for t in timings if t.stage == PULL)] if any(t.stage == PULL for t in timings) else []
        if any(t.stage == STALL for t in timings):
            stalls.append(max(t.seconds for t in timings if t.stage == STALL))
            ends.append(max(t.start + t.seconds for t in timings if t.stage == STALL))
    return pulls, stalls, ends

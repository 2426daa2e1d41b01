"""Conditions: polarity, reasons, transition times. A transition time moves only when the status does; a condition is never left out.

`Ready` and `WeightsCurrent` are normal when True; `Reconciling`, `Stalled`, `Degraded`, `Suspended` are abnormal when True.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from refit_api.names import Condition
from refit_api.status import ConditionStatus

_MESSAGE_LIMIT = 1024
State = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition as it should be now."""

    type: Condition
    status: State
    reason: str
    message: str = ""


def stamp(now: float) -> str:
    """As metav1.Time."""
    return datetime.fromtimestamp(int(now), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """A metav1.Time or MicroTime as Unix seconds."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def merge(previous: Sequence[Mapping[str, Any]], findings: Iterable[Finding], generation: int, now: float) -> tuple[ConditionStatus, ...]:
    before = {str(c.get("type")): c for c in previous}
    made = []
    for finding in findings:
        old = before.get(finding.type)
        same = old is not None and old.get("status") == finding.status
        made.append(
            ConditionStatus(
                type=str(finding.type),
                status=finding.status,
                observed_generation=generation,
                last_transition_time=str(old["lastTransitionTime"]) if same and old is not None and "lastTransitionTime" in old else stamp(now),
                reason=str(finding.reason),
                message=finding.message[:_MESSAGE_LIMIT],
            )
        )
    return tuple(made)


def turned(previous: Sequence[Mapping[str, Any]], findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those whose status or reason is not what it was: each is one event, if it is worth one."""
    before = {str(c.get("type")): (c.get("status"), c.get("reason")) for c in previous}
    return tuple(f for f in findings if before.get(f.type) != (f.status, str(f.reason)))


def when(yes: bool) -> State:
    return "True" if yes else "False"

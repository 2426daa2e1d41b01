"""Metrics of a group, from what a pass saw. Counters of generators are those of its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refit_api.wire import GroupRef

from refit_operator import telemetry
from refit_operator.decide.actions import WriteStatus
from refit_operator.decide.conditions import seconds
from refit_operator.decide.facts import Observed
from refit_operator.decide.target import is_rejected


def show(key: GroupRef, observed: Observed) -> None:
    telemetry.LEASES.labels(key.namespace, key.name).set(sum(state.leases for state in observed.catalog.versions))
    telemetry.REJECTED.labels(key.namespace, key.name).set(sum(is_rejected(record) for record in observed.records))


def status(key: GroupRef, action: WriteStatus, before: Mapping[str, Any]) -> None:
    """What was written, and what was there before."""
    telemetry.STATUS_WRITES.labels(action.kind, "urgent" if action.urgent else "coalesced").inc()
    if action.kind != "RefitGroup":
        if {"convergedAt", "readyAt"} <= action.status.keys() and "convergedAt" not in before:
            telemetry.CONVERGENCE.observe(seconds(action.status["convergedAt"]) - seconds(action.status["readyAt"]))
        return
    place = (key.namespace, key.name)
    telemetry.TARGET.labels(*place).set(action.status.get("targetVersion", 0))
    telemetry.CURRENT.labels(*place).set(action.status.get("currentVersion", 0))
    telemetry.DEPTH.labels(*place).set(action.status.get("fanout", {}).get("depth", 0))
    for state in telemetry.STATES:
        telemetry.GENERATORS.labels(*place, state).set(action.status.get("generators", {}).get(state, 0))


def held_back(kind: str) -> None:
    telemetry.STATUS_COALESCED.labels(kind).inc()


def forget(key: GroupRef) -> None:
    telemetry.forget(key.namespace, key.name)

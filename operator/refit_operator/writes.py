"""What this process wrote, until the watch shows it: no child is applied twice for nothing, no status is computed from one older than ours.

Pure bookkeeping; the reconciler asks before it writes and tells after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from refit_operator.decide.facts import Child
from refit_operator.ports import Manifest, Stamp

_SHOWN_WITHIN = 5.0
"""Seconds in which the watch must show a write; beyond it the object counts as deleted by somebody, and is applied again."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """`seen`: the watch has shown it since, so an absence is a deletion."""

    digest: str
    stamp: Stamp
    at: float
    seen: bool = False


@dataclass(slots=True)
class Children:
    """Which children of a group are as they were applied."""

    applied: dict[tuple[str, str], _Applied] = field(default_factory=dict)

    def due(self, manifest: Manifest, shown: Child | None, now: float) -> float:
        """Seconds until the child must be applied. 0, now: never written by this process, wanted otherwise, changed by others, or gone."""
        last = self.applied.get(_key(manifest))
        if last is None or last.digest != digest(manifest):
            return 0.0
        if shown is None:
            return 0.0 if last.seen else max(0.0, last.at + _SHOWN_WITHIN - now)
        if shown.revision < last.stamp.revision:  # the watch is behind
            return inf
        self.applied[_key(manifest)] = replace(last, seen=True)
        same = shown.generation == last.stamp.generation if last.stamp.generation else shown.revision == last.stamp.revision
        return inf if same else 0.0

    def written(self, manifest: Manifest, stamp: Stamp, now: float) -> None:
        self.applied[_key(manifest)] = _Applied(digest(manifest), stamp, now)


@dataclass(frozen=True, slots=True)
class _Status:
    status: Mapping[str, Any]
    revision: int
    at: float


@dataclass(slots=True)
class Statuses:
    """The newest status of each object, and when it may be written again. `interval`: seconds between writes that nobody waits for, by kind."""

    interval: Mapping[str, float]
    written_last: dict[str, _Status] = field(default_factory=dict)

    def newest(self, uid: str, shown: Mapping[str, Any], revision: int) -> Mapping[str, Any]:
        last = self.written_last.get(uid)
        return last.status if last is not None and revision < last.revision else shown

    def wait(self, kind: str, uid: str, urgent: bool, now: float) -> float:
        """Seconds until this write may go out; 0: now."""
        last = self.written_last.get(uid)
        return 0.0 if urgent or last is None else max(0.0, last.at + self.interval[kind] - now)

    def written(self, uid: str, status: Mapping[str, Any], stamp: Stamp, now: float) -> None:
        self.written_last[uid] = _Status(status, stamp.revision, now)

    def forget(self, uid: str) -> None:
        self.written_last.pop(uid, None)


def digest(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]

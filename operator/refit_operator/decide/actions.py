"""What a pass may do. Values, in order; the shell carries them out one after the other and stops at the first failure.

`Confirm` comes after the writes that it vouches for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refit_api.wire import CoordinateSources, Order


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a child object."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Delete:
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class MarkPod:
    """The readiness gate of a generator pod."""

    name: str
    uid: str
    synced: bool
    message: str


@dataclass(frozen=True, slots=True)
class CreateRecord:
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """Takes our finalizer off a WeightVersion that is being deleted."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """`urgent`: a condition, a phase or a number that somebody waits for changed; the rest may be coalesced."""

    kind: str
    name: str
    uid: str
    status: Mapping[str, Any]
    urgent: bool


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tells the catalog that what it wanted is written."""

    epoch: int
    ceiling: int
    records: frozenset[int]


@dataclass(frozen=True, slots=True)
class Protect:
    """Versions in use, which clients may neither retire nor abort; the current one keeps its last holder."""

    numbers: frozenset[int]
    current: int


@dataclass(frozen=True, slots=True)
class Assign:
    """A new order for one generator."""

    pod_uid: str
    instance: str
    target: int
    order: Order
    sources: tuple[CoordinateSources, ...]
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Retire:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveVersion:
    """The record is gone; so may be what the catalog knows."""

    number: int


@dataclass(frozen=True, slots=True)
class Announce:
    """An event on the group or on one of its versions: once for each transition, with the reason of the condition."""

    kind: str
    name: str
    uid: str
    warning: bool
    reason: str
    note: str


Action = Apply | Delete | MarkPod | CreateRecord | ReleaseRecord | WriteStatus | Confirm | Protect | Assign | Retire | Abort | RemoveVersion | Announce

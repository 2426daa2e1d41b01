"""The seams of the control plane. Each Protocol is defined by its consumer; the facts are those of `decide.facts`.

`GroupRef` (namespace, name) is the key of everything: of the queue, of the catalog, of the watch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from refit_api.wire import CoordinateSources, GroupRef, Order, Role, Select, VersionPhase

from refit_operator.decide.actions import Announce
from refit_operator.decide.facts import CatalogFacts, Child, Group, Pod, Record, Verdict

Manifest = Mapping[str, Any]
"""A Kubernetes object as plain data: typed clients validate bodies with their own, older models."""


class Clock(Protocol):
    """`monotonic` for waits, `time` (Unix seconds) for what is written down."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What the watch shows of one group. `manifest` is the RefitGroup itself, None once it is gone."""

    group: Group | None
    manifest: Manifest | None
    pods: tuple[Pod, ...] = ()
    children: tuple[Child, ...] = ()
    records: tuple[Record, ...] = ()


class Watched(Protocol):
    """The watch's memory: never asks the API server."""

    def see(self, key: GroupRef) -> Seen: ...


class PodIndex(Protocol):
    """Live pods, for those who check tokens: a token outlives its pod."""

    def role(self, key: GroupRef, pod_name: str, pod_uid: str) -> Role | None:
        """The role of a pod that is not gone and belongs to the group, else None."""
        ...

    def group(self, namespace: str, pod_name: str, pod_uid: str) -> GroupRef | None: ...
    def leaving(self, key: GroupRef, pod_uid: str) -> bool:
        """Whether the pod is being deleted, as far as was seen."""
        ...


class TokenAuthority(Protocol):
    """The cluster's word on tokens."""

    async def signing_keys(self) -> Mapping[str, Any]:
        """The cluster's key set (JWKS)."""
        ...

    async def issuer(self) -> str: ...

    async def review(self, token: str, audience: str) -> Mapping[str, Any] | None:
        """TokenReview: the authenticated user (username, uid, groups, extra), or None."""
        ...

    async def may_get(self, user: Mapping[str, Any], key: GroupRef) -> bool:
        """SubjectAccessReview: may this person read the RefitGroup?"""
        ...


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a written object stands: resourceVersion as a number, and generation (0 where a kind has none)."""

    revision: int
    generation: int


class Cluster(Protocol):
    """Writes to the API server. Raises SpecError for what only the author can repair, PeerUnavailable and Denied for what may be tried again."""

    async def claim(self, manifest: Manifest) -> bool:
        """Is the name free, or ours? False: a former group of the same name has it until it is collected. SpecError NameTaken: somebody else has it."""
        ...

    async def apply(self, manifest: Manifest) -> Stamp:
        """Server-side apply of a child."""
        ...

    async def dry_run(self, manifest: Manifest) -> Verdict:
        """Would the API server take this workload? Strict: unknown and doubled fields are refused."""
        ...

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Only the object with this uid; one that is gone is fine."""
        ...

    async def write_status(self, kind: str, namespace: str, name: str, uid: str, status: Manifest) -> Stamp:
        """The whole status. An object that is gone, or another one of that name, is left alone."""
        ...

    async def create_record(self, manifest: Manifest) -> None:
        """Creates a WeightVersion; one that is there already is fine."""
        ...

    async def release_record(self, namespace: str, name: str, uid: str) -> None:
        """Takes our finalizer away."""
        ...

    async def mark_pod(self, namespace: str, name: str, uid: str, synced: bool, message: str, now: float) -> None:
        """The readiness gate, and the deletion cost that goes with it. A pod that is gone is fine."""
        ...

    async def post_event(self, namespace: str, event: Announce, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What the spec tells the catalog about a group."""

    uid: str
    model: str
    redundancy: int
    on_busy: str
    lease_seconds: float
    drain_seconds: float
    publish_deadline_seconds: float
    record_every: int
    manual: bool
    arenas: int = 1


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """One WeightVersion, as a catalog without memory needs it. `root` is empty unless it was Ready. `slots`: how many are expected.

    `base` and `select` are those of a subset.
    """

    number: int
    key: str
    run_id: str
    step: int
    plan_key: str
    phase: VersionPhase
    root: bytes = b""
    bytes: int = 0
    slots: int = 0
    base: int = 0
    select: Select | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What Kubernetes holds of the catalog's memory."""

    epoch: int = 0
    ceiling: int = 0
    versions: tuple[RecordedVersion, ...] = ()


class Catalog(Protocol):
    """The catalog as the reconciler drives it. `changed` callbacks put the group into the queue.

    Every pass: `open`, `facts`, then what was decided. Until `open` the catalog answers nobody about the group.
    """

    def subscribe(self, changed: Callable[[GroupRef], None]) -> None: ...

    async def open(self, key: GroupRef, terms: Terms, recorded: Recorded) -> None:
        """The first time in this process (or after a loss) `recorded` is loaded and the epoch raised; later calls only set the terms."""
        ...

    async def facts(self, key: GroupRef) -> CatalogFacts: ...

    async def confirm(self, key: GroupRef, epoch: int, ceiling: int, records: frozenset[int]) -> None:
        """These are written: status.catalogEpoch, status.versionCeiling, and WeightVersions by number."""
        ...

    async def protect(self, key: GroupRef, numbers: frozenset[int], current: int = 0) -> None:
        """Versions in use: clients may neither retire nor abort them. `current` is status.currentVersion: its last holder is not given up."""
        ...

    async def assign(
        self, key: GroupRef, pod_uid: str, instance: str, target: int, order: Order, sources: tuple[CoordinateSources, ...], deadline_seconds: float
    ) -> None:
        """A new order for one generator. Always raises its seq: the caller has compared."""
        ...

    async def retire(self, key: GroupRef, number: int, reason: str) -> None:
        """No new leases, readers finish; also of a version in use: the operator has decided. Without effect on one that ended."""
        ...

    async def abort(self, key: GroupRef, number: int, reason: str) -> None: ...

    async def remove(self, key: GroupRef, number: int) -> None:
        """The record of an ended version is gone: so is the version."""
        ...

    async def forget(self, key: GroupRef) -> None:
        """The group is gone: all of it."""
        ...


class Secrets(Protocol):
    """Secrets as whole objects."""

    async def read_secret(self, namespace: str, name: str) -> Manifest | None: ...

    async def write_secret(self, manifest: Manifest) -> None:
        """Creates it, or replaces the one whose resourceVersion the manifest names. PeerUnavailable when somebody was faster."""
        ...

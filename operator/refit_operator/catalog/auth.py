"""Who calls: pods by their projected token, people by theirs.

Invariants:
- a pod is what its token says (issuer, audience, namespace, pod name, pod UID) and what the pod index shows now: a token outlives its pod;
- a pod speaks for itself only: its own group, its own role, its own workers;
- tokens are checked offline against the cluster's keys; what cannot be checked so (an unknown key, no keys) is asked of the API server, once a minute;
- a token is never stored, logged or repeated in an error: caches know its hash.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jwt
from refit_api import wire
from refit_api.errors import CatalogUnavailable, Denied, PeerUnavailable
from refit_api.names import AUDIENCE

from refit_operator.catalog.model import HANDLERS
from refit_operator.ports import Clock, PodIndex, TokenAuthority

REVIEW_SECONDS = 60.0  # how long an answer of the API server is trusted
KEYS_SECONDS = 10.0  # an unknown key asks for the key set again, not more often than this
CALLS_PER_SECOND, BURST = 50.0, 500.0  # of one pod: eight ranks publishing sixty slots at once fit the burst
REMEMBERED = 8192
ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "ES512")
_POD = "authentication.kubernetes.io/pod-"
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class PodCaller:
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Person:
    """As TokenReview describes the user. Not a pod of a group."""

    user: Mapping[str, Any] = field(hash=False)


class _Recent(Generic[K, V]):
    """The newest entries, each until its time."""

    def __init__(self) -> None:
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K, now: float) -> V | None:
        until, value = self._entries.get(key, (0.0, None))
        return value if now < until else None

    def put(self, key: K, value: V, until: float) -> None:
        self._entries[key] = (until, value)
        self._entries.move_to_end(key)
        while len(self._entries) > REMEMBERED:
            self._entries.popitem(last=False)


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Gate:
    """`identify` says who a token is; `admit` whether that caller may make that call about that group now."""

    def __init__(self, authority: TokenAuthority, pods: PodIndex, clock: Clock) -> None:
        self._authority, self._pods, self._clock = authority, pods, clock
        self._callers: _Recent[str, PodCaller | Person] = _Recent()
        self._readers: _Recent[tuple[str, wire.GroupRef], bool] = _Recent()
        self._buckets: OrderedDict[PodCaller, _Bucket] = OrderedDict()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._keys_at = clock.monotonic() - KEYS_SECONDS
        self._refreshing = asyncio.Lock()
        self._issuer = ""

    async def identify(self, authorization: str) -> PodCaller | Person:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Denied("no token: send the projected token of the pod as `authorization: Bearer`")
        known = hashlib.sha256(token.encode()).hexdigest()
        caller = self._callers.get(known, self._clock.time())
        if caller is None:
            try:
                caller, until = await self._verify(token)
            except PeerUnavailable as error:
                raise CatalogUnavailable("the API server does not answer, so the token cannot be checked", retry_after=KEYS_SECONDS) from error
            self._callers.put(known, caller, until)
        return caller

    async def _verify(self, token: str) -> tuple[PodCaller | Person, float]:
        """The caller, and until when this is true."""
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError as error:
            raise Denied("the token is no JWT") from error
        key = await self._key(str(header.get("kid", "")))
        if key is None:
            return await self._review(token)
        try:
            claims = jwt.decode(token, key, algorithms=list(ALGORITHMS), audience=AUDIENCE, issuer=self._issuer, options={"require": ["exp", "iss", "aud"]})
        except jwt.InvalidTokenError as error:
            raise Denied(f"the token is not valid here: {error}", expected=f"audience {AUDIENCE}, issuer {self._issuer}") from error
        bound = claims.get("kubernetes.io", {})
        pod = bound.get("pod", {})
        if not pod:  # of a person, or of a ServiceAccount outside any pod
            return await self._review(token)
        return PodCaller(str(bound["namespace"]), str(pod["name"]), str(pod["uid"])), float(claims["exp"])

    async def _key(self, kid: str) -> jwt.PyJWK | None:
        async with self._refreshing:  # callers that come together ask once
            now = self._clock.monotonic()
            if kid not in self._keys and now - self._keys_at >= KEYS_SECONDS:
                self._keys_at = now
                keys = dict(await self._authority.signing_keys())
                self._issuer = await self._authority.issuer()
                self._keys = {found.key_id: found for found in jwt.PyJWKSet.from_dict(keys).keys if found.key_id} if keys.get("keys") else {}
        return self._keys.get(kid)

    async def _review(self, token: str) -> tuple[PodCaller | Person, float]:
        user = await self._authority.review(token, AUDIENCE)
        if user is None:
            raise Denied("the API server does not accept the token", expected=f"audience {AUDIENCE}")
        until = self._clock.time() + REVIEW_SECONDS
        extra = user.get("extra") or {}
        names, uids = extra.get(f"{_POD}name"), extra.get(f"{_POD}uid")
        parts = str(user.get("username", "")).split(":")
        if names and uids and parts[:2] == ["system", "serviceaccount"] and len(parts) == 4:
            return PodCaller(parts[2], str(names[0]), str(uids[0])), until
        return Person(user), until

    async def admit(self, caller: PodCaller | Person, method: str, group: wire.GroupRef, worker: wire.WorkerRef | None) -> None:
        """Raises Denied, with what was wrong."""
        if isinstance(caller, Person):
            await self._admit_person(caller, method, group)
        else:
            self._admit_pod(caller, method, group, worker)

    def _admit_pod(self, caller: PodCaller, method: str, group: wire.GroupRef, worker: wire.WorkerRef | None) -> None:
        self._pace(caller)
        role = self._pods.role(group, caller.name, caller.uid) if caller.namespace == group.namespace else None
        if role is None:
            raise Denied(
                f"pod {caller.namespace}/{caller.name} is no live pod of group {group.namespace}/{group.name}",
                retry_after=1.0,  # the pod may be so new that the watch has not shown it yet
                seen=caller.uid,
            )
        if role not in HANDLERS[method].roles:
            raise Denied(
                f"{method} is not for a {role.value}", seen=role.value, expected=", ".join(sorted(allowed.value for allowed in HANDLERS[method].roles))
            )
        if worker is not None and (worker.pod_uid != caller.uid or worker.role is not role):
            raise Denied(
                f"pod {caller.namespace}/{caller.name} ({role.value}) may not speak for another worker",
                seen=f"{worker.role.value} of pod {worker.pod_uid}",
                expected=f"{role.value} of pod {caller.uid}",
            )

    def confirm_leaving(self, caller: PodCaller | Person, group: wire.GroupRef) -> None:
        """That a pod's own end is near: whoever reaches its port can tell it so. Raises Denied."""
        if not isinstance(caller, PodCaller) or not self._pods.leaving(group, caller.uid):
            raise Denied("the pod is not being deleted: it stays", retry_after=1.0)  # the watch may not have shown it yet

    def _pace(self, caller: PodCaller) -> None:
        now = self._clock.monotonic()
        bucket = self._buckets.setdefault(caller, _Bucket(BURST, now))
        bucket.left, bucket.at = min(BURST, bucket.left + (now - bucket.at) * CALLS_PER_SECOND), now
        self._buckets.move_to_end(caller)
        while len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)
        if bucket.left < 1:
            raise Denied(f"pod {caller.namespace}/{caller.name} calls too fast: at most {CALLS_PER_SECOND:g} calls a second", retry_after=1.0)
        bucket.left -= 1

    async def _admit_person(self, caller: Person, method: str, group: wire.GroupRef) -> None:
        if not HANDLERS[method].people:
            raise Denied(f"{method} is for pods of the group only")
        name = str(caller.user.get("username", ""))
        allowed = self._readers.get((name, group), self._clock.time())
        if allowed is None:
            allowed = await self._authority.may_get(caller.user, group)
            self._readers.put((name, group), allowed, self._clock.time() + REVIEW_SECONDS)
        if not allowed:
            raise Denied(f"{name} may not read RefitGroup {group.namespace}/{group.name}", seen=name)

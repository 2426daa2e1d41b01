"""A whole catalog without Kubernetes, in a thread: real gRPC, TLS and tokens on loopback. For tests, benchmarks and trials of the runtime.

The twins stand in for what Kubernetes gives: `LocalTokens` signs and publishes keys like a cluster, `LocalPods` is the watch's index, and the
operator's writes are confirmed as soon as they are wanted.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from refit_api.errors import RefitError
from refit_api.names import AUDIENCE
from refit_api.wire import GroupRef, Role

from refit_operator.catalog.auth import Gate
from refit_operator.catalog.certificates import group_key, make_authority, make_server
from refit_operator.catalog.memory import MemoryCatalog
from refit_operator.catalog.service import CatalogService, serve
from refit_operator.decide.facts import VersionState
from refit_operator.ports import Clock, Recorded, RecordedVersion, Terms

HOST = "127.0.0.1"
START_SECONDS = 20.0
T = TypeVar("T")

TERMS = Terms(
    uid="00000000-0000-0000-0000-000000000001",
    model="",
    redundancy=1,
    on_busy="Wait",
    lease_seconds=30.0,
    drain_seconds=60.0,
    publish_deadline_seconds=150.0,
    record_every=1,
    manual=False,
)


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


@dataclass(slots=True)
class LocalTokens:
    """Twin of `ports.TokenAuthority`: a cluster with one signing key. `people`: tokens of persons, with the user that TokenReview shows."""

    issuer_url: str = "https://kubernetes.default.svc"
    key_id: str = "key-1"
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()), repr=False)
    people: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)

    def issue(self, namespace: str, pod_name: str, pod_uid: str, **claims: object) -> str:
        """A projected token, as the kubelet mounts it; `claims` replace its own."""
        now = int(time.time())
        bound = {"namespace": namespace, "pod": {"name": pod_name, "uid": pod_uid}, "serviceaccount": {"name": "refit", "uid": "0"}}
        payload = {"iss": self.issuer_url, "aud": [AUDIENCE], "iat": now, "nbf": now, "exp": now + 600, "kubernetes.io": bound}
        return jwt.encode({**payload, **claims}, self.key, algorithm="ES256", headers={"kid": self.key_id})

    async def signing_keys(self) -> Mapping[str, Any]:
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        return {"keys": [{**public, "kid": self.key_id, "alg": "ES256", "use": "sig"}]}

    async def issuer(self) -> str:
        return self.issuer_url

    async def review(self, token: str, audience: str) -> Mapping[str, Any] | None:
        return self.people.get(token)

    async def may_get(self, user: Mapping[str, Any], key: GroupRef) -> bool:
        return user.get("username") in self.readers


@dataclass(slots=True)
class LocalPods:
    """Twin of `ports.PodIndex`: pods by UID."""

    pods: dict[str, tuple[GroupRef, str, Role]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)

    def role(self, key: GroupRef, pod_name: str, pod_uid: str) -> Role | None:
        group, name, role = self.pods.get(pod_uid, (None, "", None))
        return role if (group, name) == (key, pod_name) else None

    def group(self, namespace: str, pod_name: str, pod_uid: str) -> GroupRef | None:
        group, name, _ = self.pods.get(pod_uid, (None, "", None))
        return group if group is not None and (group.namespace, name) == (namespace, pod_name) else None

    def leaving(self, key: GroupRef, pod_uid: str) -> bool:
        return pod_uid in self.deleted


class LocalCatalog:
    """Serves one group at `address`; clients trust `ca`. Made by `local_catalog`."""

    def __init__(self, group: GroupRef, terms: Terms, clock: Clock) -> None:
        self.group, self.terms = group, terms
        self.tokens, self.pods = LocalTokens(), LocalPods()
        self.authority = make_authority("refit local", dt.datetime.now(dt.timezone.utc))
        self.ca = self.authority.certificate
        self.store = MemoryCatalog(clock)
        self.address = ""
        self._gate = Gate(self.tokens, self.pods, clock)
        self._ceiling = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()

    def admit(self, role: Role, pod_uid: str, pod_name: str = "") -> str:
        """A pod of the group appears; gives its token."""
        self.pods.pods[pod_uid] = (self.group, pod_name or pod_uid, role)
        return self.tokens.issue(self.group.namespace, pod_name or pod_uid, pod_uid)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the catalog's own loop, from another thread: what the reconciler would do."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)

    def lose_memory(self) -> None:
        """As if the operator had started again: what is recorded is all that is known."""
        self.run(self._reopen())

    async def _reopen(self) -> None:
        facts = await self.store.facts(self.group)
        await self.store.forget(self.group)
        await self._open(Recorded(facts.epoch, self._ceiling, tuple(_recorded(state) for state in facts.versions)))

    async def _open(self, recorded: Recorded) -> None:
        await self.store.open(self.group, self.terms, recorded)
        await self._write(self.group)

    async def _write(self, group: GroupRef) -> None:
        """The operator's part: what the catalog wants written is written at once."""
        wants = (await self.store.facts(group)).wants
        if wants.epoch or wants.ceiling or wants.records:
            self._ceiling = max(self._ceiling, wants.ceiling)
            await self.store.confirm(group, wants.epoch, wants.ceiling, frozenset(wants.records))

    def serve(self, started: Future[int]) -> None:
        """The thread's work, until `stop`."""
        try:
            self._loop.run_until_complete(self._serve(started))
        finally:
            self._loop.close()

    async def _serve(self, started: Future[int]) -> None:
        writes: set[asyncio.Task[None]] = set()

        def changed(group: GroupRef) -> None:
            task = asyncio.ensure_future(self._write(group))
            writes.add(task)
            task.add_done_callback(writes.discard)

        self.store.subscribe(changed)
        await self._open(Recorded())
        tls = make_server(self.authority, [HOST], dt.datetime.now(dt.timezone.utc))
        service = CatalogService(self.store, self._gate, partial(group_key, self.authority))
        try:
            async with serve(service, f"{HOST}:0", tls) as port, self.store.running():
                started.set_result(port)
                await self._stop.wait()
        except RefitError as error:
            started.set_exception(error)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)


def _recorded(state: VersionState) -> RecordedVersion:
    version = state.version
    return RecordedVersion(
        number=version.number,
        key=version.key,
        run_id=version.run_id,
        step=version.step,
        plan_key=version.plan_key,
        phase=version.phase,
        root=version.root,
        bytes=version.bytes,
        slots=len(version.slots),
        base=version.base,
        select=version.select,
    )


@contextmanager
def local_catalog(group: GroupRef | None = None, terms: Terms = TERMS, clock: Clock | None = None) -> Iterator[LocalCatalog]:
    """Runs while open, on a free port of the loopback."""
    catalog = LocalCatalog(group if group is not None else GroupRef("default", "demo"), terms, clock if clock is not None else SystemClock())
    started: Future[int] = Future()
    thread = threading.Thread(target=catalog.serve, args=(started,), name="local-catalog", daemon=True)
    thread.start()
    catalog.address = f"{HOST}:{started.result(START_SECONDS)}"
    try:
        yield catalog
    finally:
        catalog.stop()
        thread.join(START_SECONDS)

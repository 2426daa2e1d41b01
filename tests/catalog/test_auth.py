"""Who gets in: tokens as a cluster signs them, a pod index that forgets, people with and without the right to read."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from refit_api.errors import CatalogUnavailable, Denied, PeerUnavailable
from refit_api.wire import GroupRef, Role, WorkerRef
from refit_operator.catalog.auth import BURST, Gate, Person, PodCaller
from refit_operator.catalog.local import LocalPods, LocalTokens

if TYPE_CHECKING:
    from tests.catalog.conftest import Hand
else:
    Hand = Any

GROUP = GroupRef("ns", "demo")
POD = PodCaller("ns", "gen-0", "uid-0")


@dataclass
class Cluster(LocalTokens):
    """Counts how often it is asked for its keys, and may be away."""

    asked: int = 0
    away: bool = False

    async def signing_keys(self) -> Mapping[str, Any]:
        self.asked += 1
        if self.away:
            raise PeerUnavailable("the API server does not answer")
        return await LocalTokens.signing_keys(self)


class Site:
    """A gate with its cluster."""

    def __init__(self, clock: Hand) -> None:
        self.tokens = Cluster()
        self.pods = LocalPods({"uid-0": (GROUP, "gen-0", Role.GENERATOR), "uid-1": (GROUP, "trainer-0", Role.TRAINER)})
        self.gate = Gate(self.tokens, self.pods, clock)

    def token(self, **claims: Any) -> str:
        return self.tokens.issue("ns", "gen-0", "uid-0", **claims)


@pytest.fixture
def site(clock: Hand) -> Site:
    return Site(clock)


async def test_a_pod_is_what_its_token_says(site: Site) -> None:
    assert await site.gate.identify(f"Bearer {site.token()}") == POD


FOREIGN = LocalTokens()
REFUSED: dict[str, Callable[[Site], str]] = {
    "no token": lambda s: "",
    "another scheme": lambda s: "Basic " + s.token(),
    "no JWT": lambda s: "Bearer abc",
    "another audience": lambda s: "Bearer " + s.token(aud=["https://kubernetes.default.svc"]),
    "another issuer": lambda s: "Bearer " + s.token(iss="https://elsewhere"),
    "expired": lambda s: "Bearer " + s.token(exp=int(time.time()) - 1),
    "not yet valid": lambda s: "Bearer " + s.token(nbf=int(time.time()) + 600),
    "signed by another key under the same name": lambda s: "Bearer " + FOREIGN.issue("ns", "gen-0", "uid-0"),
    "no pod, and unknown to the API server": lambda s: "Bearer " + s.token(**{"kubernetes.io": {"namespace": "ns"}}),
    "changed": lambda s: "Bearer " + s.token()[:-4] + "AAAA",
}


@pytest.mark.parametrize("authorization", REFUSED.values(), ids=REFUSED)
async def test_refused(site: Site, authorization: Callable[[Site], str]) -> None:
    sent = authorization(site)
    with pytest.raises(Denied) as refused:
        await site.gate.identify(sent)
    assert not sent or sent.split(" ")[-1] not in f"{refused.value} {refused.value.facts} {refused.value.__cause__}"


async def test_a_new_signing_key_is_fetched_and_the_keys_are_not_asked_for_with_every_call(site: Site, clock: Hand) -> None:
    for nonce in range(3):
        await site.gate.identify(f"Bearer {site.token(nonce=nonce)}")
    assert site.tokens.asked == 1
    site.tokens.key, site.tokens.key_id = ec.generate_private_key(ec.SECP256R1()), "key-2"
    clock.at += 11.0
    assert await site.gate.identify(f"Bearer {site.token()}") == POD
    assert site.tokens.asked == 2


async def test_what_cannot_be_checked_offline_is_reviewed(site: Site) -> None:
    token = FOREIGN.issue("ns", "gen-0", "uid-0")
    site.tokens.key_id = "rotated away"
    extra = {"authentication.kubernetes.io/pod-name": ["gen-0"], "authentication.kubernetes.io/pod-uid": ["uid-0"]}
    site.tokens.people[token] = {"username": "system:serviceaccount:ns:refit", "extra": extra}
    assert await site.gate.identify(f"Bearer {token}") == POD


async def test_without_the_api_server_known_keys_still_work(site: Site, clock: Hand) -> None:
    await site.gate.identify(f"Bearer {site.token()}")
    site.tokens.away = True
    clock.at += 11.0
    assert await site.gate.identify(f"Bearer {site.token(nonce=1)}") == POD
    site.tokens.key_id = "key-2"
    with pytest.raises(CatalogUnavailable):
        await site.gate.identify(f"Bearer {site.token()}")


async def test_admitted(site: Site) -> None:
    await site.gate.admit(POD, "Report", GROUP, WorkerRef("uid-0", Role.GENERATOR, 0, "a"))


NOT_ADMITTED: dict[str, tuple[PodCaller, str, GroupRef, WorkerRef | None, str]] = {
    "a pod that is gone": (PodCaller("ns", "gen-0", "uid-9"), "Report", GROUP, None, "no live pod"),
    "the name of another pod": (PodCaller("ns", "gen-1", "uid-0"), "Report", GROUP, None, "no live pod"),
    "another group": (POD, "ListVersions", GroupRef("ns", "other"), None, "no live pod"),
    "another namespace": (PodCaller("elsewhere", "gen-0", "uid-0"), "ListVersions", GROUP, None, "no live pod"),
    "a call of the other role": (POD, "CreateVersion", GROUP, None, "not for a generator"),
    "for another pod": (POD, "Report", GROUP, WorkerRef("uid-1", Role.GENERATOR, 0, "a"), "another worker"),
    "as the other role": (POD, "Heartbeat", GROUP, WorkerRef("uid-0", Role.TRAINER, 0, "a"), "another worker"),
}


@pytest.mark.parametrize(("caller", "method", "group", "worker", "text"), NOT_ADMITTED.values(), ids=NOT_ADMITTED)
async def test_not_admitted(site: Site, caller: PodCaller, method: str, group: GroupRef, worker: WorkerRef | None, text: str) -> None:
    with pytest.raises(Denied, match=text):
        await site.gate.admit(caller, method, group, worker)


async def test_a_deleted_pod_with_a_valid_token_is_out_at_once(site: Site) -> None:
    caller = await site.gate.identify(f"Bearer {site.token()}")
    await site.gate.admit(caller, "ListVersions", GROUP, None)
    del site.pods.pods["uid-0"]
    with pytest.raises(Denied):
        await site.gate.admit(caller, "ListVersions", GROUP, None)


async def test_a_pod_that_calls_too_fast_is_told_to_wait_and_others_are_not(site: Site) -> None:
    for _ in range(int(BURST)):
        await site.gate.admit(POD, "ListVersions", GROUP, None)
    with pytest.raises(Denied, match="too fast") as refused:
        await site.gate.admit(POD, "ListVersions", GROUP, None)
    assert refused.value.retry_after
    await site.gate.admit(PodCaller("ns", "trainer-0", "uid-1"), "ListVersions", GROUP, None)


PEOPLE: dict[str, tuple[str, str, bool]] = {
    "who may read the group": ("alice", "RetireVersion", True),
    "who may not": ("mallory", "ListVersions", False),
    "what only pods do": ("alice", "SealShard", False),
}


@pytest.mark.parametrize(("name", "method", "allowed"), PEOPLE.values(), ids=PEOPLE)
async def test_people(site: Site, name: str, method: str, allowed: bool) -> None:
    site.tokens.readers.add("alice")
    token = site.token(**{"kubernetes.io": {}, "sub": name})
    site.tokens.people[token] = {"username": name}
    caller = await site.gate.identify(f"Bearer {token}")
    assert isinstance(caller, Person)
    admission: Awaitable[None] = site.gate.admit(caller, method, GROUP, None)
    if allowed:
        await admission
    else:
        with pytest.raises(Denied):
            await admission

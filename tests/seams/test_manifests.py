"""One contract for the ways to get a manifest: whole, from the process that registered, to members of the group only, never a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from refit_api.errors import Denied, PeerUnavailable, SpecError, VersionRetired, WireMismatch
from refit_api.wire import GetManifest, Manifest, ManifestRun, Role, Source, WorkerRef
from refit_runtime.adapters.manifests import GrpcManifests
from refit_runtime.adapters.memory import Fabric, MemoryManifests
from refit_runtime.ports import Manifests

HOLDER = WorkerRef("source-pod", Role.TRAINER, 0, "i1")
READER = WorkerRef("reader-pod", Role.GENERATOR, 0, "i2")
KEY = b"k" * 32
RUNS = tuple(ManifestRun(index, index * 1000, 1 << 30, bytes([index]) * (300_000 + index)) for index in range(9))


def answer(request: GetManifest) -> Manifest:
    if request.number == 404:
        raise VersionRetired("version 404 is retired", seen=404)
    return Manifest(HOLDER, request.number, "plan", "agent", b"m" * 5000, 4096, 0, "DRAM", RUNS)


@pytest.fixture(params=["memory", "grpc"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Manifests, Manifests, Source]]:
    fabric = Fabric()
    holder, reader = (MemoryManifests(fabric) if request.param == "memory" else GrpcManifests("127.0.0.1", 0) for _ in range(2))
    endpoint = holder.serve(answer)
    reader.serve(answer)
    yield holder, reader, Source(HOLDER, endpoint)
    reader.close()
    holder.close()


def ask(number: int = 7) -> GetManifest:
    return GetManifest(number, READER, HOLDER)


def test_a_member_gets_the_whole_manifest(pair: Any) -> None:
    holder, reader, source = pair
    holder.admit(KEY)
    reader.admit(KEY)
    assert reader.fetch(source, ask(), 5.0) == answer(ask())


def test_strangers_are_denied(pair: Any) -> None:
    holder, reader, source = pair
    holder.admit(KEY)
    reader.admit(b"x" * 32)
    with pytest.raises(Denied, match="members of the group"):
        reader.fetch(source, ask(), 5.0)


def test_the_holders_error_arrives_typed(pair: Any) -> None:
    holder, reader, source = pair
    holder.admit(KEY)
    reader.admit(KEY)
    with pytest.raises(VersionRetired) as caught:
        reader.fetch(source, ask(404), 5.0)
    assert caught.value.facts == {"seen": "404"}


def test_another_process_at_the_same_place_is_refused(pair: Any) -> None:
    holder, reader, source = pair
    holder.admit(KEY)
    reader.admit(KEY)
    with pytest.raises(WireMismatch):
        reader.fetch(replace(source, worker=replace(HOLDER, incarnation="i0")), ask(), 5.0)


def test_a_holder_that_is_gone_is_unavailable_soon(pair: Any) -> None:
    holder, reader, source = pair
    holder.admit(KEY)
    reader.admit(KEY)
    holder.close()
    start = time.monotonic()
    with pytest.raises(PeerUnavailable):
        reader.fetch(source, ask(), 3.0)
    assert time.monotonic() - start < 10


def test_a_certificate_that_is_not_the_registered_one_is_refused() -> None:
    """Who takes over the address of a dead pod does not get its readers."""
    one, two, reader = (GrpcManifests("127.0.0.1", 0) for _ in range(3))
    try:
        first, second = one.serve(answer), two.serve(answer)
        for each in (one, two, reader):
            each.admit(KEY)
        with pytest.raises(PeerUnavailable):
            reader.fetch(Source(HOLDER, replace(first, port=second.port)), ask(), 3.0)
    finally:
        for each in (one, two, reader):
            each.close()


def test_a_port_in_use_is_said() -> None:
    one = GrpcManifests("127.0.0.1", 0)
    port = one.serve(answer).port
    try:
        with pytest.raises(SpecError, match="port is in use"):
            GrpcManifests("127.0.0.1", port).serve(answer)
    finally:
        one.close()

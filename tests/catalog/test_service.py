"""The service over real gRPC, TLS and tokens: what is refused before the model is asked, and that waits, streams and errors arrive."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import structlog
from refit_api import codec, wire
from refit_api.errors import CatalogUnavailable, Denied, LeaseLost, NoClass, RefitError, SpecError, WireMismatch
from refit_api.wire import Order, Role, VersionPhase, WorkerRef
from refit_operator.catalog.auth import Gate
from refit_operator.catalog.certificates import group_key, make_authority, make_server
from refit_operator.catalog.local import LocalCatalog, LocalPods, LocalTokens, SystemClock
from refit_operator.catalog.memory import MemoryCatalog
from refit_operator.catalog.service import MAX_FRAME_BYTES, MAX_UNARY_BYTES, CatalogService, serve

TRAINER = WorkerRef("trainer-0", Role.TRAINER, 0, "a")
GENERATOR = WorkerRef("gen-0", Role.GENERATOR, 0, "a")
SECONDS = 10.0


@dataclass
class Caller:
    """A pod: its channel and its token."""

    channel: grpc.Channel
    token: str
    group: wire.GroupRef

    def send(self, name: str, request: Any, seconds: float = SECONDS, raw: bool = False) -> Any:
        """The reply, or the stream of replies. `raw`: the request is bytes already."""
        method = codec.METHODS[name]
        kind = self.channel.stream_unary if method.uploads else self.channel.unary_stream if method.streams else self.channel.unary_unary
        send = kind(method.path, request_serializer=None if raw else codec.encode, response_deserializer=lambda data: codec.decode(method.reply, data))
        with failures():
            return send(request, timeout=seconds, metadata=(("authorization", f"Bearer {self.token}"),))

    def register(self, ref: WorkerRef, layout: bytes = b"layout", **fields: Any) -> wire.Registered:
        name = hashlib.sha256(layout).hexdigest()
        request = wire.RegisterWorker(wire.PROTOCOL, self.group, ref, 1, name, wire.Endpoint("host", 1, "PEM"), **fields)
        answer: wire.Registered = self.send("RegisterWorker", request)
        self.send("PutLayout", iter([wire.Blob(self.group, name, layout)]))
        return answer


class failures:  # noqa: N801 (reads as a statement)
    """gRPC's errors as the error tree."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.RpcError):
            trailing = dict(error.trailing_metadata() or ())
            raise codec.decode_failure(error.code().name, error.details() or "", trailing.get(codec.ERROR_METADATA)) from error


@pytest.fixture
def channel(catalog_server: LocalCatalog) -> Iterator[grpc.Channel]:
    with grpc.secure_channel(catalog_server.address, grpc.ssl_channel_credentials(catalog_server.ca)) as channel:
        yield channel


@pytest.fixture
def trainer(catalog_server: LocalCatalog, channel: grpc.Channel) -> Caller:
    return Caller(channel, catalog_server.admit(Role.TRAINER, "trainer-0"), catalog_server.group)


@pytest.fixture
def generator(catalog_server: LocalCatalog, channel: grpc.Channel) -> Caller:
    return Caller(channel, catalog_server.admit(Role.GENERATOR, "gen-0"), catalog_server.group)


def publish(trainer: Caller, step: int) -> wire.Version:
    def request(plan_key: str) -> wire.CreateVersion:
        return wire.CreateVersion(trainer.group, TRAINER, f"run-1:{step}", "run-1", step, plan_key, ("0",))

    plan_key = trainer.send("CreateVersion", request("")).plan_key
    version: wire.Version = trainer.send("CreateVersion", request(plan_key)).version
    trainer.send("OpenShard", wire.OpenShard(trainer.group, TRAINER, version.number, "0", 10))
    trainer.send("SealShard", wire.SealShard(trainer.group, TRAINER, version.number, "0", 10, plan_key, {0: b"r" * 32}))
    return version


def test_the_life_of_a_version(catalog_server: LocalCatalog, trainer: Caller, generator: Caller) -> None:
    group = trainer.group
    keys = trainer.register(TRAINER, run_id="run-1"), generator.register(GENERATOR, b"needs", coordinate="tp0")
    assert keys[0].group_key == keys[1].group_key == group_key(catalog_server.authority, keys[0].group_uid)
    number = publish(trainer, 0).number
    facts = generator.send("GetVersion", wire.GetVersion(group, number))
    assert facts.version.phase is VersionPhase.READY
    document = b"".join(frame.data for frame in generator.send("GetLayout", wire.GetLayout(group, facts.version.plan_key)))
    assert hashlib.sha256(document).hexdigest() == facts.version.plan_key
    sources = generator.send("ListShards", wire.ListShards(group, number)).sources
    assert [(source.worker, source.slots, source.complete) for source in sources] == [(TRAINER, ("0",), True)]
    assert generator.send("AcquireLease", wire.AcquireLease(group, GENERATOR, number, (TRAINER,))).lease_seconds == 30.0
    assert trainer.send("CloseHolder", wire.CloseHolder(group, TRAINER, number)).readers == ("gen-0",)
    generator.send("ReleaseLease", wire.ReleaseLease(group, GENERATOR, number))
    assert trainer.send("CloseHolder", wire.CloseHolder(group, TRAINER, number)).readers == ()


def test_a_wait_ends_before_the_caller_s_deadline_and_says_why(trainer: Caller) -> None:
    trainer.register(TRAINER, run_id="run-1")
    with pytest.raises(NoClass):
        trainer.send("CreateVersion", wire.CreateVersion(trainer.group, TRAINER, "run-1:0", "run-1", 0, "", ("0",)), seconds=1.5)


def test_streams(catalog_server: LocalCatalog, trainer: Caller, generator: Caller) -> None:
    trainer.register(TRAINER, run_id="run-1")
    generator.register(GENERATOR, b"needs", coordinate="tp0")
    versions = generator.send("WatchVersions", wire.ListVersions(trainer.group), seconds=60.0)
    orders = generator.send("WatchAssignment", wire.WatchAssignment(trainer.group, GENERATOR), seconds=60.0)
    number = publish(trainer, 0).number
    assert next(version.number for version in versions if version.phase is VersionPhase.READY) == number
    catalog_server.run(catalog_server.store.assign(trainer.group, "gen-0", "0", number, Order.STAGE, (), 60.0))
    order = next(orders)
    assert (order.catalog_epoch, order.seq, order.target, order.order) == (1, 1, number, Order.STAGE)
    versions.cancel()
    orders.cancel()


def test_a_layout_of_many_frames_comes_back_whole(trainer: Caller) -> None:
    layout = bytes(range(256)) * (12 << 10)
    name = hashlib.sha256(layout).hexdigest()
    trainer.send("RegisterWorker", wire.RegisterWorker(wire.PROTOCOL, trainer.group, TRAINER, 1, name, run_id="run-1"))
    frames = [layout[at : at + MAX_FRAME_BYTES] for at in range(0, len(layout), MAX_FRAME_BYTES)]
    assert len(frames) == 3
    trainer.send("PutLayout", iter([wire.Blob(trainer.group, name, frame) for frame in frames]))
    assert b"".join(frame.data for frame in trainer.send("GetLayout", wire.GetLayout(trainer.group, name))) == layout


REFUSED: dict[str, tuple[Callable[[Caller], object], type[RefitError], str]] = {
    "a request over the bound": (lambda c: c.send("Heartbeat", wire.Heartbeat(wire.GroupRef("x" * MAX_UNARY_BYTES, ""), TRAINER)), SpecError, "16384"),
    "a frame over the bound": (lambda c: c.send("PutLayout", iter([wire.Blob(c.group, "h", b"x" * (2 << 20))])), WireMismatch, "does not take"),
    "bytes that are no message": (lambda c: c.send("Heartbeat", b"\xff\xff", raw=True), WireMismatch, "Heartbeat"),
    "a message without its parts": (lambda c: c.send("Heartbeat", b"", raw=True), WireMismatch, "Heartbeat.group"),
    "a layout of no frame": (lambda c: c.send("PutLayout", iter([])), WireMismatch, "at least one frame"),
    "frames of two layouts": (lambda c: c.send("PutLayout", iter([wire.Blob(c.group, name, b"x") for name in ("a", "b")])), WireMismatch, "one hash"),
    "another group": (lambda c: c.send("ListVersions", wire.ListVersions(wire.GroupRef("default", "other"))), Denied, "no live pod"),
    "another pod's worker": (lambda c: c.send("Heartbeat", wire.Heartbeat(c.group, WorkerRef("other", Role.TRAINER, 0, "a"))), Denied, "another worker"),
    "the other role": (lambda c: c.send("RenewLease", wire.RenewLease(c.group, TRAINER, 1)), Denied, "not for a trainer"),
    "a stream of the other role": (lambda c: next(c.send("WatchAssignment", wire.WatchAssignment(c.group, TRAINER))), Denied, "not for a trainer"),
}


@pytest.mark.parametrize(("act", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(trainer: Caller, act: Callable[[Caller], object], error: type[RefitError], text: str) -> None:
    with pytest.raises(error, match=text), failures():
        act(trainer)


def test_a_layout_over_the_bound_is_refused_while_it_comes(trainer: Caller) -> None:
    frame = wire.Blob(trainer.group, "h", b"x" * MAX_FRAME_BYTES)
    with pytest.raises(WireMismatch, match="in all"):
        trainer.send("PutLayout", (frame for _ in range(100)), seconds=60.0)


def test_a_pod_that_is_gone_is_out(catalog_server: LocalCatalog, trainer: Caller) -> None:
    trainer.send("ListVersions", wire.ListVersions(trainer.group))
    catalog_server.pods.pods.clear()
    with pytest.raises(Denied):
        trainer.send("ListVersions", wire.ListVersions(trainer.group))


def test_without_a_token_nobody_gets_in(trainer: Caller) -> None:
    trainer.token = ""
    with pytest.raises(Denied, match="no token"):
        trainer.send("ListVersions", wire.ListVersions(trainer.group))


def test_a_client_that_trusts_another_authority_does_not_talk(catalog_server: LocalCatalog, trainer: Caller) -> None:
    other = make_authority("other", dt.datetime.now(dt.timezone.utc)).certificate
    with grpc.secure_channel(catalog_server.address, grpc.ssl_channel_credentials(other)) as channel:
        trainer.channel = channel
        with pytest.raises(CatalogUnavailable):
            trainer.send("ListVersions", wire.ListVersions(trainer.group))


def test_errors_keep_what_they_know(trainer: Caller, generator: Caller) -> None:
    generator.register(GENERATOR, b"needs", coordinate="tp0")
    with pytest.raises(LeaseLost) as lost:
        generator.send("RenewLease", wire.RenewLease(trainer.group, GENERATOR, 7))
    assert lost.value.facts == {"seen": "no lease"}


def test_workers_come_back_to_a_catalog_that_lost_its_memory(catalog_server: LocalCatalog, trainer: Caller, generator: Caller) -> None:
    trainer.register(TRAINER, run_id="run-1")
    generator.register(GENERATOR, b"needs", coordinate="tp0")
    before = publish(trainer, 0)
    catalog_server.lose_memory()
    assert trainer.send("Heartbeat", wire.Heartbeat(trainer.group, TRAINER)) == wire.Beat(catalog_epoch=2, known=False)
    with pytest.raises(CatalogUnavailable, match="register again"):
        trainer.send("CloseHolder", wire.CloseHolder(trainer.group, TRAINER, before.number))
    assert trainer.register(TRAINER, run_id="run-1").catalog_epoch == 2
    trainer.send("SealShard", wire.SealShard(trainer.group, TRAINER, before.number, "0", 10, before.plan_key, {0: b"r" * 32}))
    assert generator.send("GetVersion", wire.GetVersion(trainer.group, before.number)).run_roots == {0: b"r" * 32}


async def test_an_address_in_use_is_said_clearly(catalog_server: LocalCatalog) -> None:
    clock, now = SystemClock(), dt.datetime.now(dt.timezone.utc)
    authority = make_authority("test", now)
    service = CatalogService(MemoryCatalog(clock), Gate(LocalTokens(), LocalPods(), clock), lambda uid: b"")
    with pytest.raises(SpecError, match="cannot listen"):
        async with serve(service, catalog_server.address, make_server(authority, ["127.0.0.1"], now)):
            await asyncio.sleep(0)


def test_no_secret_is_shown() -> None:
    pair = make_authority("test", dt.datetime.now(dt.timezone.utc))
    registered = wire.Registered(1, "uid", b"a group key", 30.0, False)
    assert "PRIVATE KEY" not in repr(pair)
    assert "a group key" not in repr(registered)
    assert group_key(pair, "uid") != group_key(pair, "another uid")
    assert group_key(pair, "uid") == group_key(pair, "uid")


def test_who_is_refused_is_in_the_log_without_the_token(trainer: Caller) -> None:
    with structlog.testing.capture_logs() as logs, pytest.raises(Denied):
        trainer.send("ListVersions", wire.ListVersions(wire.GroupRef("default", "other")))
    refused = next(line for line in logs if line["event"] == "call refused")
    assert (refused["call"], refused["facts"]["seen"]) == ("ListVersions", "trainer-0")
    assert trainer.token not in str(logs)

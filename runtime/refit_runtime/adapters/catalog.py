"""The catalog over gRPC: TLS against the group's CA, the pod's projected token with each call, a deadline on each.

The token file is read for each call, since the kubelet rotates it; the CA file is read again when the catalog does not answer.
A failed call is never repeated here: who called knows whether it still makes sense. After an outage the channel is back within 2 s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from refit_api import codec
from refit_api.errors import CatalogUnavailable, SpecError
from refit_api.wire import (
    AcquireLease,
    Assignment,
    Beat,
    Blob,
    Closed,
    CloseHolder,
    Created,
    CreateVersion,
    Deregister,
    EndVersion,
    GetLayout,
    GetVersion,
    Heartbeat,
    Leased,
    ListShards,
    ListVersions,
    OpenShard,
    Registered,
    RegisterWorker,
    ReleaseLease,
    RenewLease,
    Report,
    SealShard,
    Sources,
    Version,
    VersionFacts,
    Versions,
    WatchAssignment,
)

from refit_runtime.adapters import rpc

CALL_SECONDS = 10.0
M = TypeVar("M")


class GrpcCatalog:
    """Safe to share between threads. Raises CatalogUnavailable, and what the catalog answers."""

    def __init__(self, address: str, ca_file: str, token_file: str) -> None:
        self._address, self._ca_file, self._token_file = address, Path(ca_file), Path(token_file)
        self._lock = threading.Lock()
        self._ca = b""
        self._channel: grpc.Channel | None = None
        self._stubs: dict[str, Callable[..., Any]] = {}
        self._streams: set[grpc.Call] = set()
        self._connect()

    def _connect(self) -> None:
        """A new channel, if the CA is another than that of the present one."""
        ca = _read(self._ca_file)
        with self._lock:
            if ca == self._ca:
                return
            if self._channel is not None:
                self._channel.close()
            self._ca = ca
            self._channel = grpc.secure_channel(self._address, grpc.ssl_channel_credentials(ca), options=rpc.OPTIONS)
            self._stubs = rpc.stubs(self._channel, codec.METHODS)

    def _open(self, method: str, request: object, timeout: float | None) -> Any:
        """The reply, or a stream of replies."""
        try:
            return self._stubs[method](request, timeout=timeout, metadata=self._token())
        except grpc.RpcError as error:
            failed = rpc.failure(error, CatalogUnavailable)
            if isinstance(failed, CatalogUnavailable):
                self._connect()
            raise failed from error
        except ValueError as error:  # a call on a closed channel
            raise CatalogUnavailable(f"the connection to the catalog {self._address} was closed", retry_after=1.0) from error

    def _call(self, reply: type[M], method: str, request: object, timeout: float = CALL_SECONDS) -> M:
        return cast("M", self._open(method, request, timeout))

    def _watch(self, reply: type[M], method: str, request: object) -> Iterator[M]:
        """Endless: the caller's `close` ends it, keepalives find a dead catalog."""
        stream = self._open(method, request, None)
        self._streams.add(stream)
        try:
            yield from rpc.messages(stream, CatalogUnavailable)
        finally:
            stream.cancel()
            self._streams.discard(stream)

    def _token(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {_read(self._token_file).decode().strip()}"),)

    def register(self, request: RegisterWorker) -> Registered:
        return self._call(Registered, "RegisterWorker", request)

    def heartbeat(self, request: Heartbeat) -> Beat:
        return self._call(Beat, "Heartbeat", request)

    def deregister(self, request: Deregister) -> None:
        self._call(object, "Deregister", request)

    def put_layout(self, blob: Blob) -> None:
        self._call(object, "PutLayout", (Blob(blob.group, blob.hash, data) for data in rpc.frames(blob.data)))

    def get_layout(self, request: GetLayout) -> bytes:
        return b"".join(frame.data for frame in rpc.messages(self._open("GetLayout", request, CALL_SECONDS), CatalogUnavailable))

    def create_version(self, request: CreateVersion, timeout: float) -> Created:
        return self._call(Created, "CreateVersion", request, timeout)

    def get_version(self, request: GetVersion) -> VersionFacts:
        return self._call(VersionFacts, "GetVersion", request, CALL_SECONDS + request.wait_seconds)

    def list_versions(self, request: ListVersions) -> Versions:
        return self._call(Versions, "ListVersions", request)

    def watch_versions(self, request: ListVersions) -> Iterator[Version]:
        return self._watch(Version, "WatchVersions", request)

    def abort_version(self, request: EndVersion) -> None:
        self._call(object, "AbortVersion", request)

    def retire_version(self, request: EndVersion) -> None:
        self._call(object, "RetireVersion", request)

    def open_shard(self, request: OpenShard) -> None:
        self._call(object, "OpenShard", request)

    def seal_shard(self, request: SealShard) -> None:
        self._call(object, "SealShard", request)

    def list_shards(self, request: ListShards) -> Sources:
        return self._call(Sources, "ListShards", request)

    def close_holder(self, request: CloseHolder) -> Closed:
        return self._call(Closed, "CloseHolder", request, CALL_SECONDS + request.wait_seconds)

    def acquire_lease(self, request: AcquireLease) -> Leased:
        return self._call(Leased, "AcquireLease", request)

    def renew_lease(self, request: RenewLease) -> Leased:
        return self._call(Leased, "RenewLease", request)

    def release_lease(self, request: ReleaseLease) -> None:
        self._call(object, "ReleaseLease", request)

    def watch_assignment(self, request: WatchAssignment) -> Iterator[Assignment]:
        return self._watch(Assignment, "WatchAssignment", request)

    def report(self, request: Report) -> None:
        self._call(object, "Report", request)

    def close(self) -> None:
        for stream in list(self._streams):
            stream.cancel()
        with self._lock:
            if self._channel is not None:
                self._channel.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}): mount the group's settings and the projected token volume", file=path) from error

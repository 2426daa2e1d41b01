"""The catalog over gRPC: bytes in, bytes out; who calls, what they may, how much they may send. What the calls do is the model's affair.

The handlers are built from the same tables as the clients (`codec.METHODS`) and the rules (`model.HANDLERS`): a call that one of them lacks
does not start. A waiting call ends a little before its caller's deadline, so that the answer says what was waited for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc
import structlog
from refit_api import codec, wire
from refit_api.errors import Denied, RefitError, SpecError, WireMismatch

from refit_operator.catalog.auth import Gate
from refit_operator.catalog.certificates import Pair
from refit_operator.catalog.model import HANDLERS

log = structlog.get_logger(__name__)

MAX_UNARY_BYTES = 16 << 10
MAX_FRAME_BYTES = 1 << 20
MAX_STREAM_BYTES = 64 << 20
ANSWER_SECONDS = 0.5  # kept of a caller's deadline for the way back
NO_DEADLINE_SECONDS = 600.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES + (64 << 10)),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_time_ms", 20_000),  # a client that is gone leaves no stream behind
    ("grpc.keepalive_timeout_ms", 10_000),
)


class Store(Protocol):
    """Where the facts live. `limit`: the most seconds that a call may wait."""

    async def call(self, key: wire.GroupRef, method: str, request: Any, limit: float) -> Any: ...
    def watch_versions(self, request: wire.ListVersions, limit: float) -> AsyncIterator[wire.Version]: ...
    def watch_assignment(self, request: wire.WatchAssignment, limit: float) -> AsyncIterator[wire.Assignment]: ...


Context = Any
"""grpc.aio.ServicerContext, whose stubs are generic over what we pass as bytes."""


class CatalogService:
    """`group_key` gives the key of a group by its UID; it goes to registered workers only."""

    def __init__(self, store: Store, gate: Gate, group_key: Callable[[str], bytes]) -> None:
        self._store, self._gate, self._group_key = store, gate, group_key

    def handler(self) -> grpc.GenericRpcHandler:
        assert set(HANDLERS) == set(codec.METHODS)
        made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, method in codec.METHODS.items():
            if method.uploads:
                made[name] = grpc.stream_unary_rpc_method_handler(self._upload(name, method))
            elif method.streams:
                made[name] = grpc.unary_stream_rpc_method_handler(self._stream(name, method))
            else:
                made[name] = grpc.unary_unary_rpc_method_handler(self._unary(name, method))
        return grpc.method_handlers_generic_handler(codec.CATALOG_SERVICE, made)

    async def _admit(self, name: str, request: Any, context: Context) -> None:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        caller = await self._gate.identify(metadata.get("authorization", ""))
        await self._gate.admit(caller, name, request.group, getattr(request, "worker", None))
        if getattr(request, "leaving", False):
            self._gate.confirm_leaving(caller, request.group)

    def _unary(self, name: str, method: codec.Method) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(data: bytes, context: Context) -> bytes:
            async with _failures(name, context):
                request = _read(method.request, data)
                await self._admit(name, request, context)
                reply = await self._store.call(request.group, name, request, _limit(context))
                if isinstance(reply, wire.Registered):
                    reply = replace(reply, group_key=self._group_key(reply.group_uid))
                return codec.encode(reply)

        return answer

    def _upload(self, name: str, method: codec.Method) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        async def answer(frames: AsyncIterator[bytes], context: Context) -> bytes:
            async with _failures(name, context):
                parts: list[bytes] = []
                first: wire.Blob | None = None
                async for data in frames:
                    frame = codec.decode(wire.Blob, data)
                    if first is None:
                        await self._admit(name, frame, context)
                        first = frame
                    parts.append(frame.data)
                    if (frame.group, frame.hash) != (first.group, first.hash) or sum(map(len, parts)) > MAX_STREAM_BYTES:
                        raise WireMismatch(f"a layout comes in frames of one hash, {MAX_STREAM_BYTES} bytes in all", seen=sum(map(len, parts)))
                if first is None:
                    raise WireMismatch("a layout needs at least one frame")
                whole = replace(first, data=b"".join(parts))
                return codec.encode(await self._store.call(first.group, name, whole, _limit(context)))

        return answer

    def _stream(self, name: str, method: codec.Method) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        async def answer(data: bytes, context: Context) -> AsyncIterator[bytes]:
            async with _failures(name, context):
                request = _read(method.request, data)
                await self._admit(name, request, context)
                async for reply in self._replies(request, _limit(context)):
                    yield codec.encode(reply)

        return answer

    async def _replies(self, request: Any, limit: float) -> AsyncIterator[Any]:
        match request:
            case wire.ListVersions():
                async for version in self._store.watch_versions(request, limit):
                    yield version
            case wire.WatchAssignment():
                async for order in self._store.watch_assignment(request, limit):
                    yield order
            case wire.GetLayout():
                blob = await self._store.call(request.group, "GetLayout", request, limit)
                for start in range(0, max(1, len(blob.data)), MAX_FRAME_BYTES):
                    yield replace(blob, data=blob.data[start : start + MAX_FRAME_BYTES])


def _read(kind: type[Any], data: bytes) -> Any:
    if len(data) > MAX_UNARY_BYTES:
        raise SpecError(f"{kind.__name__} has {len(data)} bytes; a request may have {MAX_UNARY_BYTES}", seen=len(data), expected=MAX_UNARY_BYTES)
    return codec.decode(kind, data)


def _limit(context: Context) -> float:
    remaining = context.time_remaining()
    return NO_DEADLINE_SECONDS if remaining is None else max(0.0, min(remaining - ANSWER_SECONDS, NO_DEADLINE_SECONDS))


@asynccontextmanager
async def _failures(name: str, context: Context) -> AsyncIterator[None]:
    """Errors of the tree become a status with their detail. Others are bugs: gRPC logs them and answers UNKNOWN."""
    try:
        yield
    except RefitError as error:
        if isinstance(error, Denied):
            log.warning("call refused", call=name, peer=context.peer(), error=error.message, facts=error.facts)
        await context.abort(grpc.StatusCode[codec.status_of(error)], error.message[:1024], ((codec.ERROR_METADATA, codec.encode_error(error)),))


@asynccontextmanager
async def serve(service: CatalogService, address: str, tls: Pair) -> AsyncIterator[int]:
    """Listens at `address` (`host:port`, port 0 for any) while open; gives the port."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((service.handler(),))
    try:
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(tls.key, tls.certificate)]))
    except RuntimeError as error:
        raise SpecError(f"the catalog cannot listen at {address}: the address is in use or not ours; free it or set another", seen=address) from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=1.0)

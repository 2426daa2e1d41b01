"""What the two gRPC clients of the runtime share: failures become the error tree, methods come from the service descriptors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import grpc
from refit_api import codec
from refit_api.errors import PeerError, RefitError

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5000),  # gRPC's name for how long one attempt to connect may take: a busy host needs seconds
    ("grpc.max_reconnect_backoff_ms", 2000),  # clients are back within 2 s after an outage
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),  # pods of one cluster: never through a proxy
)
FRAME_BYTES = 512 * 1024


def stubs(channel: grpc.Channel, methods: Mapping[str, codec.Method]) -> dict[str, Callable[..., Any]]:
    """One callable for each method, that takes and gives messages."""
    return {name: _stub(channel, method) for name, method in methods.items()}


def _stub(channel: grpc.Channel, method: codec.Method) -> Callable[..., Any]:
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    made: Callable[..., Any] = kinds[method.uploads, method.streams](
        method.path, request_serializer=codec.encode, response_deserializer=lambda data: codec.decode(method.reply, data)
    )
    return made


def failure(error: grpc.RpcError, unreachable: type[PeerError]) -> RefitError:
    """The error that the other side raised, or `unreachable` if it did not answer."""
    code, details = error.code(), error.details()
    trailing: dict[str, Any] = dict(cast("Iterable[tuple[str, Any]]", error.trailing_metadata() or ()))
    return codec.decode_failure(code.name, details or code.name, trailing.get(codec.ERROR_METADATA), unreachable)


def frames(data: bytes) -> Iterator[bytes]:
    """Pieces that fit a message; one empty piece for nothing."""
    for at in range(0, max(len(data), 1), FRAME_BYTES):
        yield data[at : at + FRAME_BYTES]


def messages(stream: Iterable[Any], unreachable: type[PeerError]) -> Iterator[Any]:
    try:
        yield from stream
    except grpc.RpcError as error:
        raise failure(error, unreachable) from error

"""Messages to bytes and back; alone imports the generated code.

The walk over a message class is the only conversion: a field that the .proto and the dataclass do not share fails the round-trip tests.
What cannot be read is WireMismatch, never a half-filled message. `METHODS` is read from the service descriptors, so the server, the
clients and the .proto cannot disagree. gRPC itself is known to the two adapters only: here a status code is its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import DecodeError, Message

from refit_api import errors, wire
from refit_api._pb import catalog_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ERROR_METADATA = "refit-error-bin"  # trailing metadata of a failed call: an encoded wire.ErrorDetail
MAX_ERROR_BYTES = 4096  # gRPC allows 8 KiB of metadata in all


M = TypeVar("M", bound="DataclassInstance")


def encode(message: DataclassInstance) -> bytes:
    """Deterministic, so that a MAC over it can be checked by the other side."""
    return _filled(message).SerializeToString(deterministic=True)


def decode(kind: type[M], data: bytes) -> M:
    try:
        return _read(kind, _pb_class(kind).FromString(data))
    except DecodeError as error:
        raise errors.WireMismatch(f"{kind.__name__}: {len(data)} bytes that are no such message; both sides must run releases of the same protocol") from error


@cache
def _pb_class(kind: type[Any]) -> type[Message]:
    return cast("type[Message]", getattr(catalog_pb2, kind.__name__))


@cache
def hints(kind: type[Any]) -> dict[str, Any]:
    """Field types by name. Some messages have a field named `bytes`, which would hide the type of that name."""
    return get_type_hints(kind, localns={"bytes": bytes})


def _filled(value: DataclassInstance) -> Message:
    message = _pb_class(type(value))()
    for name in hints(type(value)):
        _put(message, name, getattr(value, name))
    return message


def _put(message: Message, name: str, value: object) -> None:
    match value:
        case None:
            return
        case tuple():
            getattr(message, name).extend(_filled(cast("DataclassInstance", item)) if is_dataclass(item) else item for item in value)
        case dict():
            getattr(message, name).update(value)
        case Enum():
            kind = cast("EnumDescriptor", message.DESCRIPTOR.fields_by_name[name].enum_type)
            setattr(message, name, kind.values_by_name[_enum_name(kind.name, value)].number)
        case _ if is_dataclass(value):
            getattr(message, name).CopyFrom(_filled(cast("DataclassInstance", value)))
        case _:
            setattr(message, name, value)


def _enum_name(kind: str, member: Enum) -> str:
    """Role.TRAINER is ROLE_TRAINER: protobuf enum values share one scope."""
    prefix = "".join(f"_{letter}" if letter.isupper() else letter for letter in kind).lstrip("_").upper()
    return f"{prefix}_{member.name}"


def _read(kind: type[M], message: Message) -> M:
    return kind(**{name: _take(message, name, hint) for name, hint in hints(kind).items()})


def _take(message: Message, name: str, hint: Any) -> object:
    if NoneType in get_args(hint):
        if not message.HasField(name):
            return None
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    value = getattr(message, name)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple(_read(cast("type[Any]", item), each) if is_dataclass(item) else each for each in value)
    if get_origin(hint) is dict:
        return dict(value)
    if is_dataclass(hint):
        if not message.HasField(name):
            raise errors.WireMismatch(f"{message.DESCRIPTOR.name}.{name} is missing; both sides must run releases of the same protocol")
        return _read(cast("type[Any]", hint), value)
    if issubclass(hint, Enum):
        numbers = cast("EnumDescriptor", message.DESCRIPTOR.fields_by_name[name].enum_type).values_by_name
        for member in hint:
            if numbers[_enum_name(hint.__name__, member)].number == value:
                return member
        raise errors.WireMismatch(f"{message.DESCRIPTOR.name}.{name} has no known value", seen=value, expected=", ".join(member.value for member in hint))
    return cast("object", value)


@dataclass(frozen=True, slots=True)
class Method:
    """One gRPC method. `uploads`: the request is a stream of frames; `streams`: the reply is."""

    path: str
    request: type[Any]
    reply: type[Any]
    uploads: bool
    streams: bool


def _methods(service: str) -> dict[str, Method]:
    found = catalog_pb2.DESCRIPTOR.services_by_name[service]
    return {
        method.name: Method(
            path=f"/{found.full_name}/{method.name}",
            request=getattr(wire, method.input_type.name),
            reply=getattr(wire, method.output_type.name),
            uploads=method.client_streaming,
            streams=method.server_streaming,
        )
        for method in found.methods
    }


CATALOG_SERVICE = catalog_pb2.DESCRIPTOR.services_by_name["Catalog"].full_name
MANIFESTS_SERVICE = catalog_pb2.DESCRIPTOR.services_by_name["Manifests"].full_name
METHODS: Mapping[str, Method] = _methods("Catalog")
MANIFEST_METHODS: Mapping[str, Method] = _methods("Manifests")

_CODES: dict[type[errors.RefitError], str] = {
    errors.RefitError: "UNKNOWN",
    errors.SpecError: "INVALID_ARGUMENT",
    errors.PlanError: "FAILED_PRECONDITION",
    errors.PeerError: "FAILED_PRECONDITION",
    errors.PeerUnavailable: "UNAVAILABLE",
    errors.CatalogUnavailable: "UNAVAILABLE",
    errors.StaleOrder: "ABORTED",
    errors.ReplicaMismatch: "DATA_LOSS",
    errors.WireMismatch: "UNIMPLEMENTED",
    errors.Denied: "PERMISSION_DENIED",
    errors.TransferError: "DATA_LOSS",
    errors.TransferTimeout: "DEADLINE_EXCEEDED",
    errors.InstallError: "FAILED_PRECONDITION",
}


def status_of(error: errors.RefitError) -> str:
    """The name of the gRPC status code of an error: the code of the nearest class in the tree."""
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def detail_of(error: errors.RefitError) -> wire.ErrorDetail:
    return wire.ErrorDetail(type=type(error).__name__, message=error.message, retry_after=error.retry_after, facts=dict(error.facts))


def error_of(detail: wire.ErrorDetail) -> errors.RefitError:
    """An error type of a newer peer is a plain RefitError here."""
    error = errors.BY_NAME.get(detail.type, errors.RefitError)(detail.message, retry_after=detail.retry_after)
    error.facts = dict(detail.facts)
    return error


def encode_error(error: errors.RefitError) -> bytes:
    """For the trailing metadata: whole if it fits, else without its facts and with a shortened message."""
    whole = encode(detail_of(error))
    if len(whole) <= MAX_ERROR_BYTES:
        return whole
    return encode(wire.ErrorDetail(type(error).__name__, error.message[: MAX_ERROR_BYTES // 8], error.retry_after))


def decode_failure(code: str, text: str, detail: bytes | None, unreachable: type[errors.PeerError] = errors.CatalogUnavailable) -> errors.RefitError:
    """A failed call as its error. Without a detail it is gRPC's own failure, and `unreachable` says who did not answer."""
    if detail is not None:
        return error_of(decode(wire.ErrorDetail, detail))
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return errors.Denied(f"the call was refused: {text}", seen=code)
    if code in ("UNIMPLEMENTED", "RESOURCE_EXHAUSTED"):
        return errors.WireMismatch(f"the other side does not take this call: {text}", seen=code)
    return unreachable(f"no answer: {text}", retry_after=1.0, seen=code)

"""Messages survive the wire: what one side says is what the other reads, and what cannot be read is refused by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refit_api import codec, errors, wire
from refit_api._pb import catalog_pb2

from tests.examples import examples

MESSAGES = {name: kind for name, kind in vars(wire).items() if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == wire.__name__}
_SCALARS: dict[type, st.SearchStrategy[object]] = {
    str: st.text(max_size=12),
    int: st.integers(min_value=-(2**63), max_value=2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
}


def values(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    args = typing.get_args(hint)
    if type(None) in args:
        return st.none() | values(next(arg for arg in args if arg is not type(None)))
    if typing.get_origin(hint) is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values(kind) for name, kind in codec.hints(hint).items()})
    return st.sampled_from(list(hint)) if issubclass(hint, Enum) else _SCALARS[hint]


@pytest.mark.parametrize("name", MESSAGES)
@given(data=st.data())
@settings(examples(15), suppress_health_check=[HealthCheck.too_slow])
def test_every_message_comes_back_as_it_was_sent(name: str, data: st.DataObject) -> None:
    message = data.draw(values(MESSAGES[name]))
    assert codec.decode(MESSAGES[name], codec.encode(message)) == message


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_and_its_proto_have_the_same_fields(name: str) -> None:
    """A field that only one of them has would be dropped in silence."""
    declared = {field.name for field in getattr(catalog_pb2, name).DESCRIPTOR.fields}
    assert declared == {field.name for field in dataclasses.fields(MESSAGES[name])}


def test_every_proto_message_has_its_dataclass() -> None:
    assert set(catalog_pb2.DESCRIPTOR.message_types_by_name) == set(MESSAGES)


def test_an_absent_optional_is_none_and_a_zero_is_a_zero() -> None:
    detail = codec.decode(wire.ErrorDetail, codec.encode(wire.ErrorDetail("NoClass", "")))
    assert detail.retry_after is None
    assert codec.decode(wire.ErrorDetail, codec.encode(dataclasses.replace(detail, retry_after=0.0))).retry_after == 0.0


UNREADABLE = {
    "not protobuf": (wire.Beat, b"\xff\xff\xff", "Beat"),
    "a required message is missing": (wire.Heartbeat, b"", "Heartbeat.group"),
    "an unset enum": (wire.WorkerRef, b"", "WorkerRef.role"),
    "an enum value of a newer release": (wire.WorkerRef, b"\x10\x63", "WorkerRef.role"),
}


@pytest.mark.parametrize(("kind", "data", "named"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_refused_by_name(kind: type[typing.Any], data: bytes, named: str) -> None:
    with pytest.raises(errors.WireMismatch, match=named):
        codec.decode(kind, data)


@pytest.mark.parametrize("name", errors.BY_NAME)
def test_an_error_keeps_its_type_and_facts_over_the_wire(name: str) -> None:
    sent = errors.BY_NAME[name]("rank 3: seen 2, expected 4", retry_after=2.5, seen=2, expected=4)
    got = codec.decode_failure(codec.status_of(sent), "text", codec.encode_error(sent))
    assert (type(got), got.message, got.retry_after, got.facts) == (type(sent), sent.message, 2.5, {"seen": "2", "expected": "4"})


def test_an_error_too_long_for_the_metadata_is_shortened() -> None:
    packed = codec.encode_error(errors.IncompletePlan("é" * 9000, missing="x" * 9000))
    assert len(packed) <= codec.MAX_ERROR_BYTES
    assert type(codec.decode_failure("FAILED_PRECONDITION", "", packed)) is errors.IncompletePlan


FAILURES = {
    "the catalog is away": ("UNAVAILABLE", errors.CatalogUnavailable),
    "the deadline passed": ("DEADLINE_EXCEEDED", errors.CatalogUnavailable),
    "no token": ("UNAUTHENTICATED", errors.Denied),
    "another program listens": ("UNIMPLEMENTED", errors.WireMismatch),
    "a message over the bound": ("RESOURCE_EXHAUSTED", errors.WireMismatch),
}


@pytest.mark.parametrize(("code", "expected"), FAILURES.values(), ids=FAILURES)
def test_a_failure_without_a_detail_is_grpc_s_own(code: str, expected: type[errors.RefitError]) -> None:
    assert type(codec.decode_failure(code, "text", None)) is expected


def test_methods_are_those_of_the_services() -> None:
    assert codec.METHODS["CreateVersion"] == codec.Method("/refit.v1.Catalog/CreateVersion", wire.CreateVersion, wire.Created, uploads=False, streams=False)
    assert {name for name, method in codec.METHODS.items() if method.uploads} == {"PutLayout"}
    assert {name for name, method in codec.METHODS.items() if method.streams} == {"GetLayout", "WatchVersions", "WatchAssignment"}
    assert codec.MANIFEST_METHODS["GetManifest"].streams


def test_generated_code_loads_on_an_old_protobuf() -> None:
    """The host image picks the protobuf runtime; generated code refuses one older than its generator."""
    stamped = (Path(catalog_pb2.__file__)).read_text().split("# Protobuf Python Version: ")[1].split()[0]
    assert stamped == "5.27.2"


def test_encoding_is_deterministic() -> None:
    """A MAC over it is checked in another process."""
    script = "from refit_api import codec, wire; print(codec.encode(wire.ErrorDetail('T', 'm', None, {c: c for c in 'zyxabc'})).hex())"
    outs = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert outs == {codec.encode(wire.ErrorDetail("T", "m", None, {c: c for c in "zyxabc"})).hex() + "\n"}

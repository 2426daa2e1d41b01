"""Orders and reports between the driver and the workers, as bytes: what vLLM's RPC carries between its processes is plain data.

A report comes on two ways, as an answer and through a file, so it says when it was made: monotonic nanoseconds, the same clock for all processes of a host.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec
from refit_api.codec import decode, encode
from refit_api.wire import RankReport

from refit_runtime.ports import CommitOrder, StageOrder

Order = TypeVar("Order", StageOrder, CommitOrder)


def pack_order(order: StageOrder | CommitOrder) -> bytes:
    return msgspec.msgpack.encode(order)


def unpack_order(kind: type[Order], data: bytes) -> Order:
    return msgspec.msgpack.decode(data, type=kind)


_STAMP = struct.Struct(">Q")


def pack_report(made: int, report: RankReport) -> bytes:
    return _STAMP.pack(made) + encode(report)


def unpack_report(data: bytes) -> tuple[int, RankReport]:
    return _STAMP.unpack_from(data)[0], decode(RankReport, data[_STAMP.size :])

"""Orders and reports between the driver and the workers, as bytes: what vLLM's RPC carries between its processes is plain data."""

from __future__ import annotations

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


def pack_report(report: RankReport) -> bytes:
    return encode(report)


def unpack_report(data: bytes) -> RankReport:
    return decode(RankReport, data)

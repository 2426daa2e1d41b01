"""Connections to holders: made once, with every chunk that may be read from there prepared, and kept over versions.

A connection belongs to a plan, to the place of the holder's arena, to the part of ours that it fills, and to what a subset selects. A holder's new
incarnation or new agent is another place: the old connection is closed before the new one is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from refit_api.errors import PeerError, TransferError, WireMismatch
from refit_api.wire import Manifest, ManifestRun, Select, WorkerRef

from refit_runtime.arena import Holding
from refit_runtime.pieces import parts_of
from refit_runtime.plan.plan import Chunk, Ranges
from refit_runtime.ports import Peer, Read, Transfer, Transport
from refit_runtime.subset import replaces


class Place(NamedTuple):
    """What a connection is made for."""

    agent: str
    base: int
    plan_key: str
    part: int
    select: Select | None

    def is_stale(self, new: Place) -> bool:
        """Another agent, another plan, or what another subset lacked."""
        return (self.agent, self.plan_key) != (new.agent, new.plan_key) or replaces(new.select, self.select)


@dataclass(frozen=True, slots=True)
class Connection:
    """`pieces`: which chunk of the plan is which piece of the peer. `missing`: the same for what we lack of chunks, when that is not all of them."""

    place: Place
    peer: Peer
    pieces: dict[Chunk, int]
    missing: dict[Chunk, int] | None

    def read(self, chunk: Chunk) -> Transfer:
        return self.peer.read(self.pieces[chunk])

    def read_missing(self, chunk: Chunk) -> Transfer:
        if self.missing is None:
            return self.read(chunk)
        return self.peer.read(self.missing[chunk]) if chunk in self.missing else _Present()


class _Present:
    """The read of a chunk that lacks nothing."""

    at_once = True

    def done(self) -> bool:
        return True


class Connections:
    """Of one rank; used by one stage at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._open: dict[tuple[str, int, str], dict[Place, Connection]] = {}

    def to(self, manifest: Manifest, holding: Holding, chunks: Sequence[tuple[Chunk, int]]) -> Connection:
        """`chunks` with their offset in our registered memory; those of runs that the manifest does not list are left out."""
        key = _key(manifest.holder)
        select = holding.select if holding.missing is not None else None
        place = Place(manifest.agent, manifest.base, manifest.plan_key, holding.part, select)
        known = self._open.setdefault(key, {})
        for other in [other for other in known if other.is_stale(place)]:
            _close(known.pop(other))
        if place not in known:
            runs = {run.index: run for run in manifest.runs}
            mine = [(chunk, local) for chunk, local in chunks if chunk.run in runs]
            reads = [_read(runs[chunk.run], chunk, local) for chunk, local in mine]
            lacking = [(chunk, local, holding.needs(chunk)) for chunk, local in mine if select is not None]
            partly = {chunk: _parts(runs[chunk.run], chunk, local, needs) for chunk, local, needs in lacking if needs}
            peer = self._transport.connect(manifest, [*reads, *partly.values()])
            missing = {chunk: len(mine) + i for i, chunk in enumerate(partly)} if select is not None else None
            known[place] = Connection(place, peer, {chunk: i for i, (chunk, _) in enumerate(mine)}, missing)
        return known[place]

    def drop(self, holder: WorkerRef) -> None:
        """Reads that are outstanding still end by themselves."""
        for connection in self._open.pop(_key(holder), {}).values():
            _close(connection)

    def clear(self) -> None:
        for known in list(self._open.values()):
            for connection in known.values():
                _close(connection)
        self._open.clear()


def _read(run: ManifestRun, chunk: Chunk, local: int) -> Read:
    if not run.pieces:
        return Read(run.offset + chunk.offset, local, chunk.bytes)
    parts = parts_of(run.pieces, chunk.offset, chunk.bytes)
    if sum(size for _, size in parts) != chunk.bytes:
        raise WireMismatch(f"run {run.index}: the manifest's pieces end before {chunk.offset + chunk.bytes} bytes: run one release of Refit everywhere")
    starts = accumulate((size for _, size in parts), initial=local)
    return _joined([(remote, start, size) for (remote, size), start in zip(parts, starts, strict=False)])


def _parts(run: ManifestRun, chunk: Chunk, local: int, ranges: Ranges) -> Read:
    """Only some of a chunk, in one read."""
    found = (_read(run, Chunk(chunk.run, offset, size), local + offset - chunk.offset) for offset, size in ranges)
    return _joined([move for read in found for move in read.moves()])


def _joined(moves: Sequence[tuple[int, int, int]]) -> Read:
    return Read(moves[0][0], moves[0][1], sum(size for *_, size in moves), tuple(moves))


def _close(connection: Connection) -> None:
    """A holder that is gone already is what we want."""
    with suppress(PeerError, TransferError):
        connection.peer.close()


def _key(holder: WorkerRef) -> tuple[str, int, str]:
    return holder.pod_uid, holder.rank, holder.instance

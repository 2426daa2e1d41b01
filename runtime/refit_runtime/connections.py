"""Connections to holders: made once, with every chunk that may be read from there prepared, and kept over versions.

A connection belongs to a plan, to the place of the holder's arena and to the part of ours that it fills. A holder's new incarnation or
new agent is another place: the old connection is closed before the new one is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from refit_api.errors import PeerError, TransferError, WireMismatch
from refit_api.wire import Manifest, ManifestRun, WorkerRef

from refit_runtime.pieces import parts_of
from refit_runtime.plan.plan import Chunk
from refit_runtime.ports import Peer, Read, Transfer, Transport


class Place(NamedTuple):
    """What a connection is made for."""

    agent: str
    base: int
    plan_key: str
    part: int


@dataclass(frozen=True, slots=True)
class Connection:
    """`pieces`: which chunk of the plan is which piece of the peer."""

    place: Place
    peer: Peer
    pieces: dict[Chunk, int]

    def read(self, chunk: Chunk) -> Transfer:
        return self.peer.read(self.pieces[chunk])


class Connections:
    """Of one rank; used by one stage at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._open: dict[tuple[str, int, str], dict[Place, Connection]] = {}

    def to(self, manifest: Manifest, part: int, chunks: Sequence[tuple[Chunk, int]]) -> Connection:
        """`chunks` with their offset in our registered memory; those of runs that the manifest does not list are left out."""
        key = _key(manifest.holder)
        place = Place(manifest.agent, manifest.base, manifest.plan_key, part)
        known = self._open.setdefault(key, {})
        for other in [other for other in known if other.agent != place.agent or other.plan_key != place.plan_key]:
            _close(known.pop(other))
        if place not in known:
            runs = {run.index: run for run in manifest.runs}
            mine = [(chunk, local) for chunk, local in chunks if chunk.run in runs]
            reads = [_read(runs[chunk.run], chunk, local) for chunk, local in mine]
            known[place] = Connection(place, self._transport.connect(manifest, reads), {chunk: i for i, (chunk, _) in enumerate(mine)})
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
    return Read(parts[0][0], local, chunk.bytes, parts)


def _close(connection: Connection) -> None:
    """A holder that is gone already is what we want."""
    with suppress(PeerError, TransferError):
        connection.peer.close()


def _key(holder: WorkerRef) -> tuple[str, int, str]:
    return holder.pod_uid, holder.rank, holder.instance

"""The data plane inside one process: a transport that copies bytes, manifests that are function calls, a ballot of threads, and faults on order.

Twins of the NIXL transport, of the manifest server and of an engine's process group, kept to the same contract by `tests/seams`; docs and tests use them.
`FaultyTransport` wraps any transport: what goes wrong is decided per holder by the caller, never by chance.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
from refit_api.errors import Denied, EngineHung, PeerUnavailable, TransferError, WireMismatch
from refit_api.wire import Endpoint, GetManifest, Manifest, Source

from refit_runtime.ports import Ballot, Clock, ManifestAnswer, Peer, Read, Registration, T, Transfer, Transport


@dataclass
class Fabric:
    """What connects the transports and manifest servers of one process."""

    arenas: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    manifests: dict[str, tuple[bytes, ManifestAnswer]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def remote(self, agent: str) -> tuple[torch.Tensor, ...]:
        with self.lock:
            if agent not in self.arenas:
                raise PeerUnavailable(f"the agent {agent} is gone: use another holder", peer=agent)
            return self.arenas[agent]

    def bytes_at(self, agent: str, address: int, size: int) -> torch.Tensor:
        for memory in self.remote(agent):
            start = address - memory.data_ptr()
            if start >= 0 and start + size <= memory.numel():
                return memory[start : start + size]
        raise TransferError(f"{size} bytes at {address:#x} are not registered by {agent}: use another holder", peer=agent)


class MemoryTransport:
    """Copies between the arenas of a `Fabric`; a read moves its bytes when it is asked whether it is done."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._agent = ""
        self._arena: torch.Tensor | None = None
        self._counters = {"registrations": 0, "connections": 0, "reads": 0, "bytes": 0}

    def register(self, arena: torch.Tensor, *more: torch.Tensor) -> None:
        self.close()
        self._agent, self._arena = f"memory-{uuid4()}", arena
        with self._fabric.lock:
            self._fabric.arenas[self._agent] = (arena, *more)
        self._counters["registrations"] += 1

    def registration(self) -> Registration:
        assert self._arena is not None, "register before describing"
        return Registration(self._agent, b"", self._arena.data_ptr(), 0, "DRAM")

    def connect(self, manifest: Manifest, pieces: Sequence[Read]) -> Peer:
        self._fabric.remote(manifest.agent)
        self._counters["connections"] += 1
        return _MemoryPeer(self, self._agent, manifest, tuple(pieces))

    def copy(self, agent: str, manifest: Manifest, piece: Read) -> None:
        """Nothing lands once this transport has another agent."""
        if agent != self._agent or self._arena is None:
            raise TransferError("the read belongs to an agent that was replaced", peer=manifest.agent)
        for remote, local, size in piece.moves():
            self._arena[local : local + size].copy_(self._fabric.bytes_at(manifest.agent, manifest.base + remote, size))
        if self._arena.is_cuda:  # a read that is done is in memory
            torch.cuda.current_stream(self._arena.device).synchronize()
        self._counters["bytes"] += piece.bytes

    def count_read(self) -> None:
        self._counters["reads"] += 1

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        with self._fabric.lock:
            self._fabric.arenas.pop(self._agent, None)
        self._agent, self._arena = "", None


@dataclass(frozen=True, slots=True)
class _MemoryPeer:
    transport: MemoryTransport
    agent: str
    manifest: Manifest
    pieces: tuple[Read, ...]

    def read(self, piece: int) -> Transfer:
        self.transport.count_read()
        return _MemoryTransfer(self.transport, self.agent, self.manifest, self.pieces[piece])

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _MemoryTransfer:
    transport: MemoryTransport
    agent: str
    manifest: Manifest
    piece: Read
    moved: bool = False
    at_once: bool = False

    def done(self) -> bool:
        if not self.moved:
            self.transport.copy(self.agent, self.manifest, self.piece)
            self.moved = True
        return True


@dataclass
class Fault:
    """What goes wrong with the reads from one holder; the counts of `drop`, `hollow` and `corrupt` are used up.

    `delay`: seconds that each read takes longer. `drop`: reads that never end. `hollow`: reads that are done at once and moved nothing.
    `corrupt`: reads whose first byte arrives flipped.
    `die_at`: bytes after which the holder answers nothing any more.
    """

    delay: float = 0.0
    drop: int = 0
    hollow: int = 0
    corrupt: int = 0
    die_at: int | None = None
    moved: int = 0


class FaultyTransport:
    """`faults` by the pod UID of the holder; others are left alone."""

    def __init__(self, inner: Transport, faults: Mapping[str, Fault], clock: Clock) -> None:
        self._inner, self._faults, self._clock = inner, faults, clock
        self._arena: torch.Tensor | None = None

    def register(self, arena: torch.Tensor, *more: torch.Tensor) -> None:
        self._arena = arena
        self._inner.register(arena, *more)

    def registration(self) -> Registration:
        return self._inner.registration()

    def connect(self, manifest: Manifest, pieces: Sequence[Read]) -> Peer:
        peer = self._inner.connect(manifest, pieces)
        fault = self._faults.get(manifest.holder.pod_uid)
        return peer if fault is None else _FaultyPeer(self, peer, tuple(pieces), fault)

    def counters(self) -> Mapping[str, int]:
        return self._inner.counters()

    def close(self) -> None:
        self._inner.close()

    def now(self) -> float:
        return self._clock.monotonic()

    def flip(self, at: int) -> None:
        assert self._arena is not None
        self._arena[at] ^= 1


@dataclass(frozen=True, slots=True)
class _FaultyPeer:
    transport: FaultyTransport
    peer: Peer
    pieces: tuple[Read, ...]
    fault: Fault

    def read(self, piece: int) -> Transfer:
        if self.fault.hollow > 0:
            self.fault.hollow -= 1
            return _Hollow()
        transfer = _FaultyTransfer(self.transport, self.peer.read(piece), self.pieces[piece], self.fault, self.transport.now() + self.fault.delay)
        if self.fault.drop > 0:
            self.fault.drop -= 1
            transfer.lost = True
        elif self.fault.corrupt > 0:
            self.fault.corrupt -= 1
            transfer.flip = True
        return transfer

    def close(self) -> None:
        self.peer.close()


class _Hollow:
    at_once = True

    def done(self) -> bool:
        return True


@dataclass(slots=True)
class _FaultyTransfer:
    transport: FaultyTransport
    transfer: Transfer
    piece: Read
    fault: Fault
    ready: float
    lost: bool = False
    flip: bool = False
    at_once: bool = False

    def done(self) -> bool:
        if self.fault.die_at is not None and self.fault.moved + self.piece.bytes > self.fault.die_at:
            raise TransferError("the holder died", bytes=self.fault.moved)
        if self.lost or self.transport.now() < self.ready or not self.transfer.done():
            return False
        self.fault.moved += self.piece.bytes
        if self.flip:
            self.transport.flip(self.piece.local)
        return True


class MemoryManifests:
    """Manifest server and client of one worker in a `Fabric`; the group key is compared as such."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._host = f"manifests-{uuid4()}"
        self._key = b""
        self._answer: ManifestAnswer | None = None

    def serve(self, answer: ManifestAnswer) -> Endpoint:
        self._answer = answer
        return Endpoint(self._host, 1, "")

    def admit(self, group_key: bytes) -> None:
        self._key = group_key
        if self._answer is not None:
            with self._fabric.lock:
                self._fabric.manifests[self._host] = (group_key, self._answer)

    def fetch(self, source: Source, request: GetManifest, timeout: float) -> Manifest:
        with self._fabric.lock:
            known = self._fabric.manifests.get(source.endpoint.host)
        if known is None:
            raise PeerUnavailable(f"nobody serves manifests at {source.endpoint.host}: use another holder", retry_after=1.0)
        if not self._key or known[0] != self._key:
            raise Denied("the caller is of another group: only members of the group get manifests")
        manifest = known[1](request)
        if manifest.holder != source.worker:
            raise WireMismatch("the manifest is another holder's", seen=manifest.holder, expected=source.worker)
        return manifest

    def close(self) -> None:
        with self._fabric.lock:
            self._fabric.manifests.pop(self._host, None)


class MemoryBallot:
    """One for all ranks of an engine, each in a thread of its own. A rank that is late breaks it for good, as a process group would."""

    def __init__(self, ranks: int, seconds: float) -> None:
        self._met = threading.Barrier(ranks, timeout=seconds)
        self._given: list[Any] = [None] * ranks

    def of(self, rank: int) -> Ballot:
        return _Seat(self._met, self._given, rank)


class _Seat:
    def __init__(self, met: threading.Barrier, given: list[Any], rank: int) -> None:
        self._met, self._given, self._rank = met, given, rank

    def gather(self, mine: T) -> tuple[T, ...]:
        self._given[self._rank] = mine
        try:
            self._met.wait()
            outcomes = tuple(self._given)
            self._met.wait()  # nobody gives the next one before all have these
        except threading.BrokenBarrierError as error:
            raise EngineHung("a rank of this engine was not heard in time: restart the engine") from error
        return outcomes

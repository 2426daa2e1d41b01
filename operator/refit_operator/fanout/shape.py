"""Which shape a version takes through the fleet: the one with the smallest predicted time.

Symbols as in docs: R readers, S bytes of one coordinate, F streams that the trainers feed at full rate, B the rate of one link,
c the chunk, a the overhead of a chunk and hop, k the degree.
- direct: every reader pulls from the trainers, R/F of them share a stream;
- chain: F chains of L = ceil(R/F); a hop adds one chunk's time, because a relay offers a chunk as soon as it is verified;
- tree: an inner node sends every byte k times, but the depth grows with log_k R: wins for small versions, where latency counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil, inf, log


class Topology(str, Enum):
    DIRECT = "Direct"
    CHAIN = "Chain"
    TREE = "Tree"


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of one reading rank and of one trainer rank; seconds per chunk and hop. The defaults are a modest pod network's."""

    reader: float = 1e9
    trainer: float = 1e9
    hop_seconds: float = 2e-3
    chunk_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """`bytes`: of one coordinate. `ranks`: of one generator. `trainers`: ranks that serve the version."""

    readers: int
    bytes: int
    ranks: int
    trainers: int


@dataclass(frozen=True, slots=True)
class Shape:
    """`streams`: readers that the trainers serve directly; `fanout`: readers of one generator; None: no limit.

    `trainers_first`: also when a peer holds the version.
    """

    topology: Topology
    streams: int | None
    fanout: int | None
    seconds: float
    trainers_first: bool = False


def streams(load: Load, rates: Rates) -> int:
    """F: replicas that the trainers can feed at full rate, at least one."""
    return max(1, int(load.trainers * rates.trainer // (max(1, load.ranks) * rates.reader)))


def shape(asked: str, degree: int, readers_per_source: int | None, load: Load, rates: Rates) -> Shape:
    """`asked`: fanout.topology of the spec. Ties go to the simpler shape."""
    if asked == Topology.DIRECT.value:
        return Shape(Topology.DIRECT, readers_per_source, readers_per_source, _direct(load, rates, streams(load, rates)), trainers_first=True)
    fed = streams(load, rates)
    fed = fed if readers_per_source is None else min(fed, readers_per_source)
    chained = readers_per_source if readers_per_source is not None else 1
    branched = readers_per_source if readers_per_source is not None else degree
    made = [
        Shape(Topology.DIRECT, fed, chained, _direct(load, rates, fed)),
        Shape(Topology.CHAIN, fed, chained, _chain(load, rates, fed)),
        Shape(Topology.TREE, fed, branched, _tree(load, rates, fed, max(2, branched))),
    ]
    return min((one for one in made if asked in ("Auto", one.topology.value)), key=lambda one: one.seconds)


def _direct(load: Load, rates: Rates, fed: int) -> float:
    if load.trainers == 0:
        return inf
    return max(1.0, load.readers / fed) * load.bytes / rates.reader


def _chunk(load: Load, rates: Rates) -> int:
    return max(1, min(rates.chunk_bytes, load.bytes))


def _chain(load: Load, rates: Rates, fed: int) -> float:
    chunk = _chunk(load, rates)
    length = max(1, ceil(load.readers / fed))
    return (load.bytes / chunk + length - 1) * (chunk / rates.reader + rates.hop_seconds)


def _tree(load: Load, rates: Rates, fed: int, degree: int) -> float:
    chunk = _chunk(load, rates)
    roots = max(1, ceil(load.readers / fed))
    depth = max(1, ceil(log(roots * (degree - 1) + 1, degree) - 1e-9))
    sends = degree if depth > 1 else 1
    return sends * load.bytes / rates.reader + (depth - 1) * (degree * chunk / rates.reader + rates.hop_seconds)

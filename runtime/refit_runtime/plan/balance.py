"""Who serves what, where several ranks hold the same bytes.

A *pool* is all that one set of ranks holds and one set of coordinates needs. It is one line of bytes in layer order, cut into a share for each rank
that serves a part of it: first pools with fewer holders, each levelling the loads so far, so that ranks which must serve something alone get less of
what others hold too. A share is never a crumb: below 1/64 of the mean load of a rank it goes to another holder, since every share is a run.

Invariant: the result depends on the pools alone, and shares of a pool add up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_CRUMBS = 64


@dataclass(frozen=True, slots=True)
class Pool:
    """`owners` and `needers` are indices in the survey, ascending."""

    owners: tuple[int, ...]
    needers: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """The next `bytes` of the pool's line; `owners` in the order in which readers try them."""

    owners: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Balance:
    """`shares[i]` are those of pool i; an atom smaller than `crumb` need not be split between two of them."""

    shares: tuple[tuple[Share, ...], ...]
    crumb: int


def balance(pools: Sequence[Pool], replicas: Sequence[int], redundancy: int) -> Balance:
    """`replicas[rank]` is the replica that a rank belongs to."""
    ranks = {rank for pool in pools for rank in pool.owners}
    crumb = 1 + sum(pool.bytes for pool in pools) // (max(len(ranks), 1) * _CRUMBS)
    served, kept = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    shares: list[tuple[Share, ...]] = [()] * len(pools)
    for i in sorted(range(len(pools)), key=lambda i: (len(pools[i].owners), -pools[i].bytes, pools[i].owners, pools[i].needers)):
        pool = pools[i]
        first = _level({rank: served[rank] for rank in pool.owners}, pool.bytes, crumb)
        found = []
        for rank in sorted(first):
            owners = _with_alternates(rank, pool.owners, min(redundancy, len(pool.owners)), replicas, kept)
            served[rank] += first[rank]
            for owner in owners:
                kept[owner] += first[rank]
            found.append(Share(owners, first[rank]))
        shares[i] = tuple(found)
    return Balance(tuple(shares), crumb)


def _level(loads: dict[int, int], amount: int, crumb: int) -> dict[int, int]:
    """What each rank gets so that the lowest loads rise to one level; nobody gets less than a crumb, unless one gets all."""
    lowest = sorted(loads, key=lambda rank: (loads[rank], rank))[: max(1, amount // crumb)]
    total = amount + sum(loads[rank] for rank in lowest)
    while len(lowest) > 1 and total // len(lowest) - loads[lowest[-1]] < crumb:
        total -= loads[lowest.pop()]
    level, odd = divmod(total, len(lowest))
    return {rank: level - loads[rank] + (i < odd) for i, rank in enumerate(lowest)}


def _with_alternates(first: int, holders: tuple[int, ...], count: int, replicas: Sequence[int], kept: dict[int, int]) -> tuple[int, ...]:
    """Alternates are of other replicas while there are any, then those that keep the least, then the next by rank."""
    chosen = [first]
    while len(chosen) < count:
        used = {replicas[rank] for rank in chosen}
        rest = [rank for rank in holders if rank not in chosen]
        chosen.append(min(rest, key=lambda rank: (replicas[rank] in used, kept[rank], rank <= first, rank)))
    return tuple(chosen)

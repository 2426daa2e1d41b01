"""What a pass remembers for the next one of the same group: attempts and progress. Losing it costs a little time, never a wrong step.

Everything else is read anew from the watch and the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Attempt:
    """A generator that could not carry out an order: how often at this version, which order it was, and when it may be tried again."""

    version: int
    count: int
    order: tuple[int, int]
    not_before: float


@dataclass(frozen=True, slots=True)
class Opening:
    """A generator that was sent to stage and has not opened its holder yet: which order, since when."""

    order: tuple[int, int]
    since: float


@dataclass(frozen=True, slots=True)
class Memory:
    """`seen`: what progress looked like, `since` when. `superseded`: generators whose last stage was given up for a newer version.

    `refused`: versions that were taken back, and why; a WeightVersion says it for good.
    """

    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    openings: Mapping[str, Opening] = field(default_factory=dict)
    superseded: frozenset[str] = frozenset()
    refused: Mapping[int, str] = field(default_factory=dict)
    seen: object = None
    since: float = 0.0
    current: int = 0

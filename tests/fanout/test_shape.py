"""Which shape wins, and that predicted times are those of the formulas."""

from __future__ import annotations

import pytest
from refit_operator.fanout.shape import Load, Rates, Topology, shape, streams

FAST = Rates(reader=46e9, trainer=46e9, hop_seconds=2e-3, chunk_bytes=500_000_000)
BIG, SMALL = 64_000_000_000, 4_000_000


@pytest.mark.parametrize(
    ("load", "wins"),
    [
        pytest.param(Load(1, BIG, 8, 64), Topology.DIRECT, id="one replica reads directly"),
        pytest.param(Load(8, BIG, 8, 64), Topology.DIRECT, id="as many replicas as streams read directly"),
        pytest.param(Load(64, BIG, 8, 64), Topology.CHAIN, id="many readers of a large version hang in chains"),
        pytest.param(Load(256, SMALL, 1, 1), Topology.TREE, id="many readers of a small version branch, because hops cost"),
    ],
)
def test_auto(load: Load, wins: Topology) -> None:
    assert shape("Auto", 4, None, load, FAST).topology is wins


def test_the_published_example() -> None:
    """64 trainers, 64 replicas of 8: eight streams, chains of eight, 1.7 s where direct pull takes 11 s."""
    load = Load(64, BIG, 8, 64)
    assert streams(load, FAST) == 8
    assert shape("Chain", 4, None, load, FAST).seconds == pytest.approx(1.68, rel=0.05)
    assert shape("Direct", 4, None, load, FAST).seconds == pytest.approx(11.1, rel=0.01)


def test_what_is_asked_for_is_given() -> None:
    for topology in Topology:
        assert shape(topology.value, 4, 3, Load(64, BIG, 8, 64), FAST).topology is topology


def test_the_limit_of_a_source_binds_trainers_too() -> None:
    assert shape("Chain", 4, 2, Load(64, BIG, 8, 64), FAST).streams == 2

"""What counts as lost while weights come in, and as a gap around a commit."""

from __future__ import annotations

from bench.engine import Interval, gaps, throughput
from tests.adapters.vllm.traffic import Answer


def streamed(*times: float) -> Answer:
    return Answer((1,), len(times), True, 200, "length", times=times)


QUIET, PULL, STALL = Interval(0.0, 10.0), Interval(10.0, 12.0), Interval(12.0, 12.2)
ANSWERS = [streamed(*range(10), 11.0, 11.9, 12.5, 12.6), streamed(12.9, 13.0)]


def test_tokens_are_counted_while_nothing_moves_and_while_it_pulls() -> None:
    found = {each.name: each.value for each in throughput(ANSWERS, [QUIET], [PULL])}
    assert (found["tokens a second, nothing moves"], found["tokens a second, while it pulls"], found["lost while it pulls"]) == (1.0, 1.0, 0.0)


def test_a_gap_of_a_commit_is_one_that_overlaps_its_stall() -> None:
    """Not the one between two answers."""
    found = {each.name: each.value for each in gaps(ANSWERS, [QUIET], [STALL])}
    assert (found["token gap, nothing moves: longest"], found["token gap around a commit: longest"]) == (1000.0, 600.0)

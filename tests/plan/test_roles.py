"""Megatron's memory layouts, row by row; ids are those of the geometry cases."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refit_api.errors import UnsupportedLayout
from refit_runtime.plan import roles

from tests.examples import examples

NAMES = ("q", "k", "v")


def _bands(q: int, kv: int, dim: int, ranks: int) -> list[list[tuple[str, int, int, int, int]]]:
    """Per rank: name, rows of the tensor, rows of the memory."""
    found = [roles.qkv_bands("fused", q, kv, dim, rank, ranks) for rank in range(ranks)]
    return [[(NAMES[band.which], *band.rows, *band.local) for band in bands] for bands in found]


def test_c1_two_ranks_of_four_kv_groups() -> None:
    assert _bands(32, 4, 4, 2) == [
        [("q", 0, 32, 0, 32), ("k", 0, 4, 32, 36), ("v", 0, 4, 36, 40), ("q", 32, 64, 40, 72), ("k", 4, 8, 72, 76), ("v", 4, 8, 76, 80)],
        [("q", 64, 96, 0, 32), ("k", 8, 12, 32, 36), ("v", 8, 12, 36, 40), ("q", 96, 128, 40, 72), ("k", 12, 16, 72, 76), ("v", 12, 16, 76, 80)],
    ]


def test_c2_one_rank_has_all_groups() -> None:
    def group(g: int) -> list[tuple[str, int, int, int, int]]:
        start, k, v = 40 * g, 40 * g + 32, 40 * g + 36
        return [("q", 32 * g, 32 * g + 32, start, k), ("k", 4 * g, 4 * g + 4, k, v), ("v", 4 * g, 4 * g + 4, v, v + 4)]

    assert _bands(32, 4, 4, 1) == [[band for g in range(4) for band in group(g)]]


def test_c5_kv_heads_not_divisible_by_the_ranks() -> None:
    assert _bands(24, 6, 2, 4) == [
        [("q", 0, 8, 0, 8), ("k", 0, 2, 8, 10), ("v", 0, 2, 10, 12), ("q", 8, 14, 12, 18)],
        [("q", 14, 16, 0, 2), ("k", 2, 4, 2, 4), ("v", 2, 4, 4, 6), ("q", 16, 24, 6, 14), ("k", 4, 6, 14, 16), ("v", 4, 6, 16, 18)],
        [("q", 24, 32, 0, 8), ("k", 6, 8, 8, 10), ("v", 6, 8, 10, 12), ("q", 32, 38, 12, 18)],
        [("q", 38, 40, 0, 2), ("k", 8, 10, 2, 4), ("v", 8, 10, 4, 6), ("q", 40, 48, 6, 14), ("k", 10, 12, 14, 16), ("v", 10, 12, 16, 18)],
    ]


def test_c13_local_bytes_of_the_second_rank() -> None:
    pieces = roles.qkv(NAMES, 8, 2, 2, 4, 1, 2)
    assert [(piece.tensor, piece.shape, piece.box, piece.local) for piece in pieces] == [
        ("q", (16, 4), ((8, 16), (0, 4)), ((0, 8), (0, 4))),
        ("k", (4, 4), ((2, 4), (0, 4)), ((8, 10), (0, 4))),
        ("v", (4, 4), ((2, 4), (0, 4)), ((10, 12), (0, 4))),
    ]
    assert [piece.local[0][0] * 4 * 2 for piece in pieces] == [0, 64, 80], "bytes from the start of the buffer, bf16"


def test_c14_a_bias_follows_the_rows_of_its_weight() -> None:
    assert _bands(4, 2, 2, 1) == [[("q", 0, 4, 0, 4), ("k", 0, 2, 4, 6), ("v", 0, 2, 6, 8), ("q", 4, 8, 8, 12), ("k", 2, 4, 12, 14), ("v", 2, 4, 14, 16)]]
    assert [(piece.tensor, piece.shape, piece.box, piece.local) for piece in roles.qkv(NAMES, 4, 2, 2, None, 1, 2)] == [
        ("q", (8,), ((4, 8),), ((0, 4),)),
        ("k", (4,), ((2, 4),), ((4, 6),)),
        ("v", (4,), ((2, 4),), ((6, 8),)),
    ]


def test_c16_a_row_bias_is_whole_on_every_rank() -> None:
    assert roles.row("w", (8, 16), 1, 2).box == ((0, 8), (8, 16))
    assert [roles.row("b", (8,), rank, 2).box for rank in range(2)] == [((0, 8),), ((0, 8),)]


def test_c22_gate_rows_lie_before_up_rows() -> None:
    gate, up = roles.gated(("gate", "up"), (8, 4), 1, 2)
    assert (gate.tensor, gate.box, gate.local) == ("gate", ((4, 8), (0, 4)), ((0, 4), (0, 4)))
    assert (up.tensor, up.box, up.local) == ("up", ((4, 8), (0, 4)), ((4, 8), (0, 4)))
    assert up.local[0][0] * 4 * 2 == 32, "bytes from the start of the buffer, bf16"


def test_padding_of_the_vocabulary_is_no_tensor() -> None:
    assert [roles.vocabulary_rows("words", 10, 16, rank, 4) for rank in range(4)] == [((0, 4), 4), ((4, 8), 4), ((8, 10), 4), (None, 4)]
    assert roles.vocabulary("words", 10, 16, 3, 3, 4) == ()


EXPERTS = {
    "linear": ("linear", 8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
    "round robin": ("roundRobin", 6, 4, [(0, 4), (1, 5), (2,), (3,)]),
    "listed, in any order": ([[3, 0], [2, 1]], 4, 2, [(0, 3), (1, 2)]),
    "replicated": ([[0, 1], [1, 0]], 2, 2, [(0, 1), (0, 1)]),
}


@pytest.mark.parametrize(("map_", "experts", "ranks", "expected"), EXPERTS.values(), ids=EXPERTS)
def test_local_experts(map_: str | list[list[int]], experts: int, ranks: int, expected: list[tuple[int, ...]]) -> None:
    assert [roles.local_experts("moe", experts, map_, rank, ranks) for rank in range(ranks)] == expected


REFUSED = {
    "C10 query heads that are no multiple of the KV heads": (lambda: roles.qkv_bands("qkv", 63, 2, 128, 0, 8), ["63", "2 KV heads"]),
    "fused rows that do not divide": (lambda: roles.qkv_bands("qkv", 3, 1, 1, 0, 2), ["5", "2 ranks"]),
    "C29 a column that does not divide": (lambda: roles.column("w", (10, 8), 0, 4), ["w", "10", "4"]),
    "a dim that does not exist": (lambda: roles.row("w", (), 0, 1), ["w", "no dim 1"]),
    "a gated scalar": (lambda: roles.gated(("g", "u"), (), 0, 1), ["g"]),
    "fewer rows than words": (lambda: roles.vocabulary_rows("words", 10, 8, 0, 1), ["10 words", "8 rows"]),
    "experts that do not divide": (lambda: roles.local_experts("moe", 5, "linear", 0, 2), ["5", "2"]),
    "an unknown map": (lambda: roles.local_experts("moe", 4, "random", 0, 2), ["random", "roundRobin"]),
    "a map with a hole": (lambda: roles.local_experts("moe", 4, [[0, 1], [2]], 0, 2), ["[3]"]),
    "an id out of range": (lambda: roles.local_experts("moe", 2, [[0, 1], [2]], 0, 2), ["[2]"]),
    "an id twice on one rank": (lambda: roles.local_experts("moe", 2, [[0, 0], [1]], 0, 2), ["twice"]),
    "a map for other ranks": (lambda: roles.local_experts("moe", 2, [[0, 1]], 0, 2), ["1 entries", "2 expert-parallel"]),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call: object, words: list[str]) -> None:
    assert callable(call)
    with pytest.raises(UnsupportedLayout) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@examples(100)
@given(kv=st.integers(1, 6), per=st.integers(1, 6), dim=st.integers(1, 8), ranks=st.integers(1, 8))
def test_bands_cover_every_row_once(kv: int, per: int, dim: int, ranks: int) -> None:
    dim *= ranks  # so that the rows divide
    rows: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        bands = roles.qkv_bands("qkv", kv * per, kv, dim, rank, ranks)
        assert [band.local for band in bands] == sorted(band.local for band in bands)
        assert bands[0].local[0] == 0
        assert all(a.local[1] == b.local[0] for a, b in pairwise(bands)), "memory without gaps"
        rows.update((band.which, row) for band in bands for row in range(*band.rows))
    assert rows == Counter([*product([0], range(kv * per * dim)), *product([1, 2], range(kv * dim))])

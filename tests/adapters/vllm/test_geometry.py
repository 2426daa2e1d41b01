"""Views and copies against numpy: whatever the arithmetic accepts, moves exactly the elements that real views would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refit_runtime.adapters.vllm.geometry import Geometry, Inexpressible, Piece, pieces

from tests.examples import examples

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=3).map(tuple)
STEPS = st.lists(st.tuples(st.sampled_from(["narrow", "step", "select", "permute", "view"]), st.randoms(use_true_random=False)), max_size=4)


def stepped(array: np.ndarray, geometry: Geometry, kind: str, random) -> tuple[np.ndarray, Geometry]:
    """One view operation on both."""
    if array.ndim == 0:
        return array, geometry
    dim = random.randrange(array.ndim)
    start = random.randrange(array.shape[dim])
    if kind == "narrow":
        length = random.randint(1, array.shape[dim] - start)
        return np.take(array, range(start, start + length), axis=dim), geometry.narrow(dim, start, length)
    if kind == "step":
        chosen = range(start % 2, array.shape[dim], 2)
        return (np.take(array, chosen, axis=dim), geometry.narrow(dim, chosen.start, len(chosen), 2)) if chosen else (array, geometry)
    if kind == "select":
        return np.take(array, start, axis=dim), geometry.select(dim, start)
    if kind == "permute":
        order = random.sample(range(array.ndim), array.ndim)
        return array.transpose(order), geometry.permute(order)
    first = random.choice([size for size in range(1, array.size + 1) if array.size % size == 0])
    return array.reshape(first, array.size // first), geometry.view((first, array.size // first))


def moved(found: tuple[Piece, ...], tensor: np.ndarray, parameter: np.ndarray) -> np.ndarray:
    filled = np.full(parameter.shape, -1)
    for piece in found:
        data = tensor[tuple(slice(lo, hi) for lo, hi in piece.box)]
        data = data.transpose(piece.perm) if piece.perm is not None else data
        at = tuple(slice(lo, hi) for lo, hi in piece.at)
        assert filled[at].shape[filled.ndim - data.ndim :] == data.shape, "a box and its place have equal extents"
        assert (filled[at] == -1).all(), "no element is written twice"
        filled[at] = data
    return filled


@examples(150)
@given(SHAPES, SHAPES, STEPS, STEPS)
def test_a_copy_between_views_moves_what_numpy_moves(tensor_shape, parameter_shape, tensor_steps, parameter_steps) -> None:
    tensor, parameter = np.arange(int(np.prod(tensor_shape))).reshape(tensor_shape), np.arange(int(np.prod(parameter_shape))).reshape(parameter_shape)
    source, target, ours, theirs = tensor, parameter, Geometry.whole(tensor_shape), Geometry.whole(parameter_shape)
    try:
        for kind, random in tensor_steps:
            source, ours = stepped(source, ours, kind, random)
        for kind, random in parameter_steps:
            target, theirs = stepped(target, theirs, kind, random)
        if source.size == target.size:
            source, ours = source.reshape(target.shape), ours.view(target.shape)
        assert ours.shape == source.shape
        expected = np.full(parameter.size, -1)
        expected[target.reshape(-1)] = np.broadcast_to(source, target.shape).reshape(-1)
        found = pieces(ours, tensor_shape, theirs, parameter_shape)
    except (Inexpressible, ValueError):
        return
    assert (moved(found, tensor, parameter).reshape(-1) == expected).all()


@pytest.mark.parametrize(
    ("name", "tensor", "cut", "parameter", "place", "expected"),
    [
        (
            "column part into the second half of a fused parameter",
            (8, 4), lambda g: g.narrow(0, 4, 4), (8, 4), lambda g: g.narrow(0, 4, 4),
            [Piece(((4, 8), (0, 4)), ((4, 8), (0, 4)), None)],
        ),
        (
            "an expert's matrix gets a leading dim",
            (2, 4), lambda g: g, (3, 2, 4), lambda g: g.select(0, 1),
            [Piece(((0, 2), (0, 4)), ((1, 2), (0, 2), (0, 4)), None)],
        ),
        (
            "a transposed matrix stays one box",
            (2, 4), lambda g: g.permute((1, 0)), (4, 2), lambda g: g,
            [Piece(((0, 2), (0, 4)), ((0, 4), (0, 2)), (1, 0))],
        ),
        (
            "heads swapped with their parts: one box a head",
            (4, 3), lambda g: g.view((2, 2, 3)).permute((1, 0, 2)).view((4, 3)), (4, 3), lambda g: g,
            [Piece(((0, 1), (0, 3)), ((0, 1), (0, 3)), None), Piece(((1, 2), (0, 3)), ((2, 3), (0, 3)), None),
             Piece(((2, 3), (0, 3)), ((1, 2), (0, 3)), None), Piece(((3, 4), (0, 3)), ((3, 4), (0, 3)), None)],
        ),
        ("a scalar into a vector of one", (), lambda g: g.view((1,)), (1,), lambda g: g, [Piece((), ((0, 1),), None)]),
        ("no elements, no boxes", (4, 2), lambda g: g.narrow(0, 4, 0), (4, 2), lambda g: g.narrow(0, 0, 0), []),
    ],
)  # fmt: skip
def test_boxes(name, tensor, cut, parameter, place, expected) -> None:
    found = pieces(cut(Geometry.whole(tensor)), tensor, place(Geometry.whole(parameter)), parameter)
    assert sorted(found, key=lambda piece: piece.box) == expected, name


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a flat range that starts inside a row", lambda: pieces(Geometry.whole((4, 6)).view((24,)).narrow(0, 1, 6), (4, 6), Geometry.whole((6,)), (6,))),
        ("rows cut across merged dims", lambda: Geometry.whole((4, 6)).permute((1, 0)).view((24,)).narrow(0, 2, 6)),
        ("more dims than the parameter", lambda: pieces(Geometry.whole((4, 1, 3)).view((4, 3)), (4, 1, 3), Geometry.whole((4, 3)), (4, 3))),
        (
            "too many boxes",
            lambda: pieces(Geometry.whole((512, 512)).view((262_144,)).narrow(0, 0, 131_072, 2), (512, 512), Geometry.whole((131_072,)), (131_072,)),
        ),
    ],
)
def test_what_is_no_set_of_boxes_is_refused(name, make) -> None:
    with pytest.raises(Inexpressible):
        make()

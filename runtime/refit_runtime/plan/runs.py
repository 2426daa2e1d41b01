"""Runs: atoms with one owner tuple and one set of needers, laid out once for everybody who holds or needs them.

Where several ranks share a pool, the atom at the border of two shares is split between rows. A piece is an atom or such a part of one.

Invariant: pieces of a run follow each other without gaps, first by item size, largest first, so that each lies at a multiple of its own, then in layer
order, then row-major. Arenas hold runs in plan order (by owners, then needers), each at a multiple of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from refit_api.tensors import Box, Dtype, box_elements

from refit_runtime.plan.balance import Balance, Pool, balance
from refit_runtime.plan.cut import Atom, cut, wire_dtype
from refit_runtime.plan.survey import Numbers, Survey, stable_order

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Form:
    """What the same piece of every tensor of a group has in common."""

    group: int
    atom: Atom
    box: Box
    dtype: Dtype

    @property
    def bytes(self) -> int:
        return box_elements(self.box) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All pieces, run by run: piece i is `forms[form[i]]` of tensor `tensor[i]`, `offset[i]` bytes into its run.

    Run r has the pieces from `starts[r]` to `starts[r + 1]`; `owners` and `needers` are indices in the survey.
    """

    owners: tuple[tuple[int, ...], ...]
    needers: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    starts: Numbers
    tensor: Numbers
    form: Numbers
    offset: Numbers
    forms: tuple[Form, ...]


def lay_out(facts: Survey, kept: Sequence[Numbers], redundancy: int) -> Layout:
    """`kept[g]` are the tensors of group g that move."""
    forms, tensor, form = _atoms(facts, kept)
    pools: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    pool = np.array([pools.setdefault((f.atom.owners, f.atom.needers), len(pools)) for f in forms], np.int64)[form]
    size = np.array([f.bytes for f in forms], np.int64)[form]
    order = stable_order(pool, len(pools))
    lines = _Lines(order, np.searchsorted(pool[order], np.arange(len(pools) + 1)).tolist(), np.cumsum(size[order]))
    shared = balance([Pool(*key, total) for key, total in zip(pools, lines.totals(), strict=True)], [table.replica for table in facts.trainer], redundancy)
    share, splits = _share_out(forms, form, lines, shared)
    forms, tensor, form, share = _split(forms, tensor, form, share, splits)
    keys = [(each.owners, needers) for (_, needers), shares in zip(pools, shared.shares, strict=True) for each in shares]
    return _in_runs(forms, tensor, form, keys, share)


def _atoms(facts: Survey, kept: Sequence[Numbers]) -> tuple[list[Form], Numbers, Numbers]:
    """Every atom of every tensor that moves, in layer order, then row-major."""
    forms: list[Form] = []
    first = np.zeros(len(facts.names), np.int64)
    count = np.zeros(len(facts.names), np.int64)
    for g, (group, tensors) in enumerate(zip(facts.groups, kept, strict=True)):
        if group.needers and len(tensors):
            dtype = wire_dtype(group.holders[0][1].dtype, (kind.dtype for _, kind in group.needers))
            atoms = cut(group)
            first[tensors], count[tensors] = len(forms), len(atoms)
            forms.extend(Form(g, atom, atom.box, dtype) for atom in atoms)
    tensor = np.repeat(np.arange(len(facts.names)), count)
    return forms, tensor, first[tensor] + np.arange(len(tensor)) - np.repeat(np.cumsum(count) - count, count)


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines of all pools, one after the other: atom `order[i]` ends at byte `ends[i]`; pool p is from `bounds[p]` to `bounds[p + 1]`."""

    order: Numbers
    bounds: list[int]
    ends: Numbers

    def totals(self) -> list[int]:
        return np.diff(np.concatenate([[0], self.ends])[self.bounds]).tolist()  # type: ignore[no-any-return]


def _share_out(forms: list[Form], form: Numbers, lines: _Lines, shared: Balance) -> tuple[Numbers, dict[int, list[tuple[int, int]]]]:
    """The number of the share that each atom belongs to, or begins in; and where borders split atoms: (row, number of the share from there on)."""
    borders = np.zeros(len(form) + 1, np.int64)
    splits: dict[int, list[tuple[int, int]]] = {}
    number = -1
    for shares, lo, hi in zip(shared.shares, lines.bounds, lines.bounds[1:], strict=False):
        byte = int(lines.ends[lo - 1]) if lo else 0
        borders[lo] += 1
        number += 1
        for before in shares[:-1]:
            byte += before.bytes
            number += 1
            at = int(np.searchsorted(lines.ends[lo:hi], byte, side="right")) + lo
            atom = int(lines.order[at])
            one = forms[form[atom]]
            row = _nearest_row(one, byte - int(lines.ends[at]) + one.bytes, shared.crumb)
            borders[at + (row > 0)] += 1
            if 0 < row < _rows(one.box)[1]:
                splits.setdefault(atom, []).append((row, number))
    share = np.empty(len(form), np.int64)
    share[lines.order] = np.cumsum(borders[:-1]) - 1
    return share, splits


def _rows(box: Box) -> tuple[int, int]:
    """The first dim that can be cut, and its extent."""
    return next(((dim, hi - lo) for dim, (lo, hi) in enumerate(box) if hi - lo > 1), (0, 1))


def _nearest_row(form: Form, byte: int, crumb: int) -> int:
    """Where to cut an atom so that about `byte` of its bytes lie before; small ones stay whole."""
    extent = _rows(form.box)[1]
    return (2 * byte * extent + form.bytes) // (2 * form.bytes) if form.bytes > crumb else extent * (2 * byte > form.bytes)


def _split(
    forms: list[Form], tensor: Numbers, form: Numbers, share: Numbers, splits: dict[int, list[tuple[int, int]]]
) -> tuple[list[Form], Numbers, Numbers, Numbers]:
    parts = np.ones(len(form), np.int64)
    for atom, cuts in splits.items():
        splits[atom] = cuts = [one for one, after in zip(cuts, [*cuts[1:], (-1, -1)], strict=True) if one[0] != after[0]]
        parts[atom] += len(cuts)
    start = np.cumsum(parts) - parts
    again = np.repeat(np.arange(len(form)), parts)
    tensor, form, share, forms = tensor[again], form[again], share[again], list(forms)
    for atom, cuts in splits.items():
        at = int(start[atom])
        one = forms[form[at]]
        dim, extent = _rows(one.box)
        lo = one.box[dim][0]
        rows, numbers = [0, *(row for row, _ in cuts), extent], [int(share[at]), *(number for _, number in cuts)]
        for i, number in enumerate(numbers):
            form[at + i], share[at + i] = len(forms), number
            forms.append(Form(one.group, one.atom, (*one.box[:dim], (lo + rows[i], lo + rows[i + 1]), *one.box[dim + 1 :]), one.dtype))
    return forms, tensor, form, share


def _in_runs(forms: list[Form], tensor: Numbers, form: Numbers, keys: list[tuple[tuple[int, ...], tuple[int, ...]]], share: Numbers) -> Layout:
    used = np.bincount(share, minlength=len(keys))
    runs = sorted({key for key, pieces in zip(keys, used.tolist(), strict=True) if pieces})
    index = {key: run for run, key in enumerate(runs)}
    run = np.array([index.get(key, -1) for key in keys], np.int64)[share]
    items = np.array([8 - form.dtype.bytes for form in forms], np.int64)[form]
    order = stable_order(run * 8 + items, len(runs) * 8)
    run, tensor, form = run[order], tensor[order], form[order]
    ends = np.cumsum(np.array([each.bytes for each in forms], np.int64)[form])
    starts = np.searchsorted(run, np.arange(len(runs) + 1))
    edges = np.concatenate([[0], ends])[starts]
    offset = np.concatenate([[0], ends[:-1]])[: len(run)] - edges[run]
    owners, needers = (tuple(key[side] for key in runs) for side in (0, 1))
    return Layout(owners, needers, tuple(np.diff(edges).tolist()), starts, tensor, form, offset, tuple(forms))

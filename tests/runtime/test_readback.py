"""What is read back from live parameters has the digests of the arena they came from, however pieces and windows are cut."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from refit_api.tensors import Dtype, whole
from refit_runtime.adapters.host_memory import HostMemory
from refit_runtime.digest import BLOCK, DIGEST_BYTES, Digests, block_count
from refit_runtime.install import as_in_runs
from refit_runtime.plan.plan import InstallCopy
from refit_runtime.readback import ReadBack

DIGESTS = Digests("00000000-0000-0000-0000-000000000001", 7)
# (shape in the arena, perm, extra dims in the parameter) of each piece
CASES: dict[str, list[tuple[tuple[int, ...], tuple[int, ...] | None, int]]] = {
    "one piece of many windows": [((3000, 1000), None, 0)],
    "a row that is larger than a slab": [((1, 2, 900_001), None, 0), ((7,), None, 1)],
    "pieces that share blocks": [((1000, 333), None, 0), ((5,), None, 0), ((700, 301), (1, 0), 1), ((), None, 0)],
    "dims turned": [((20, 30, 2000), (2, 0, 1), 0)],
    "less than a block": [((10, 10), None, 2)],
}


@pytest.mark.parametrize("pieces", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("blocks", [2, 3, 64])
def test_digests_of_the_arena(pieces: Any, blocks: int) -> None:
    """Two runs of the same pieces; a piece that two parameters need counts once."""
    of_run = sum(4 * prod(shape) for shape, _, _ in pieces)
    arena = torch.randn(of_run // 2).view(torch.uint8)
    found: list[tuple[InstallCopy, torch.Tensor]] = []
    for run in range(2):
        at = run * of_run
        for shape, perm, extra in pieces:
            size = 4 * prod(shape)
            live = arena[at : at + size].view(torch.float32).view(shape)
            live = (live if perm is None else live.permute(perm)).contiguous()[(None,) * extra]
            copy = InstallCopy(run, at, size, Dtype.FLOAT32, shape, "t", 0, "p", perm, whole(tuple(live.shape)))
            found += [(copy, live)] * 2
            at += size
    back = ReadBack(as_in_runs(*zip(*found, strict=True)), HostMemory(), torch.device("cpu"), window=blocks * BLOCK)
    for _ in range(2):
        seen = [b"", b""]
        for run, block, digests in back.digests(DIGESTS):
            assert len(seen[run]) == block * DIGEST_BYTES
            seen[run] += digests
        assert seen == [DIGESTS.of(arena[run * of_run : (run + 1) * of_run].numpy()) for run in range(2)]
        assert len(seen[0]) == DIGEST_BYTES * block_count(of_run)

"""One contract for every memory: copies and digests give what the definitions say, wherever the bytes lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refit_api.errors import SpecError, UnsupportedLayout
from refit_runtime.arena import device_of
from refit_runtime.digest import BLOCK, Digests
from refit_runtime.ports import Memory
from refit_runtime.wiring import DeviceMemory

MIB = 1 << 20
UID, VERSION = "00000000-0000-0000-0000-000000000001", 7
DIGESTS = Digests(UID, VERSION)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> tuple[Memory, torch.device]:
    """As processes are wired: the memory follows the device of the tensors."""
    return DeviceMemory(), torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


VECTORS = {
    "bytes 0 to 255": (bytes(range(256)), "5586743343ce5bdc a69f4f982554b56d"),
    "nothing": (b"", "dd284b1572a55a07 30c9da50a4258abc"),
    "five bytes": (b"refit", "15f8b954d0752b82 d294c34fd3e8abec"),
    "a zero byte more": (b"refit\0", "5162ad592b74f3fa 3dc4798f7c360be2"),
}


@pytest.mark.parametrize(("data", "expected"), VECTORS.values(), ids=VECTORS.keys())
def test_published_digests(place: Any, data: bytes, expected: str) -> None:
    memory, device = place
    seen = memory.digests(torch.tensor(list(data), dtype=torch.uint8, device=device), DIGESTS)
    assert " ".join(f"{int.from_bytes(seen[at : at + 8], 'little'):016x}" for at in (0, 8)) == expected


SIZES = [1, 7, 8, 4099, 131_072, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 70_001, 9 * BLOCK]


def test_digests_of_any_part(place: Any) -> None:
    memory, device = place
    random = np.random.default_rng(3)
    data = random.integers(0, 256, 10 * BLOCK, dtype=np.uint8)
    there = torch.from_numpy(data).to(device)
    for size in SIZES:
        for at in (0, 256 * int(random.integers(1, 4000)), int(random.integers(0, data.size - size))):
            at = min(at, data.size - size)
            version = int(random.integers(1, 1 << 60))
            seen = memory.digests(there[at : at + size], Digests(UID, version))
            assert seen == Digests(UID, version).of(data[at : at + size]), (size, at)


def test_a_flipped_bit_is_seen(place: Any) -> None:
    memory, device = place
    data = torch.randint(0, 256, (2 * BLOCK + 5,), dtype=torch.uint8, device=device)
    before = memory.digests(data, DIGESTS)
    for at in (0, BLOCK - 1, 2 * BLOCK + 4):
        data[at] ^= 4
        after = memory.digests(data, DIGESTS)
        assert [before[i : i + 16] != after[i : i + 16] for i in (0, 16, 32)] == [block == at // BLOCK for block in range(3)]
        data[at] ^= 4


def pairs(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(to, from): what snapshots and installs are made of."""

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    fused, heads, experts = some(4 * 768, 512), some(4 * 512, 512), some(8, 64, 96)
    return [
        (some(1000, 512), some(1000, 512)),
        (some(300, 2048)[:, 512:1024], some(300, 512)),
        (heads.view(4, 512, 512), fused.view(4, 768, 512)[:, :512]),
        (some(333, 77), some(333, 80, dtype=torch.float32)[:, 3:]),
        (some(64, 128, dtype=torch.float32), some(64, 128)),
        (some(40, 56, dtype=torch.float16), some(40, 56)),
        (some(96, 64), some(64, 96).t()),
        (experts.permute(0, 2, 1), some(8, 96, 64)),
        (some(5)[1:], some(5)[:4]),
        (some(3, dtype=torch.float64), some(3)),
        (some(), some()),
        (torch.zeros(77, dtype=torch.uint8, device=device), torch.randint(0, 255, (77,), dtype=torch.uint8, device=device)),
        (some(64, 64).to(torch.float8_e4m3fn), some(64, 64).to(torch.float8_e4m3fn)),
        (some(0, 4), some(0, 4)),
    ]


def test_copies_with_strides_and_casts(place: Any) -> None:
    """Prepared once, run often: each run moves what is there now, and nothing else changes."""
    memory, device = place
    both = pairs(device)
    run = memory.copies(both)
    for _ in range(3):
        for _, source in both:
            source.copy_(torch.randn(source.shape, device=device).mul(30).to(source.dtype))
        around = [torch.as_strided(to, (to.untyped_storage().nbytes() // to.element_size(),), (1,), 0) for to, _ in both]
        expected = [each.clone() for each in around]
        for (to, source), copy in zip(both, expected, strict=True):
            torch.as_strided(copy, to.shape, to.stride(), to.storage_offset()).copy_(source)
        run.start()
        run.wait()
        for seen, copy in zip(around, expected, strict=True):
            assert torch.equal(seen.view(torch.uint8), copy.view(torch.uint8))


def test_no_copies(place: Any) -> None:
    copies = place[0].copies([])
    copies.start()
    copies.wait()


def test_an_arena_is_plain_and_aligned(place: Any) -> None:
    memory, device = place
    arena = memory.allocate(5 * MIB, device)
    assert (arena.numel(), arena.dtype, arena.device) == (5 * MIB, torch.uint8, device)
    assert arena.data_ptr() % 256 == 0
    arena.fill_(7)
    assert arena.view(torch.float32).sum() > 0


def test_what_does_not_fit_is_refused_with_numbers(place: Any) -> None:
    memory, device = place
    with pytest.raises(SpecError, match=f"needs {1 << 60} bytes .* are free"):
        memory.allocate(1 << 60, device)


def test_weights_of_a_rank_are_on_one_device() -> None:
    assert device_of([]) == torch.device("cpu")
    with pytest.raises(UnsupportedLayout, match="a on cpu; b on meta"):
        device_of([("a", torch.empty(1)), ("b", torch.empty(1, device="meta"))])
    with pytest.raises(UnsupportedLayout, match="kind meta"):
        DeviceMemory().allocate(1, torch.device("meta"))

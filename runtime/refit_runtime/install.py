"""The copy list: arena -> live parameters, made once for each plan and part; nothing is planned or allocated while the engine is paused.

It reads both ways: `check` streams the live parameters back through the list and compares them with the digests of the version, and `gather`
puts them back into the arena. Both need a list that writes every byte without a cast: a cast loses what the digests are of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from refit_api.errors import DigestMismatch, InstallError

from refit_runtime.arena import Holding
from refit_runtime.digest import BLOCK, DIGEST_BYTES, Digests
from refit_runtime.plan.plan import InstallCopy
from refit_runtime.ports import Memory, WeightTarget
from refit_runtime.snapshot import typed

if TYPE_CHECKING:
    import torch

WINDOW = 8 * BLOCK


class CopyList:
    """`part` is where the runs lie. Live parameters never move: their views are taken once."""

    def __init__(self, copies: tuple[InstallCopy, ...], target: WeightTarget, part: torch.Tensor, memory: Memory) -> None:
        self._copies, self._memory = copies, memory
        self._arena, self._live = [], []
        for copy in copies:
            piece = typed(part[copy.offset : copy.offset + copy.nbytes], copy.dtype.value, copy.shape)
            if copy.perm is not None:
                piece = piece.permute(copy.perm)
            self._arena.append(piece[(None,) * (len(copy.at) - len(copy.shape))])
            self._live.append(target.view(copy.parameter)[tuple(slice(lo, hi) for lo, hi in copy.at)])
        self.exact = all(live.dtype == piece.dtype for live, piece in zip(self._live, self._arena, strict=True))

    def install(self) -> None:
        """Raises InstallError: then the live parameters are a mix, until a whole install succeeds."""
        import torch

        try:
            with torch.no_grad():
                torch._foreach_copy_(self._live, self._arena)
            self._memory.fence()
        except RuntimeError as error:
            raise InstallError(f"copying into the live parameters failed ({error}): the engine's parameters changed, or its memory is broken") from error

    def gather(self) -> None:
        """The live parameters back into the arena."""
        import torch

        assert self.exact, "a cast cannot be undone"
        with torch.no_grad():
            torch._foreach_copy_(self._arena, self._live)
        self._memory.fence()

    def check(self, holding: Holding, digests: Digests, cancelled: Callable[[], bool]) -> None:
        """Raises DigestMismatch if a live parameter is not what the version says. Ends early, silently, when cancelled."""
        assert self.exact, "casts change the bytes that the digests are of"
        for run, pieces in groupby(zip(self._copies, self._live, strict=True), key=lambda pair: pair[0].run):
            wanted, block = holding.digests[run], 0
            for window in _windows(pieces):
                if cancelled():
                    return
                seen = self._memory.digests(window, digests)
                for at in range(0, len(seen), DIGEST_BYTES):
                    if seen[at : at + DIGEST_BYTES] != wanted[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]:
                        raise self._damaged(holding, run, block)
                    block += 1

    def _damaged(self, holding: Holding, run: int, block: int) -> DigestMismatch:
        lo = holding.offsets[run] + block * BLOCK
        inside = [copy for copy in self._copies if copy.run == run and copy.offset < lo + BLOCK and copy.offset + copy.nbytes > lo]
        what = ", ".join(dict.fromkeys(copy.parameter for copy in inside[:4]))
        return DigestMismatch(
            f"after installing version {holding.number}: run {run}, block {block} in the live parameters ({what}) is not what was published; something else "
            "writes to them, or the memory is damaged",
            tensor=inside[0].tensor if inside else None,
            run=run,
            block=block,
            source="live parameters",
        )


def _windows(pieces: Iterator[tuple[InstallCopy, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """The bytes of a run as they lie in the arena, from the live parameters, some blocks at a time; a piece that is needed twice counts once."""
    import torch

    window = torch.empty(WINDOW, dtype=torch.uint8)
    filled, last = 0, -1
    for copy, live in pieces:
        if copy.offset == last:
            continue
        last = copy.offset
        array = live[(0,) * (live.dim() - len(copy.shape))] if live.dim() > len(copy.shape) else live
        if copy.perm is not None:
            array = array.permute([copy.perm.index(dim) for dim in range(len(copy.perm))])
        data = array.detach().contiguous().reshape(-1).view(torch.uint8)
        at = 0
        while at < data.numel():
            take = min(WINDOW - filled, data.numel() - at)
            window[filled : filled + take] = data[at : at + take]
            filled, at = filled + take, at + take
            if filled == WINDOW:
                yield window
                filled = 0
    if filled:
        yield window[:filled]

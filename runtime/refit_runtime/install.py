"""The copy list: arena -> live parameters, made once for each plan and part; nothing is planned or allocated while the engine is paused.

It reads both ways: `check` streams the live parameters back through the list and compares them with the digests of the version, and `gather`
puts them back into the arena. Both need a list that writes every byte without a cast: a cast loses what the digests are of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from refit_api.errors import DigestMismatch, InstallError

from refit_runtime.arena import Holding
from refit_runtime.digest import BLOCK, DIGEST_BYTES, Digests
from refit_runtime.plan.plan import InstallCopy, Subset
from refit_runtime.ports import Copies, Memory, WeightTarget
from refit_runtime.readback import ReadBack
from refit_runtime.snapshot import typed

if TYPE_CHECKING:
    import torch


class Checked:
    """Live parameters as the runs have them. They never move: their views are taken once. `spare`: memory to gather them in, else a check has its own."""

    def __init__(self, copies: tuple[InstallCopy, ...], target: WeightTarget, memory: Memory, device: torch.device, spare: Sequence[torch.Tensor] = ()) -> None:
        self._copies, self._memory, self._target, self._device, self._spare = copies, memory, target, device, spare
        self._live = [target.view(copy.parameter)[tuple(slice(lo, hi) for lo, hi in copy.at)] for copy in copies]
        self.exact = all(str(live.dtype) == f"torch.{copy.dtype.value}" for copy, live in zip(copies, self._live, strict=True))
        self._readback: ReadBack | None = None

    def prepare_check(self) -> None:
        """So that a check in the pause finds everything made."""
        if self._readback is None:
            self._readback = ReadBack(as_in_runs(self._copies, self._live), self._memory, self._device, spare=self._spare)

    def check(self, holding: Holding, digests: Digests, cancelled: Callable[[], bool]) -> None:
        """Raises DigestMismatch if a live parameter is not what the version says. Ends early, silently, when cancelled."""
        assert self.exact, "casts change the bytes that the digests are of"
        self.prepare_check()
        assert self._readback is not None, "just made"
        for run, block, seen in self._readback.digests(digests):
            wanted = holding.digests[run][block * DIGEST_BYTES :][: len(seen)]
            for at in range(0, len(seen), DIGEST_BYTES):
                if seen[at : at + DIGEST_BYTES] != wanted[at : at + DIGEST_BYTES]:
                    raise self._damaged(holding, run, block + at // DIGEST_BYTES)
            if cancelled():
                return

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


class CopyList(Checked):
    """`part` is where the runs lie."""

    def __init__(self, copies: tuple[InstallCopy, ...], target: WeightTarget, part: torch.Tensor, memory: Memory) -> None:
        super().__init__(copies, target, memory, part.device)
        self._arena = []
        for copy in copies:
            piece = typed(part[copy.offset : copy.offset + copy.nbytes], copy.dtype.value, copy.shape)
            if copy.perm is not None:
                piece = piece.permute(copy.perm)
            self._arena.append(piece[(None,) * (len(copy.at) - len(copy.shape))])
        self._install = memory.copies(list(zip(self._live, self._arena, strict=True)))
        self._selected: dict[Subset, Copies] = {}

    def prepare(self, subset: Subset) -> Copies:
        """The copies of the selected tensors; kept until another subset is prepared."""
        if subset not in self._selected:
            pairs = zip(self._live, self._arena, strict=True)
            kept = [pair for copy, pair in zip(self._copies, pairs, strict=True) if subset.keeps(copy.tensor)]
            self._selected = {subset: self._memory.copies(kept)}
        return self._selected[subset]

    def install(self, subset: Subset | None = None) -> None:
        """All, or a subset over its base, and what the engine derives from it."""
        self.copy(subset)
        self._target.remake()

    def copy(self, subset: Subset | None = None) -> None:
        """Raises InstallError: then the live parameters are a mix, until a whole install succeeds."""
        copies = self._install if subset is None else self.prepare(subset)
        try:
            copies.start()
            copies.wait()
        except RuntimeError as error:
            raise InstallError(f"copying into the live parameters failed ({error}): the engine's parameters changed, or its memory is broken") from error

    def gather(self) -> None:
        """The live parameters back into the arena."""
        assert self.exact, "a cast cannot be undone"
        gather = self._memory.copies(list(zip(self._arena, self._live, strict=True)))
        gather.start()
        gather.wait()


def as_in_runs(copies: Sequence[InstallCopy], live: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """(run, array): each part of a live parameter turned back to how the run has it; what is needed twice counts once."""
    found: list[tuple[int, torch.Tensor]] = []
    last = -1
    for copy, part in zip(copies, live, strict=True):
        if copy.offset == last:
            continue
        last = copy.offset
        array = part[(0,) * (part.dim() - len(copy.shape))].detach()
        found.append((copy.run, array if copy.perm is None else array.permute([copy.perm.index(dim) for dim in range(len(copy.perm))])))
    return found

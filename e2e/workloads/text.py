"""Generated text to learn from: sentences in a language of one rule, each word follows from the one before, with a few slips."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BATCH, LENGTH = 8, 32


def text(words: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches of BATCH sentences of LENGTH + 1 words, equal for equal seeds. Words 0 and 1 begin and end sentences and are never drawn."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        sentence = [torch.randint(2, words, (BATCH,), generator=draw)]
        for _ in range(LENGTH):
            follows = (sentence[-1] * 5 + 7) % (words - 2) + 2
            slips = torch.rand(BATCH, generator=draw) < 0.05
            sentence.append(torch.where(slips, torch.randint(2, words, (BATCH,), generator=draw), follows))
        yield torch.stack(sentence, dim=1)

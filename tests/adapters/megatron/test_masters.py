"""Masters in float32 and their parts on data-parallel ranks: what is published are the model's own weights after the step, never before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from e2e.cluster.apiserver import free_ports
from tests.adapters.megatron.sharded_masters import RANKS, rank_of_two


def test_masters_that_are_spread_over_ranks_are_published_once_they_are_gathered(tmp_path: Path) -> None:
    """Gathered by the step itself, or by the next forward pass, before which each rank has new weights in its own part only."""
    multiprocessing.spawn(rank_of_two, (free_ports(1)[0], str(tmp_path)), RANKS)
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    refused = "embedding.word_embeddings.weight (VocabParallelEmbedding): overlap_param_gather is on"
    for overlap in (False, True):
        ranks: list[dict[str, Any]] = [rank[overlap] for rank in saved]
        assert all(rank["refusal"].startswith(refused) if overlap else not rank["refusal"] for rank in ranks)
        first, second = (rank["after"] for rank in ranks)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), "replicas publish equal bytes"
        assert not any(torch.equal(first[name], ranks[0]["before"][name]) for name in first), "the step changed everything"
        assert any(len(rank["masters"]) < len(ranks[0]["weights"]) for rank in ranks), "no rank has all masters"
        for name, weights in ranks[0]["weights"].items():
            master = torch.full((weights.numel(),), torch.nan)
            for start, part in (rank["masters"][name] for rank in ranks if name in rank["masters"]):
                master[start : start + part.numel()] = part
            assert torch.equal(weights.flatten(), master.bfloat16()), name

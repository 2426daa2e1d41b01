"""A model whose tensors divide by nothing in particular: extents of 1 to 16 over eight ranks, a tied head, a persistent and a transient buffer."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(5, 10)
        self.down = torch.nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tiny(torch.nn.Module):
    """`head` comes first and is tied: the checkpoint has `embed.weight` only."""

    _tied_weights_keys = ("head.weight",)

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = torch.nn.Linear(5, 11, bias=False)
        self.embed = torch.nn.Embedding(11, 5)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.wide = torch.nn.Parameter(torch.randn(3, 16))
        self.norm = torch.nn.LayerNorm(5)
        self.norm.weight = torch.nn.Parameter(torch.randn(5))
        self.scale = torch.nn.Parameter(torch.randn(1))
        self.register_buffer("bias_of_router", torch.randn(4))
        self.register_buffer("table", torch.randn(6), persistent=False)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.scale
        return torch.cat([self.head(x), x @ self.wide.sum(1, keepdim=True)[:1].expand(5, 1)], -1)


def truth(model: Tiny) -> dict[str, torch.Tensor]:
    """What its checkpoint would hold."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in ("head.weight", "mask")}


def gathered(model: Tiny) -> dict[str, torch.Tensor]:
    """The truth of a sharded model: a collective call of all ranks, each with its modules in their sharded state."""
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in truth(model).items()}

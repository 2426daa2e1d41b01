"""What the stories of one process do again and again: a trainer's step and a whole refit, on host and device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def refit(rank: Any, orders: Any, number: int, sources: Any = ()) -> Any:
    rank.start(orders.stage(number, sources))
    rank.wait()
    assert rank.report().error is None, rank.report().error
    rank.prepare(orders.commit(number))
    report = rank.install(orders.commit(number))
    assert report.error is None, report.error
    return report


def publish_all(trainers: list[Any], step: int, select: Any = None) -> int:
    """From every rank at once, as ranks do."""
    with ThreadPoolExecutor(len(trainers)) as pool:
        numbers = set(pool.map(lambda trainer: trainer.publish(step, select).number, trainers))
    assert len(numbers) == 1
    return int(numbers.pop())


def perturb(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5).add_(0.25)


def same(one: torch.nn.Module, other: torch.nn.Module, dtype: torch.dtype | None = None) -> bool:
    return all(torch.equal(a.to(dtype or a.dtype), b.to(dtype or b.dtype)) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def half(module: Any, place: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Rows of everything but the norm, columns of the layer's weight; under the names of the whole."""
    part, parts = torch.nn.Module(), {}
    part.layer = torch.nn.Module()
    for name, tensor in module.named_parameters():
        box = [(0, extent) for extent in tensor.shape]
        if name != "norm":
            dim = 1 if name == "layer.weight" else 0
            size = tensor.shape[dim] // 2
            box[dim] = (place * size, (place + 1) * size)
        piece = tensor[tuple(slice(lo, hi) for lo, hi in box)].detach().clone()
        (part.layer if "." in name else part).register_parameter(name.split(".")[-1], torch.nn.Parameter(piece))
        parts[name] = (tuple(tensor.shape), tuple(box))
    return part, parts

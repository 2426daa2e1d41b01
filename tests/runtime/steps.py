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


def publish_all(trainers: list[Any], step: int) -> int:
    """From every rank at once, as ranks do."""
    with ThreadPoolExecutor(len(trainers)) as pool:
        numbers = set(pool.map(lambda trainer: trainer.publish(step).number, trainers))
    assert len(numbers) == 1
    return int(numbers.pop())


def perturb(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5).add_(0.25)

"""A trainer in this process whose versions a served model follows, and what each of them must say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from refit_api.wire import Order, Role
from refit_operator.catalog.local import LocalCatalog

from e2e.reference import Reference
from e2e.workloads.tiny_llama import TinyLlama
from tests.adapters.vllm.served import Server, settings
from tests.adapters.vllm.steps import Steps
from tests.adapters.vllm.traffic import LONGEST, PROMPTS, Answer, pieces

COMMIT_SECONDS = 180.0

Said: TypeAlias = dict[str, dict[tuple[int, ...], list[int]]]
"""What each version says to each prompt, by an engine that loaded its checkpoint."""


def policy(seed: int) -> torch.nn.Module:
    """A Hugging Face Llama with weights large enough that every seed says something else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**TinyLlama().huggingface())).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def keep_checkpoint(folder: Path, number: int) -> Path:
    kept = folder / f"version-{number}"
    policy(number).save_pretrained(kept)
    return kept


def said(engine: Reference, checkpoints: Mapping[str, Path]) -> Said:
    return {version: dict(zip(PROMPTS, engine.generate(folder, PROMPTS, LONGEST), strict=True)) for version, folder in checkpoints.items()}


@dataclass(frozen=True)
class Training:
    """Version n has the weights of `policy(n)`. `checkpoints`: folders by version."""

    catalog: LocalCatalog
    client: Any
    model: torch.nn.Module
    folder: Path
    checkpoints: dict[str, Path] = field(default_factory=dict)

    def publish(self) -> int:
        """The next version; its checkpoint is kept."""
        number = len(self.checkpoints) + 1
        for parameter, new in zip(self.model.parameters(), policy(number).parameters(), strict=True):
            parameter.data.copy_(new)
        version = self.client.publish(number)
        assert version is not None
        assert version.number == number
        self.checkpoints[str(number)] = keep_checkpoint(self.folder, number)
        return number

    def order(self, number: int, order: Order = Order.COMMIT) -> None:
        """What the operator says to the generator."""
        self.catalog.run(self.catalog.store.assign(self.catalog.group, "generator-0", "0", number, order, (), COMMIT_SECONDS))

    def refit(self, server: Server) -> int:
        """The next version, until it is served."""
        number = self.publish()
        self.order(number)
        server.until(f"version {number} is served", lambda: server.version() == number, COMMIT_SECONDS)
        return number

    def stand(self, server: Server, steps: Steps, step: str) -> int:
        """The next version's commit stands at that step."""
        steps.name(step)
        number = self.publish()
        self.order(number)
        server.until(f"the commit stands at {step}", lambda: steps.reached, COMMIT_SECONDS)
        return number

    def continued(self, engine: Reference, answer: Answer) -> list[int]:
        """What is said if the weights change where the answer names other versions, and the cache is kept."""
        return engine.generate_across([(self.checkpoints[version], tokens) for version, tokens in pieces(answer)], [answer.prompt])[0]


@contextmanager
def training(catalog: LocalCatalog, folder: Path) -> Iterator[Training]:
    from refit_runtime.adapters.torch_module import TorchSource
    from refit_runtime.wiring import TrainerClient

    model = policy(0)
    with closing(TrainerClient(settings(catalog, folder, "trainer-0", Role.TRAINER), 0, 1)) as client:
        client.bind(TorchSource(model))
        yield Training(catalog, client, model, folder)

"""A real engine: `vllm serve` follows a trainer over NIXL, and says at every moment which version it serves."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from refit_api.wire import Order, Role
from refit_operator.catalog.local import LocalCatalog

from e2e.workloads.tiny_llama import TinyLlama
from tests.adapters.vllm.served import START_SECONDS, Server, mounted, reference, serving, settings

PROMPTS = [[1, 2, 3, 4, 5], [100, 7, 300], list(range(40, 80))]
TOKENS = 12


def policy(seed: int) -> torch.nn.Module:
    """A Hugging Face Llama with weights large enough that every seed says something else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**TinyLlama().huggingface())).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.engine
def test_a_served_model_follows_the_trainer(catalog_server: LocalCatalog, tmp_path: Path) -> None:
    """Refused before the first version; then each version's greedy tokens are those of an engine that loaded its checkpoint; a request runs across a commit."""
    from refit_runtime.adapters.torch_module import TorchSource
    from refit_runtime.wiring import TrainerClient

    TinyLlama().write_config(tmp_path / "model")
    trained = policy(1)
    with (
        serving(tmp_path / "model", tmp_path, mounted(catalog_server, tmp_path, "generator-0", Role.GENERATOR), "generator-0") as server,
        reference(tmp_path / "model", tmp_path) as expected,
        closing(TrainerClient(settings(catalog_server, tmp_path, "trainer-0", Role.TRAINER), 0, 1)) as trainer,
    ):
        trainer.bind(TorchSource(trained))
        server.until("the server answers", lambda: server.version() is not None, START_SECONDS)
        refused = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 1})
        assert (refused[0], server.version()) == (503, 0)

        refit(catalog_server, trainer, server, 0)
        trained.save_pretrained(tmp_path / "first")
        same(server, "1", expected(tmp_path / "first", PROMPTS, TOKENS))

        for parameter, new in zip(trained.parameters(), policy(2).parameters(), strict=True):
            parameter.data.copy_(new)
        across: list[tuple[int, str]] = []
        clients = [threading.Thread(target=ask_on, args=(server, across)) for _ in range(2)]
        for client in clients:
            client.start()
        refit(catalog_server, trainer, server, 1)
        for client in clients:
            client.join(120)
        assert {count for count, _ in across} == {100}
        assert {"1, 2", "2"} <= {named for _, named in across} <= {"1", "1, 2", "2"}
        trained.save_pretrained(tmp_path / "second")
        same(server, "2", expected(tmp_path / "second", PROMPTS, TOKENS))

        rank = server.ask("/refit/status")[1]["ranks"][0]
        assert (rank["phase"], rank["serving"], rank["coordinate"]) == ("Serving", 2, "tp0")
        assert sum(read["bytes"] for read in rank["reads"]) == rank["bytes"] > 0
        assert server.ask("/refit/prestop")[1]["left"] is False, "its pod stays"
        catalog_server.pods.deleted.add("generator-0")
        assert server.ask("/refit/prestop")[1] == {"left": True, "reason": ""}


def ask_on(server: Server, seen: list[tuple[int, str]]) -> None:
    """Long requests without a pause between them, until one names the second version only."""
    while not any(named == "2" for _, named in seen):
        tokens, named = server.complete(PROMPTS[0], 100)
        seen.append((len(tokens), named))


def refit(catalog: LocalCatalog, trainer, server: Server, step: int) -> None:
    """What trainer and operator do for one version."""
    version = trainer.publish(step)
    assert version is not None
    catalog.run(catalog.store.assign(catalog.group, "generator-0", "0", version.number, Order.COMMIT, (), 60.0))
    server.until(f"version {version.number} is served", lambda: server.version() == version.number)


def same(server: Server, version: str, expected: list[list[int]]) -> None:
    """Twice: the second time from the prefix cache."""
    for _ in range(2):
        answers = [server.complete(prompt, TOKENS) for prompt in PROMPTS]
        assert [tokens for tokens, _ in answers] == expected
        assert {named for _, named in answers} == {version}

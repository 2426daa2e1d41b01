"""A real engine: `vllm serve` under steady requests follows a trainer over NIXL, and says of every token which version made it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog

from e2e.reference import reference
from tests.adapters.vllm.served import START_SECONDS, Server, mounted, serving
from tests.adapters.vllm.steps import FAIL, Steps
from tests.adapters.vllm.story import COMMIT_SECONDS, Training, said, training
from tests.adapters.vllm.traffic import ANSWER_SECONDS, PROMPTS, Answer, Traffic, across, ask, mislabelled, untrue

VERSIONS = 20
SAMPLE = 4  # of answers that a commit came into; each takes as many loads as it has versions
TOKENS = 12


@pytest.mark.engine
def test_a_served_model_follows_the_trainer(catalog_server: LocalCatalog, tmp_path: Path) -> None:
    """Refused before the first version; then twenty in a row, and no request fails. Every token is the one that the version named for it makes, by an
    engine that loaded its checkpoint; and where a commit came in between, that loaded the next one there. In the last commit the agent fails.
    """
    given = mounted(catalog_server, tmp_path, "generator-0", Role.GENERATOR)
    with (
        reference(tmp_path) as engine,
        serving(tmp_path / "model", tmp_path, given, "generator-0") as server,
        training(catalog_server, tmp_path) as trainer,
    ):
        server.until("the server answers", lambda: server.version() is not None, START_SECONDS)
        refused = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 1})
        assert (refused[0], server.version()) == (503, 0)

        trainer.refit(server)
        with Traffic(server) as traffic:
            for _ in range(1, VERSIONS - 1):
                answered(server, traffic, str(trainer.refit(server)))
            refit_by_two_agents(server, trainer, Steps(tmp_path))
            answered(server, traffic, str(VERSIONS))
        assert [answer for answer in traffic.answers if not answer.whole] == []
        assert mislabelled(traffic.answers) == []
        truth = said(engine, trainer.checkpoints)
        assert untrue(traffic.answers, truth) == []
        sample = list(islice(across(traffic.answers), SAMPLE))
        assert sample
        assert [trainer.continued(engine, answer) for answer in sample] == [list(answer.tokens) for answer in sample]
        same(server, str(VERSIONS), truth[str(VERSIONS)])

        rank = server.ask("/refit/status")[1]["ranks"][0]
        assert (rank["phase"], rank["serving"], rank["coordinate"]) == ("Serving", VERSIONS, "tp0")
        assert sum(read["bytes"] for read in rank["reads"]) == rank["bytes"] > 0
        assert server.ask("/refit/prestop")[1]["left"] is False, "its pod stays"
        catalog_server.pods.deleted.add("generator-0")
        assert server.ask("/refit/prestop")[1] == {"left": True, "reason": ""}


def refit_by_two_agents(server: Server, trainer: Training, steps: Steps) -> None:
    """The first fails when the version is installed, while the engine is paused and says the old version's name; the next one finds it so."""
    number = trainer.stand(server, steps, "label")
    steps.go_on(FAIL)
    server.until(f"version {number} is served", lambda: server.version() == number, COMMIT_SECONDS)


def answered(server: Server, traffic: Traffic, version: str) -> None:
    """Whole and streamed, by that version alone: no commit is so early that the one before was not seen."""

    def both() -> bool:
        return {answer.streamed for answer in traffic.answers if answer.versions == version} == {False, True}

    server.until(f"version {version} answers both ways", both, ANSWER_SECONDS)


def same(server: Server, version: str, truth: dict[tuple[int, ...], list[int]]) -> None:
    """Twice: the second time from the prefix cache."""
    for _ in range(2):
        answers: list[Answer] = [ask(server, prompt, TOKENS, streamed=False) for prompt in PROMPTS]
        assert [list(answer.tokens) for answer in answers] == [truth[prompt][:TOKENS] for prompt in PROMPTS]
        assert {answer.versions for answer in answers} == {version}

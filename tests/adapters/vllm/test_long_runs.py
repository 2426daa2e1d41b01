"""Hundreds of versions in a row, and the other two ways to treat requests that run: drained, or ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import psutil
import pytest
from refit_api.mounted import Engine
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog

from e2e.reference import reference
from tests.adapters.vllm.served import START_SECONDS, Server, mounted, serving
from tests.adapters.vllm.steps import Steps
from tests.adapters.vllm.story import Training, said, training
from tests.adapters.vllm.traffic import Traffic, across, mislabelled, untrue

VERSIONS, WARM = 200, 40
SAMPLE = 40
GROWTH_BYTES = 64 << 20
COUNTED = ("plans", "allocations", "registrations", "connections")

pytestmark = [pytest.mark.engine, pytest.mark.soak]


def holdings(server: Server, trainer: Training, steps: Steps) -> dict[str, Mapping[str, int]]:
    """What must not grow, by process; the trainer's is this one."""
    own = psutil.Process(server.process.pid)
    seen: dict[str, Mapping[str, int]] = {"trainer counts": trainer.client.counters(), "rank counts": steps.counted}
    for process in (psutil.Process(os.getpid()), own, *own.children(recursive=True)):
        with process.oneshot():
            seen[f"{process.name()} {process.pid}"] = {"memory": process.memory_info().rss, "threads": process.num_threads(), "files": process.num_fds()}
    return seen


def grown(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Memory by more than a bound, anything else by more than the few that come and go with requests."""
    spare = {"memory": GROWTH_BYTES, "threads": 2, "files": 8, **dict.fromkeys(COUNTED, 0)}
    return {
        f"{name}, {what}": f"{before[name][what]} -> {after[name][what]}"
        for name in after
        for what, more in spare.items()
        if what in after[name] and after[name][what] > before[name][what] + more
    }


def test_two_hundred_versions_leave_nothing_behind(catalog_server: LocalCatalog, tmp_path: Path) -> None:
    """Under traffic, every answer checked. Memory, threads, files, registrations, connections and allocations are as they were once all was warm."""
    given = mounted(catalog_server, tmp_path, "generator-0", Role.GENERATOR)
    with (
        reference(tmp_path) as engine,
        serving(tmp_path / "model", tmp_path, given, "generator-0") as server,
        training(catalog_server, tmp_path) as trainer,
    ):
        server.until("the server answers", lambda: server.version() is not None, START_SECONDS)
        trainer.refit(server)
        warm: dict[str, Mapping[str, int]] = {}
        with Traffic(server) as traffic:
            while len(trainer.checkpoints) < VERSIONS:
                number = trainer.refit(server)
                if number == WARM:
                    warm = holdings(server, trainer, Steps(tmp_path))
            after = holdings(server, trainer, Steps(tmp_path))
        assert [answer for answer in traffic.answers if not answer.whole] == []
        assert mislabelled(traffic.answers) == []
        assert after.keys() == warm.keys()
        assert grown(warm, after) == {}, f"{len(traffic.answers)} answers; {warm}; {after}"
        assert untrue(traffic.answers, said(engine, trainer.checkpoints)) == []
        sample = list(islice(across(traffic.answers), SAMPLE))
        assert [trainer.continued(engine, answer) for answer in sample] == [list(answer.tokens) for answer in sample]


@pytest.mark.parametrize("pause", ["Wait", "Abort"])
def test_requests_that_run_are_drained_or_ended(pause: str, catalog_server: LocalCatalog, tmp_path: Path) -> None:
    """No answer is of two versions. Drained: all are whole. Ended: some say `abort`, with the tokens that they had and the version that made them."""
    given = mounted(catalog_server, tmp_path, "generator-0", Role.GENERATOR, Engine.model_validate({"pause": pause}))
    with (
        reference(tmp_path) as engine,
        serving(tmp_path / "model", tmp_path, given, "generator-0") as server,
        training(catalog_server, tmp_path) as trainer,
    ):
        server.until("the server answers", lambda: server.version() is not None, START_SECONDS)
        trainer.refit(server)
        with Traffic(server) as traffic:
            for _ in range(10):
                number = str(trainer.refit(server))
                server.until(f"version {number} answers", lambda number=number: any(answer.versions == number for answer in traffic.answers))
        assert {answer.status for answer in traffic.answers} == {200}
        ends = {answer.reason for answer in traffic.answers if not answer.whole}
        assert ends == ({"abort"} if pause == "Abort" else set())
        named = [answer for answer in traffic.answers if answer.tokens]
        assert mislabelled(named) == []
        assert list(across(named)) == []
        assert untrue(named, said(engine, trainer.checkpoints)) == []

"""The operator never runs blind: it waits for the two kinds, says when they are not there, and ends when they go away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT, kubectl_of
from tests.operator.conftest import identity
from tests.operator.test_process import WAIT_SECONDS, ask, free_ports, operator

if TYPE_CHECKING:
    from e2e.kubectl import Kubectl


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kubectl, Path]]:
    """An API server that does not know the kinds."""
    from e2e.cluster.apiserver import ApiServer

    with ApiServer.start(tmp_path_factory.mktemp("bare")) as server:
        kubectl = kubectl_of(server)
        yield kubectl, identity(server, kubectl)


def variables(user: Path, **more: str) -> dict[str, str]:
    ports = dict(zip(("CATALOG_PORT", "METRICS_PORT", "HEALTH_PORT"), map(str, free_ports(3)), strict=True))
    return {f"REFIT_OPERATOR_{name}": value for name, value in {"KUBECONFIG": str(user), "CATALOG_HOST": "127.0.0.1", **ports, **more}.items()}


def ended(code: int, log: str) -> None:
    assert code == 1
    said = json.loads(log.splitlines()[-1])
    assert (said["event"], said["error"]) == ("operator ended", "SpecError")
    assert re.search("does not have .*(refitgroups|weightversions) of refit.dev/v1alpha1: apply the CRDs of crds/$", said["message"])


def test_without_the_kinds_it_ends_and_says_what_to_apply(bare: tuple[Kubectl, Path]) -> None:
    with operator(**variables(bare[1], KINDS_SECONDS="1")) as process:
        _, log = process.communicate(timeout=WAIT_SECONDS)
    ended(process.returncode, log)


def test_it_waits_for_the_kinds_and_ends_when_they_go(bare: tuple[Kubectl, Path]) -> None:
    kubectl, user = bare
    settings = variables(user, KINDS_SECONDS="60")
    with operator(**settings) as process:
        assert process.stderr is not None
        assert "waiting for the kinds" in process.stderr.readline()
        kubectl("apply", "--server-side", "-k", str(ROOT / "crds"))
        assert "queue" in ask(f"http://127.0.0.1:{settings['REFIT_OPERATOR_HEALTH_PORT']}/healthz")
        section = (ROOT / "docs" / "quickstart.md").read_text().partition("\nRefit itself:")[2].partition("\n## ")[0]
        groups, versions, _ = re.findall("^kubectl (.*)$", section, re.MULTILINE)
        for line in (groups, versions):  # with nothing there to delete they are fine too
            kubectl(*line.split())
        kubectl("delete", "-k", str(ROOT / "crds"))
        _, log = process.communicate(timeout=WAIT_SECONDS)
    ended(process.returncode, log)

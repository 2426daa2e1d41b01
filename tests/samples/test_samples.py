"""The sample manifests: loaded by the models, applied to a real API server, and honest about what this release carries out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from refit_api.dialect import from_api
from refit_api.document import JsonObject
from refit_api.implemented import unimplemented
from refit_api.v1alpha1 import RefitGroup

from e2e.kubectl import Kubectl

SAMPLES = sorted((Path(__file__).parents[2] / "manifests" / "samples").glob("*.yaml"))
LATER = {"adopted.yaml", "fleet.yaml"}
"""Samples that ask for what a later release carries out: they are Stalled in this one."""


def _documents(path: Path) -> list[JsonObject]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _groups(path: Path) -> list[RefitGroup]:
    return [from_api(RefitGroup, document) for document in _documents(path) if document["kind"] == "RefitGroup"]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_the_models_load_it(path: Path) -> None:
    """An unknown field or a wrong type in a sample would mislead whoever copies it."""
    assert len(_groups(path)) == 1


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_it_says_so_if_it_is_for_later(path: Path) -> None:
    asks = [entry for group in _groups(path) for entry in unimplemented(group.spec)]
    assert bool(asks) == (path.name in LATER), asks


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_an_api_server_takes_it_twice(path: Path, kubectl: Kubectl) -> None:
    """Client-side and server-side; the second time changes nothing."""
    namespace = f"sample-{path.stem}"
    kubectl("create", "namespace", namespace)
    kubectl("apply", "-n", namespace, "--validate=strict", "-f", str(path))
    assert "configured" not in kubectl("apply", "-n", namespace, "-f", str(path))
    assert kubectl("diff", "-n", namespace, "-f", str(path)) == ""
    kubectl("delete", "-n", namespace, "-f", str(path))
    kubectl("apply", "-n", namespace, "--server-side", "-f", str(path))
    assert kubectl("diff", "-n", namespace, "--server-side", "-f", str(path)) == ""

"""A cluster of others takes the operator and nothing else, and whatever is wrong is one line, said before anything is applied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from e2e.cluster.errors import ClusterError
from e2e.cluster.existing import ExistingCluster
from e2e.cluster.kubectl import kubectl_program
from e2e.cluster.settings import REPOSITORY, ClusterSettings
from e2e.installation import manifests
from e2e.kubectl import Kubectl

KUBECONFIG = """{"apiVersion": "v1", "kind": "Config", "current-context": "theirs", "contexts": [{"name": "theirs", "context": {"cluster": "theirs"}}],
"clusters": [{"name": "theirs", "cluster": {"server": "http://127.0.0.1:1"}}]}"""


def run(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    folders = {"REFIT_CLUSTER_CACHE": str(tmp_path / "cache"), "KUBECONFIG": str(kubeconfig)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **folders, **environment}, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", [("e2e.demo",), ("e2e.example",)], ids=["demo", "example"])
def test_what_needs_folders_of_this_machine_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """No API server listens there, so that anything that was asked of it would be another error."""
    done = run(tmp_path, *words, REFIT_CLUSTER="existing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "mount folders of this machine" in done.stderr
    assert "python -m e2e.cluster install" in done.stderr


@pytest.mark.parametrize("words", [("e2e.demo",), ("e2e.example",), ("e2e.cluster", "status")], ids=["demo", "example", "cluster"])
def test_a_wrong_setting_is_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, *words, REFIT_CLUSTER="bogus")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    for part in ("REFIT_CLUSTER", "'bogus'", "'existing'", "'kind'", "'local'", "'auto'"):
        assert part in done.stderr


def test_the_operator_is_that_of_the_named_image(tmp_path: Path) -> None:
    """Everything else is manifests/base as it is."""
    image = ExistingCluster(ClusterSettings(cluster="existing", operator_image="registry/refit-operator:1")).operator_image()
    documents = list(yaml.safe_load_all(manifests(Kubectl((kubectl_program(),), tmp_path / "none"), image)))
    containers = [container for each in documents if each["kind"] == "Deployment" for container in each["spec"]["template"]["spec"]["containers"]]
    assert [(container["image"], container.get("imagePullPolicy")) for container in containers] == [("registry/refit-operator:1", None)]
    assert {each["kind"] for each in documents} > {"Namespace", "CustomResourceDefinition", "ClusterRole", "ServiceAccount"}


def test_an_image_that_nobody_named_is_asked_for() -> None:
    with pytest.raises(ClusterError, match="REFIT_OPERATOR_IMAGE"):
        ExistingCluster(ClusterSettings(cluster="existing")).operator_image()

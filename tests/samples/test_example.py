"""What `python -m e2e.example` prints is what a user may apply: the models load it, and a real API server takes it twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from refit_api.dialect import from_api
from refit_api.implemented import unimplemented
from refit_api.v1alpha1 import RefitGroup

from e2e.cluster.pod_packages import PodPackages
from e2e.example import example
from e2e.groups import Pods
from e2e.kubectl import Kubectl

PODS = Pods("localhost/refit-runtime:1", PodPackages(Path("/packages")))


@pytest.mark.parametrize("vllm", [False, True], ids=["light", "vllm"])
def test_an_api_server_takes_it_twice(vllm: bool, kubectl: Kubectl) -> None:
    documents = example(PODS, vllm)
    (group,) = [from_api(RefitGroup, document) for document in documents if document["kind"] == "RefitGroup"]
    assert unimplemented(group.spec) == []
    text = yaml.safe_dump_all(documents, sort_keys=False)
    kubectl("apply", "--validate=strict", "-f", "-", stdin=text)
    assert "configured" not in kubectl("apply", "-f", "-", stdin=text)

"""What several suites share: a real API server that knows the two kinds, once per test run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e.kubectl import Kubectl

if TYPE_CHECKING:
    from refit_operator.catalog.local import LocalCatalog

    from e2e.cluster.apiserver import ApiServer

ROOT = Path(__file__).parents[1]


def kubectl_of(server: ApiServer) -> Kubectl:
    """The environment's own kubectl if there is one, else that of the PATH."""
    ours = Path(sys.executable).with_name("kubectl")
    program = str(ours if ours.exists() else "kubectl")
    return Kubectl((program, f"--cache-dir={server.folder / 'kubectl'}"), server.kubeconfig)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """etcd and kube-apiserver, without controllers, with both kinds established. Shared: a test works in a namespace or with names of its own."""
    from e2e.cluster.apiserver import ApiServer

    with ApiServer.start(tmp_path_factory.mktemp("apiserver")) as server:
        kubectl = kubectl_of(server)
        kubectl("apply", "--server-side", "-k", str(ROOT / "crds"))
        kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/refitgroups.refit.dev", "crd/weightversions.refit.dev")
        yield server


@pytest.fixture(scope="session")
def kubectl(api_server: ApiServer) -> Kubectl:
    """kubectl as a cluster administrator of `api_server`."""
    return kubectl_of(api_server)


@pytest.fixture
def catalog_server() -> Iterator[LocalCatalog]:
    """The real catalog service on loopback: gRPC, TLS, tokens, memory store; what the operator would write is confirmed at once."""
    from refit_operator.catalog.local import local_catalog

    with local_catalog() as catalog:
        yield catalog

"""The judge of this suite's tables: the shared API server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kubernetes import client, config

from tests.crds.judge import Judge

if TYPE_CHECKING:
    from e2e.cluster.apiserver import ApiServer


@pytest.fixture(scope="session")
def judge(api_server: ApiServer) -> Judge:
    return Judge(client.CustomObjectsApi(config.new_client_from_config(str(api_server.kubeconfig))))

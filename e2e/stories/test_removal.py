"""What is left behind: nothing. The file comes last: it ends the shared fleet."""

from __future__ import annotations

import pytest

from e2e.fleet import GROUP, Fleet
from e2e.kubectl import eventually

pytestmark = pytest.mark.story

KINDS = "pods,statefulsets,deployments,replicasets,services,configmaps,serviceaccounts,poddisruptionbudgets,weightversions"
NOT_OURS = {"configmap/kube-root-ca.crt", "serviceaccount/default", "configmap/refit-workloads"}


def test_a_deleted_group_leaves_nothing(fleet: Fleet) -> None:
    """Children go with their owner, versions with their finalizers, within the time that drains take."""
    fleet.kubectl.delete("refitgroup", GROUP, fleet.namespace)

    def left() -> set[str]:
        return set(fleet.kubectl("get", KINDS, "-n", fleet.namespace, "-o", "name").split()) - NOT_OURS

    eventually("nothing is left", lambda: not left(), 150)

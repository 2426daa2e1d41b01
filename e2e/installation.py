"""Refit on a cluster: the operator from `manifests/base` with the cluster's image of it, and what pods of the demo and the stories need. Idempotent."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import kubectl_program
from e2e.cluster.progress import step
from e2e.cluster.resolver import Cluster, resolve
from e2e.cluster.settings import REPOSITORY, ClusterSettings
from e2e.groups import Pods
from e2e.kubectl import Kubectl, KubectlError

NAMESPACE = "refit-system"
OPERATOR = "refit-operator"


@dataclass(frozen=True)
class Installation:
    """A cluster with Refit on it."""

    cluster: Cluster
    kubectl: Kubectl
    pods: Pods

    @property
    def exports(self) -> Path:
        assert self.pods.exports is not None
        return self.pods.exports


def install(settings: ClusterSettings | None = None) -> Installation:
    """Brings up the cluster, builds what changed, applies the manifests, waits for the operator, and has all that pods need."""
    settings = settings or ClusterSettings.load()
    cluster = resolve(settings)
    packages = cluster.ensure_packages()  # first: a cluster that cannot have them says so before anything is applied
    kubectl = install_operator(cluster)
    exports = settings.cache / "exports"
    shutil.rmtree(exports, ignore_errors=True)
    exports.mkdir(parents=True)
    return Installation(cluster, kubectl, Pods(cluster.ensure_images().runtime, packages, exports))


def install_operator(cluster: Cluster) -> Kubectl:
    kubectl = Kubectl((kubectl_program(),), cluster.up())
    image = cluster.operator_image()
    with step("install the operator", 15):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifests(kubectl, image))
        try:
            kubectl("rollout", "status", f"deployment/{OPERATOR}", "-n", NAMESPACE, "--timeout=120s", timeout=130)
        except KubectlError as error:
            said = kubectl("logs", f"deployment/{OPERATOR}", "-n", NAMESPACE, "--tail=30")
            raise ClusterError(f"the operator did not become available: {error}\n{said}") from error
    return kubectl


def manifests(kubectl: Kubectl, image: str) -> str:
    """The base, with that image of the operator. Images are named by their content, so one that the node has is never pulled."""
    documents = list(yaml.safe_load_all(kubectl("kustomize", str(REPOSITORY / "manifests" / "base"))))
    for document in documents:
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                container["image"] = image
    return yaml.safe_dump_all(documents)

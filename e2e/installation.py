"""Refit on a cluster: images of this checkout, the operator from `manifests/`, and who it is. Idempotent; used by the demo and the stories."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

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
    """Brings up the cluster, builds what changed, applies the manifests and waits for the operator."""
    settings = settings or ClusterSettings()
    cluster = resolve(settings)
    kubeconfig = cluster.up()
    kubectl = Kubectl((kubectl_program(),), kubeconfig)
    images = cluster.ensure_images()
    packages = cluster.ensure_packages()
    exports = settings.cache / "exports"
    shutil.rmtree(exports, ignore_errors=True)
    exports.mkdir(parents=True)
    with step("install the operator", 15):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifests(kubectl, images.operator))
        try:
            kubectl("rollout", "status", f"deployment/{OPERATOR}", "-n", NAMESPACE, "--timeout=120s", timeout=130)
        except KubectlError as error:
            said = kubectl("logs", f"deployment/{OPERATOR}", "-n", NAMESPACE, "--tail=30")
            raise RuntimeError(f"the operator did not become available: {error}\n{said}") from error
    return Installation(cluster, kubectl, Pods(images.runtime, packages, exports))


def manifests(kubectl: Kubectl, image: str) -> str:
    """The base, with the operator's image of this checkout."""
    documents = list(yaml.safe_load_all(kubectl("kustomize", str(REPOSITORY / "manifests" / "overlays" / "local"))))
    for document in documents:
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                container["image"] = image
    return yaml.safe_dump_all(documents)

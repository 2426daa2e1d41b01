"""A cluster of `kind`, where it and docker are there (`kind load docker-image` asks docker, whatever runs the node).

The node is a container, so folders for pods are mounted into it first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.images import TARGETS, Docker, Images, ensure_images
from e2e.cluster.pod_packages import PodPackages, ensure_pod_packages
from e2e.cluster.processes import call
from e2e.cluster.progress import step
from e2e.cluster.settings import ClusterSettings

NAME = "refit"
CREATE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class KindCluster:
    settings: ClusterSettings

    @property
    def kubeconfig(self) -> Path:
        return self.settings.state / "kind.kubeconfig"

    @property
    def audit_log(self) -> Path | None:
        return None

    def up(self) -> Path:
        if NAME not in self._clusters():
            self.settings.state.mkdir(parents=True, exist_ok=True)
            with step("create a kind cluster", 90):
                create = ("kind", "create", "cluster", "--name", NAME, "--wait", "120s", "--config", "-")
                call(create, stdin=json.dumps(self._configuration()), seconds=CREATE_SECONDS)
        call(["kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", self.kubeconfig])
        return self.kubeconfig

    def down(self) -> None:
        if NAME in self._clusters():
            call(["kind", "delete", "cluster", "--name", NAME], seconds=CREATE_SECONDS)
        self.kubeconfig.unlink(missing_ok=True)

    def status(self) -> list[tuple[str, str]]:
        return [(f"kind cluster {NAME}", "running" if NAME in self._clusters() else "absent")]

    def operator_image(self) -> str:
        return self.ensure_images().operator

    def ensure_images(self) -> Images:
        images = ensure_images(self.settings.cache, Docker())
        with step(f"load {' and '.join(TARGETS)} images into kind", 20):
            call(["kind", "load", "docker-image", "--name", NAME, *images.names()], seconds=CREATE_SECONDS)
        return images

    def ensure_packages(self) -> PodPackages:
        return ensure_pod_packages(self.settings.cache)

    def _configuration(self) -> dict[str, object]:
        cache = str(self.settings.cache)
        mounts = [{"hostPath": cache, "containerPath": cache}]
        return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [{"role": "control-plane", "extraMounts": mounts}]}

    def _clusters(self) -> list[str]:
        return call(["kind", "get", "clusters"]).split()

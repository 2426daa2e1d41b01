"""A cluster that is there already: the current context of kubectl, used only when it is asked for.

Nothing of it is started, ended or reconfigured. Its nodes pull the operator's image, so the settings name it and nothing is built.
The demo and the stories are refused before anything is applied: their pods mount folders of this machine, and its nodes are others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.images import Images
from e2e.cluster.kubectl import kubectl_program
from e2e.cluster.pod_packages import PodPackages
from e2e.cluster.processes import call
from e2e.cluster.settings import ClusterSettings


@dataclass(frozen=True, slots=True)
class ExistingCluster:
    settings: ClusterSettings

    @property
    def kubeconfig(self) -> Path:
        return (self.settings.kubeconfig or Path("~/.kube/config")).expanduser()

    @property
    def audit_log(self) -> Path | None:
        return None

    def up(self) -> Path:
        if not self.kubeconfig.exists():
            raise ClusterError(f"REFIT_CLUSTER=existing, but {self.kubeconfig} does not exist; set KUBECONFIG")
        call([kubectl_program(), f"--kubeconfig={self.kubeconfig}", "get", "--raw=/readyz"])
        return self.kubeconfig

    def down(self) -> None:
        """Not ours to end."""

    def status(self) -> list[tuple[str, str]]:
        return [("context", call([kubectl_program(), f"--kubeconfig={self.kubeconfig}", "config", "current-context"]).strip())]

    def operator_image(self) -> str:
        if self.settings.operator_image is None:
            raise ClusterError("an existing cluster pulls its images: push the target `operator` of the Dockerfile to its registry, set REFIT_OPERATOR_IMAGE")
        return self.settings.operator_image

    def ensure_images(self) -> Images:
        raise ClusterError("REFIT_CLUSTER=existing: images are not built for a cluster of others; build the targets of the Dockerfile and push them yourself")

    def ensure_packages(self) -> PodPackages:
        raise ClusterError(
            "REFIT_CLUSTER=existing: pods of the demo, the example and the stories mount folders of this machine (engines, checkpoints), which its nodes do "
            "not have; use REFIT_CLUSTER=local or kind for them. `python -m e2e.cluster install` puts the operator on the existing cluster"
        )

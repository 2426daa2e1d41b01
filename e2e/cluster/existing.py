"""A cluster that is there already: the current context of kubectl, used only when it is asked for.

Nothing of it is started, ended or reconfigured. Its nodes get images from a registry, so they are named by the settings, not built.
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

    def ensure_images(self) -> Images:
        operator, runtime = self.settings.operator_image, self.settings.runtime_image
        if operator is None or runtime is None:
            raise ClusterError("an existing cluster pulls its images: push both targets of the Dockerfile and set REFIT_OPERATOR_IMAGE, REFIT_RUNTIME_IMAGE")
        return Images(operator, runtime)

    def ensure_packages(self) -> PodPackages:
        """Its runtime image brings the engine."""
        return PodPackages(folder=None)

"""Where the cluster keeps its things, and which cluster is wanted: the only reader of the environment here.

Invariants: everything that can be made again lies under `cache`; everything of a running cluster lies under `state`, and nothing else does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from e2e.cluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[2]

# A unix socket's path has at most 107 bytes; the longest that we put under `state` is containerd's for its shims' streams.
LONGEST_STATE_PATH = 70

ClusterKind = Literal["existing", "kind", "local"]


class ClusterSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="REFIT_", frozen=True)

    cluster: Literal["auto"] | ClusterKind = Field(default="auto", description="Which Kubernetes to use; auto takes the first that works.")
    cluster_cache: Path | None = Field(default=None, description="Folder of built programs, images and packages.")
    cluster_state: Path | None = Field(default=None, description="Folder of the running local cluster.")
    xdg_cache_home: Path = Field(default=Path("~/.cache"), validation_alias="XDG_CACHE_HOME")
    xdg_state_home: Path = Field(default=Path("~/.local/state"), validation_alias="XDG_STATE_HOME")
    operator_image: str | None = Field(default=None, description="On an existing cluster: where it pulls the operator from.")
    kubeconfig: Path | None = Field(default=None, validation_alias="KUBECONFIG", description="Of an existing cluster.")

    @classmethod
    def load(cls) -> ClusterSettings:
        """Raises ClusterError that names each variable that is wrong, what it says and what it may say."""
        try:
            return cls()
        except ValidationError as error:
            prefix = cls.model_config["env_prefix"]
            wrong = [f"{prefix}{str(each['loc'][0]).upper()} is {each['input']!r}: {each['msg']}" for each in error.errors(include_url=False)]
            raise ClusterError("; ".join(wrong)) from error

    @property
    def cache(self) -> Path:
        return (self.cluster_cache or self.xdg_cache_home.expanduser() / "refit").absolute()

    @property
    def state(self) -> Path:
        folder = (self.cluster_state or self.xdg_state_home.expanduser() / "refit" / "cluster").absolute()
        if len(str(folder).encode()) > LONGEST_STATE_PATH:
            raise ClusterError(
                f"REFIT_CLUSTER_STATE is {folder}: longer than {LONGEST_STATE_PATH} bytes, too long for the unix sockets in it; name a shorter folder"
            )
        return folder

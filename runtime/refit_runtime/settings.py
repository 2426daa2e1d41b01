"""The runtime's one settings object: the mounted file (`refit_api.mounted`) and who this pod is (`POD_*`, downward fields).

Read once, frozen, unknown keys refused; the only module of the runtime that reads the environment.
`REFIT_SETTINGS` names another file than `/etc/refit/settings.json`: adopted pods and tests.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from refit_api import names
from refit_api.errors import SpecError
from refit_api.mounted import Mounted


class Pod(BaseSettings):
    """`POD_NAME`, `POD_UID`, `POD_NAMESPACE`, `POD_IP`: where other pods reach this one, and whom the catalog sees."""

    model_config = SettingsConfigDict(env_prefix="POD_", frozen=True, extra="ignore")

    name: str
    uid: str
    namespace: str
    ip: str


class Run(BaseSettings):
    """Which training run a trainer process belongs to: `REFIT_RUN_ID`, else torchrun's id and restart count. A restart is a new run."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    refit_run_id: str = ""
    torchelastic_run_id: str = ""
    torchelastic_restart_count: str = "0"
    local_rank: int = 0

    @property
    def id(self) -> str:
        if self.refit_run_id or not self.torchelastic_run_id:
            return self.refit_run_id
        return f"{self.torchelastic_run_id}-{self.torchelastic_restart_count}"


class RuntimeSettings(Mounted):
    """The mounted file, the pod and the run, together; `ucx` is what UCX reads behind our back."""

    pod: Pod
    run: Run = Field(default_factory=Run)
    ucx: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def load(cls) -> RuntimeSettings:
        """Raises SpecError that names the file and each field that is wrong."""
        path = _path()
        try:
            mounted = Mounted.model_validate_json(path.read_text()).model_dump()
            ucx = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
            return cls.model_validate({**mounted, "pod": Pod(), "run": Run(), "ucx": ucx})
        except OSError as error:
            raise SpecError(f"settings file {path} cannot be read ({error.strerror}): mount the ConfigMap <group>-refit there", file=path) from error
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False, include_input=False))
            raise SpecError(f"settings of this pod ({path}, POD_* environment) are not valid: {wrong}", file=path) from error

    @classmethod
    def mounted(cls) -> bool:
        """Whether this process belongs to a group at all: an engine's plug-ins do nothing elsewhere."""
        return _path().exists()


def _path() -> Path:
    return Path(os.environ.get("REFIT_SETTINGS", names.SETTINGS_FILE))

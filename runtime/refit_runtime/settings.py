"""The runtime's one settings object: the mounted file (`refit_api.mounted`) and who this pod is (`POD_*`, downward fields).

Read once, frozen, unknown keys refused; the only module of the runtime that reads the environment.
`REFIT_SETTINGS` names another file than `/etc/refit/settings.json`: adopted pods and tests.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError
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


class RuntimeSettings(Mounted):
    """The mounted file and the pod, together."""

    pod: Pod

    @classmethod
    def load(cls) -> RuntimeSettings:
        """Raises SpecError that names the file and each field that is wrong."""
        path = Path(os.environ.get("REFIT_SETTINGS", names.SETTINGS_FILE))
        try:
            return cls.model_validate({**Mounted.model_validate_json(path.read_text()).model_dump(), "pod": Pod()})
        except OSError as error:
            raise SpecError(f"settings file {path} cannot be read ({error.strerror}): mount the ConfigMap <group>-refit there", file=path) from error
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False, include_input=False))
            raise SpecError(f"settings of this pod ({path}, POD_* environment) are not valid: {wrong}", file=path) from error

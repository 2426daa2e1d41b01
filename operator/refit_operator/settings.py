"""The operator's one settings object: built in `main`, frozen, unknown names refused; the only module of the operator that reads the environment.

Each field is `REFIT_OPERATOR_<NAME>` in the Deployment. Where it runs comes from the pod itself (`POD_NAMESPACE`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from refit_api import names
from refit_api.errors import SpecError

Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
_PREFIX = "REFIT_OPERATOR_"


class OperatorSettings(BaseSettings):
    """`namespaces` empty: all. Port 0: any free one (tests). `kinds_seconds`: how long the start waits for the CRDs; less than the liveness probe does."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    namespaces: tuple[str, ...] = ()
    namespace: str = Field(default="refit-system", validation_alias="POD_NAMESPACE")
    service: str = "refit-catalog"
    ca_secret: str = "refit-catalog-ca"
    catalog_host: str = "0.0.0.0"
    catalog_port: Port = names.CATALOG_PORT
    metrics_port: Port = names.METRICS_PORT
    health_port: Port = 8080
    kubeconfig: Path | None = None
    resync_seconds: Seconds = 600.0
    kinds_seconds: Seconds = 45.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @property
    def catalog_address(self) -> str:
        """Where pods find the catalog."""
        return f"{self.service}.{self.namespace}.svc:{names.CATALOG_PORT}"

    @property
    def catalog_names(self) -> tuple[str, ...]:
        """What the catalog's certificate is for."""
        host = f"{self.service}.{self.namespace}.svc"
        return (host, f"{host}.cluster.local", f"{self.service}.{self.namespace}", self.service, "localhost")

    @classmethod
    def load(cls) -> OperatorSettings:
        """Raises SpecError that names each variable that is wrong or that nothing reads."""
        known = {f"{_PREFIX}{name}".upper() for name, field in cls.model_fields.items() if field.validation_alias is None}
        unknown = sorted(name for name in os.environ if name.upper().startswith(_PREFIX) and name.upper() not in known)
        if unknown:
            raise SpecError(f"the operator has no setting {', '.join(unknown)}: unset it; the settings are {', '.join(sorted(known))}", seen=unknown)
        try:
            return cls()
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False, include_input=False))
            raise SpecError(f"the operator's environment (REFIT_OPERATOR_*, POD_NAMESPACE) is not valid: {wrong}") from error

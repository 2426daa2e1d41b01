"""The one file that the operator mounts into every pod of a group (`names.SETTINGS_FILE`), trainers and generators alike.

The operator writes `Mounted(...).model_dump_json(by_alias=True)`; the runtime reads the same model, so the two cannot drift apart.
Words and meanings are those of RefitGroup.spec, spelled as there; unknown keys are refused. Nothing in it is secret.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from refit_api import names

Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Part(BaseModel):
    """Frozen; camelCase in the file, snake_case in code."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Group(Part):
    """The RefitGroup that the pod belongs to."""

    namespace: str
    name: str


class Model(Part):
    """`spec.model`: compared by the catalog when workers register."""

    name: str
    revision: str = ""

    @property
    def text(self) -> str:
        """What a worker registers."""
        return f"{self.name}@{self.revision}" if self.revision else self.name


class Trainer(Part):
    """`spec.trainer`."""

    snapshot: Literal["Device", "Host", "InPlace"] = "Device"
    arenas: Annotated[int, Field(ge=1, le=3)] = 1
    on_busy: Literal["Wait", "Skip"] = "Wait"
    redundancy: Annotated[int, Field(ge=1)] = 2


class Engine(Part):
    """`spec.generators.engine`; `relay` unset means true with Copy, false with Remap and with staging Windowed."""

    kind: Literal["vLLM", "Custom"] = "vLLM"
    commit: Literal["Copy", "Remap"] = "Copy"
    staging: Literal["Full", "Windowed"] = "Full"
    keep_previous: bool = False
    relay: bool | None = None
    kv: Literal["Salt", "Reset", "Keep"] = "Salt"
    pause: Literal["Keep", "Wait", "Abort"] = "Keep"
    pause_timeout_seconds: Seconds = 30.0

    @property
    def relays(self) -> bool:
        """Whether a staged arena is offered to peers."""
        return self.relay if self.relay is not None else self.commit == "Copy" and self.staging == "Full"


class Rollout(Part):
    """What `spec.rollout` tells a pod. With Manual the framework drives; else only the operator's orders stage and commit."""

    policy: Literal["Latest", "Pinned", "Manual"] = "Latest"
    progress_deadline_seconds: Seconds = 600.0

    @property
    def managed(self) -> bool:
        return self.policy != "Manual"


class Versions(Part):
    """`spec.versions`, as far as pods wait for something."""

    publish_deadline_seconds: Seconds = 150.0
    lease_seconds: Annotated[float, Field(ge=15)] = 30.0
    drain_seconds: Annotated[float, Field(ge=0)] = 60.0


class Verification(Part):
    """`spec.verification`: what happens after an install."""

    installed: Literal["Async", "Blocking", "Off"] = "Async"


class TransportSettings(Part):
    """`spec.transport`; `chunk_bytes` is what one read moves."""

    kind: Literal["NIXL"] = "NIXL"
    backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    devices: tuple[str, ...] = ()
    rails: Annotated[int, Field(ge=1)] | None = None
    tls: tuple[str, ...] = ()
    chunk_bytes: Annotated[int, Field(ge=1 << 20, multiple_of=1 << 20)] = 64 << 20


class Mounted(Part):
    """`catalog` is `host:port`; its certificate is checked against `ca_file`. Worker processes of a pod listen on `worker_port` + local rank."""

    group: Group
    model: Model
    catalog: Annotated[str, Field(pattern=r"^[^\s:/]+:\d{1,5}$")]
    trainer: Trainer = Trainer()
    engine: Engine = Engine()
    rollout: Rollout = Rollout()
    versions: Versions = Versions()
    verification: Verification = Verification()
    transport: TransportSettings = TransportSettings()
    worker_port: Port = names.WORKER_PORT
    metrics_port: Port = names.METRICS_PORT
    ca_file: str = names.CA_FILE
    token_file: str = names.TOKEN_FILE

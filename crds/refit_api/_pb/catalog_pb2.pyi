from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_TRAINER: _ClassVar[Role]
    ROLE_GENERATOR: _ClassVar[Role]

class VersionPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_PHASE_UNSPECIFIED: _ClassVar[VersionPhase]
    VERSION_PHASE_PUBLISHING: _ClassVar[VersionPhase]
    VERSION_PHASE_READY: _ClassVar[VersionPhase]
    VERSION_PHASE_RELEASING: _ClassVar[VersionPhase]
    VERSION_PHASE_RELEASED: _ClassVar[VersionPhase]
    VERSION_PHASE_FAILED: _ClassVar[VersionPhase]

class RankPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_PHASE_UNSPECIFIED: _ClassVar[RankPhase]
    RANK_PHASE_IDLE: _ClassVar[RankPhase]
    RANK_PHASE_STAGING: _ClassVar[RankPhase]
    RANK_PHASE_STAGED: _ClassVar[RankPhase]
    RANK_PHASE_PREPARED: _ClassVar[RankPhase]
    RANK_PHASE_COMMITTING: _ClassVar[RankPhase]
    RANK_PHASE_SERVING: _ClassVar[RankPhase]
    RANK_PHASE_FENCED: _ClassVar[RankPhase]

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_UNSPECIFIED: _ClassVar[Order]
    ORDER_STAGE: _ClassVar[Order]
    ORDER_COMMIT: _ClassVar[Order]
    ORDER_ABORT: _ClassVar[Order]
ROLE_UNSPECIFIED: Role
ROLE_TRAINER: Role
ROLE_GENERATOR: Role
VERSION_PHASE_UNSPECIFIED: VersionPhase
VERSION_PHASE_PUBLISHING: VersionPhase
VERSION_PHASE_READY: VersionPhase
VERSION_PHASE_RELEASING: VersionPhase
VERSION_PHASE_RELEASED: VersionPhase
VERSION_PHASE_FAILED: VersionPhase
RANK_PHASE_UNSPECIFIED: RankPhase
RANK_PHASE_IDLE: RankPhase
RANK_PHASE_STAGING: RankPhase
RANK_PHASE_STAGED: RankPhase
RANK_PHASE_PREPARED: RankPhase
RANK_PHASE_COMMITTING: RankPhase
RANK_PHASE_SERVING: RankPhase
RANK_PHASE_FENCED: RankPhase
ORDER_UNSPECIFIED: Order
ORDER_STAGE: Order
ORDER_COMMIT: Order
ORDER_ABORT: Order

class ErrorDetail(_message.Message):
    __slots__ = ("type", "message", "retry_after", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    retry_after: float
    facts: _containers.ScalarMap[str, str]
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., retry_after: _Optional[float] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GroupRef(_message.Message):
    __slots__ = ("namespace", "name")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("pod_uid", "role", "rank", "incarnation", "instance")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    role: Role
    rank: int
    incarnation: str
    instance: str
    def __init__(self, pod_uid: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., rank: _Optional[int] = ..., incarnation: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("host", "port", "certificate")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    certificate: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., certificate: _Optional[str] = ...) -> None: ...

class RegisterWorker(_message.Message):
    __slots__ = ("protocol", "group", "worker", "world", "layout", "endpoint", "coordinate", "run_id", "model", "arena_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    group: GroupRef
    worker: WorkerRef
    world: int
    layout: str
    endpoint: Endpoint
    coordinate: str
    run_id: str
    model: str
    arena_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., world: _Optional[int] = ..., layout: _Optional[str] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., coordinate: _Optional[str] = ..., run_id: _Optional[str] = ..., model: _Optional[str] = ..., arena_bytes: _Optional[int] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("catalog_epoch", "group_uid", "group_key", "lease_seconds", "want_layout")
    CATALOG_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_UID_FIELD_NUMBER: _ClassVar[int]
    GROUP_KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WANT_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    catalog_epoch: int
    group_uid: str
    group_key: bytes
    lease_seconds: float
    want_layout: bool
    def __init__(self, catalog_epoch: _Optional[int] = ..., group_uid: _Optional[str] = ..., group_key: _Optional[bytes] = ..., lease_seconds: _Optional[float] = ..., want_layout: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("group", "worker")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("catalog_epoch", "known")
    CATALOG_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    catalog_epoch: int
    known: bool
    def __init__(self, catalog_epoch: _Optional[int] = ..., known: bool = ...) -> None: ...

class Deregister(_message.Message):
    __slots__ = ("group", "worker")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("group", "hash", "data")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    hash: str
    data: bytes
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., hash: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetLayout(_message.Message):
    __slots__ = ("group", "hash")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    hash: str
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., hash: _Optional[str] = ...) -> None: ...

class Select(_message.Message):
    __slots__ = ("params", "layers", "layer_groups")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    params: _containers.RepeatedScalarFieldContainer[str]
    layers: _containers.RepeatedScalarFieldContainer[int]
    layer_groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, params: _Optional[_Iterable[str]] = ..., layers: _Optional[_Iterable[int]] = ..., layer_groups: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateVersion(_message.Message):
    __slots__ = ("group", "worker", "key", "run_id", "step", "plan_key", "slots", "base", "select")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_KEY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SELECT_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    key: str
    run_id: str
    step: int
    plan_key: str
    slots: _containers.RepeatedScalarFieldContainer[str]
    base: int
    select: Select
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., key: _Optional[str] = ..., run_id: _Optional[str] = ..., step: _Optional[int] = ..., plan_key: _Optional[str] = ..., slots: _Optional[_Iterable[str]] = ..., base: _Optional[int] = ..., select: _Optional[_Union[Select, _Mapping]] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("number", "key", "run_id", "step", "plan_key", "slots", "phase", "root", "bytes", "reason", "base", "select")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_KEY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SELECT_FIELD_NUMBER: _ClassVar[int]
    number: int
    key: str
    run_id: str
    step: int
    plan_key: str
    slots: _containers.RepeatedScalarFieldContainer[str]
    phase: VersionPhase
    root: bytes
    bytes: int
    reason: str
    base: int
    select: Select
    def __init__(self, number: _Optional[int] = ..., key: _Optional[str] = ..., run_id: _Optional[str] = ..., step: _Optional[int] = ..., plan_key: _Optional[str] = ..., slots: _Optional[_Iterable[str]] = ..., phase: _Optional[_Union[VersionPhase, str]] = ..., root: _Optional[bytes] = ..., bytes: _Optional[int] = ..., reason: _Optional[str] = ..., base: _Optional[int] = ..., select: _Optional[_Union[Select, _Mapping]] = ...) -> None: ...

class Created(_message.Message):
    __slots__ = ("plan_key", "version", "skipped")
    PLAN_KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    plan_key: str
    version: Version
    skipped: bool
    def __init__(self, plan_key: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., skipped: bool = ...) -> None: ...

class GetVersion(_message.Message):
    __slots__ = ("group", "number", "runs", "wait_seconds")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    number: int
    runs: _containers.RepeatedScalarFieldContainer[int]
    wait_seconds: float
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., number: _Optional[int] = ..., runs: _Optional[_Iterable[int]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class VersionFacts(_message.Message):
    __slots__ = ("version", "run_roots", "generators", "serving")
    class RunRootsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ROOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATORS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    version: Version
    run_roots: _containers.ScalarMap[int, bytes]
    generators: int
    serving: int
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., run_roots: _Optional[_Mapping[int, bytes]] = ..., generators: _Optional[int] = ..., serving: _Optional[int] = ...) -> None: ...

class ListVersions(_message.Message):
    __slots__ = ("group", "after")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    after: int
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., after: _Optional[int] = ...) -> None: ...

class Versions(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...

class EndVersion(_message.Message):
    __slots__ = ("group", "number", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    number: int
    reason: str
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class OpenShard(_message.Message):
    __slots__ = ("group", "worker", "number", "slot", "bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    number: int
    slot: str
    bytes: int
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., number: _Optional[int] = ..., slot: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class SealShard(_message.Message):
    __slots__ = ("group", "worker", "number", "slot", "bytes", "plan_key", "run_roots")
    class RunRootsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_ROOTS_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    number: int
    slot: str
    bytes: int
    plan_key: str
    run_roots: _containers.ScalarMap[int, bytes]
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., number: _Optional[int] = ..., slot: _Optional[str] = ..., bytes: _Optional[int] = ..., plan_key: _Optional[str] = ..., run_roots: _Optional[_Mapping[int, bytes]] = ...) -> None: ...

class ListShards(_message.Message):
    __slots__ = ("group", "number", "slots", "class_hash", "coordinate")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CLASS_HASH_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    number: int
    slots: _containers.RepeatedScalarFieldContainer[str]
    class_hash: str
    coordinate: str
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., number: _Optional[int] = ..., slots: _Optional[_Iterable[str]] = ..., class_hash: _Optional[str] = ..., coordinate: _Optional[str] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker", "endpoint", "slots", "coordinate", "complete", "closed")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    endpoint: Endpoint
    slots: _containers.RepeatedScalarFieldContainer[str]
    coordinate: str
    complete: bool
    closed: bool
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., slots: _Optional[_Iterable[str]] = ..., coordinate: _Optional[str] = ..., complete: bool = ..., closed: bool = ...) -> None: ...

class Sources(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class CloseHolder(_message.Message):
    __slots__ = ("group", "worker", "number", "wait_seconds", "leaving")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    number: int
    wait_seconds: float
    leaving: bool
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., number: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., leaving: bool = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("readers",)
    READERS_FIELD_NUMBER: _ClassVar[int]
    readers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, readers: _Optional[_Iterable[str]] = ...) -> None: ...

class AcquireLease(_message.Message):
    __slots__ = ("group", "worker", "number", "holders")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    number: int
    holders: _containers.RepeatedCompositeFieldContainer[WorkerRef]
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., number: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[WorkerRef, _Mapping]]] = ...) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ("group", "worker", "number")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    number: int
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class Leased(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class ReleaseLease(_message.Message):
    __slots__ = ("group", "worker", "number")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    number: int
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class WatchAssignment(_message.Message):
    __slots__ = ("group", "worker")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class CoordinateSources(_message.Message):
    __slots__ = ("coordinate", "relays")
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    coordinate: str
    relays: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, coordinate: _Optional[str] = ..., relays: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("catalog_epoch", "seq", "target", "order", "sources", "deadline_seconds")
    CATALOG_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    catalog_epoch: int
    seq: int
    target: int
    order: Order
    sources: _containers.RepeatedCompositeFieldContainer[CoordinateSources]
    deadline_seconds: float
    def __init__(self, catalog_epoch: _Optional[int] = ..., seq: _Optional[int] = ..., target: _Optional[int] = ..., order: _Optional[_Union[Order, str]] = ..., sources: _Optional[_Iterable[_Union[CoordinateSources, _Mapping]]] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("stage", "start", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    start: float
    seconds: float
    def __init__(self, stage: _Optional[str] = ..., start: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReadFrom(_message.Message):
    __slots__ = ("pod_uid", "role", "bytes")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    role: Role
    bytes: int
    def __init__(self, pod_uid: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., bytes: _Optional[int] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("worker", "coordinate", "phase", "serving", "serving_root", "arena", "arena_complete", "plan_key", "staging", "verified", "bytes", "reads", "timings", "error", "arena_root", "kept")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    SERVING_ROOT_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    ARENA_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PLAN_KEY_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ARENA_ROOT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    coordinate: str
    phase: RankPhase
    serving: int
    serving_root: bytes
    arena: int
    arena_complete: bool
    plan_key: str
    staging: int
    verified: int
    bytes: int
    reads: _containers.RepeatedCompositeFieldContainer[ReadFrom]
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    error: ErrorDetail
    arena_root: bytes
    kept: int
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., coordinate: _Optional[str] = ..., phase: _Optional[_Union[RankPhase, str]] = ..., serving: _Optional[int] = ..., serving_root: _Optional[bytes] = ..., arena: _Optional[int] = ..., arena_complete: bool = ..., plan_key: _Optional[str] = ..., staging: _Optional[int] = ..., verified: _Optional[int] = ..., bytes: _Optional[int] = ..., reads: _Optional[_Iterable[_Union[ReadFrom, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., arena_root: _Optional[bytes] = ..., kept: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("group", "worker", "catalog_epoch", "seq", "ranks", "fenced", "error", "leaving")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CATALOG_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    group: GroupRef
    worker: WorkerRef
    catalog_epoch: int
    seq: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankReport]
    fenced: bool
    error: ErrorDetail
    leaving: bool
    def __init__(self, group: _Optional[_Union[GroupRef, _Mapping]] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., catalog_epoch: _Optional[int] = ..., seq: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ..., fenced: bool = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., leaving: bool = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetManifest(_message.Message):
    __slots__ = ("number", "worker", "holder", "mac")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker: WorkerRef
    holder: WorkerRef
    mac: bytes
    def __init__(self, number: _Optional[int] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., holder: _Optional[_Union[WorkerRef, _Mapping]] = ..., mac: _Optional[bytes] = ...) -> None: ...

class ManifestRun(_message.Message):
    __slots__ = ("index", "offset", "bytes", "digests", "pieces")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    bytes: int
    digests: bytes
    pieces: bytes
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., digests: _Optional[bytes] = ..., pieces: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("holder", "number", "plan_key", "agent", "metadata", "base", "device", "memory", "runs")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLAN_KEY_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    holder: WorkerRef
    number: int
    plan_key: str
    agent: str
    metadata: bytes
    base: int
    device: int
    memory: str
    runs: _containers.RepeatedCompositeFieldContainer[ManifestRun]
    def __init__(self, holder: _Optional[_Union[WorkerRef, _Mapping]] = ..., number: _Optional[int] = ..., plan_key: _Optional[str] = ..., agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., base: _Optional[int] = ..., device: _Optional[int] = ..., memory: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[ManifestRun, _Mapping]]] = ...) -> None: ...

"""Every name that Kubernetes, people and pods see: one place, one spelling."""

from __future__ import annotations

from enum import Enum

GROUP = "refit.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
AUDIENCE = "refit.dev"  # of the projected tokens

LABEL_GROUP = f"{GROUP}/group"  # the RefitGroup's name, on every child and pod
LABEL_ROLE = f"{GROUP}/role"  # trainer | generator
LABEL_TEMPLATE = f"{GROUP}/template-hash"
ROLE_TRAINER = "trainer"
ROLE_GENERATOR = "generator"
READINESS_GATE = f"{GROUP}/synced"
FINALIZER = f"{GROUP}/lease-drain"
FIELD_MANAGER = "refit-operator"
POD_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

CATALOG_PORT = 7450
WORKER_PORT = 7451  # manifests, served by trainer ranks and relays: port + local rank
METRICS_PORT = 7452

PRESTOP_PATH = "/refit/prestop"  # GET on the agent's port, by the kubelet: closes what the pod offers, answers when its readers are gone or after drainSeconds
VERSION_PATH = "/refit/version"  # GET on the agent's port: the version served
STATUS_PATH = "/refit/status"  # GET on the agent's port: the view of the agent, rank by rank
VERSION_HEADER = "x-refit-version"  # of every answer of a generator: the versions that made it
SPANS_HEADER = "x-refit-spans"  # of an answer with tokens: which version made which of them

SETTINGS_DIR = "/etc/refit"
SETTINGS_FILE = f"{SETTINGS_DIR}/settings.json"
CA_FILE = f"{SETTINGS_DIR}/ca.crt"
TOKEN_FILE = "/var/run/secrets/refit.dev/token"


def weight_version_name(group: str, version: int) -> str:
    """`<group>-v<9 digits>`: deterministic, so that a retried create is idempotent."""
    return f"{group}-v{version:09d}"


class Word(str, Enum):
    """A documented word: a string whose `meaning` is what people read in the reference."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Word:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    __str__ = str.__str__


class Condition(Word):
    """Condition types of both kinds, with what `True` means. Abnormal ones are `True` when something is wrong."""

    READY = "Ready", "RefitGroup: at least minAvailable generators serve an allowed version. WeightVersion: every slot is sealed, it may be pulled."
    RECONCILING = "Reconciling", "Pods are being created, replaced or removed for a new generation."
    STALLED = "Stalled", "Nothing more happens until a person acts; the message says what to do."
    DEGRADED = "Degraded", "The group serves, but some generators failed, are fenced, or lag beyond maxLag."
    WEIGHTS_CURRENT = "WeightsCurrent", "Every generator serves targetVersion. It turns with every version, so it is no part of Ready."
    SUSPENDED = "Suspended", "spec.suspend is in effect: the group runs no pods."
    TEMPLATE_VALID = "TemplateValid", "The API server accepted pods made from the group's templates in a dry run."
    AVAILABLE = "Available", "Somebody holds the whole version, so it can be pulled."
    CONVERGED = "Converged", "Every generator that was sent to the version serves it, or served it before a newer one."
    REJECTED = "Rejected", "The version was taken back; policy Latest never selects it again."


class Reason(Word):
    """Why a condition is what it is; events carry the same words. Stable: alerts match on them.

    A typed error that a pod reported appears under its own name (`errors.BY_NAME`), as in `EngineTooOld`.
    """

    # all is well
    ENOUGH_GENERATORS = "EnoughGenerators", "At least minAvailable generators serve an allowed version."
    SETTLED = "Settled", "Pods and objects are as the spec wants them."
    ALL_AT_TARGET = "AllAtTarget", "Every generator serves the target version."
    NOTHING_WRONG = "NothingWrong", "No failed, fenced or lagging generator; nothing waits for a person."
    NOT_SUSPENDED = "NotSuspended", "spec.suspend is false."
    DRY_RUN_PASSED = "DryRunPassed", "The API server accepted the templates."
    ALL_SLOTS_SEALED = "AllSlotsSealed", "Every slot of the version is sealed and its replicas agree."
    HOLDERS_PRESENT = "HoldersPresent", "At least one complete set of holders offers the version."
    ALL_INSTALLED = "AllInstalled", "Every generator that was sent to the version installed it."
    NOT_REJECTED = "NotRejected", "Nobody took the version back."

    # work in progress
    CREATING_PODS = "CreatingPods", "Pods of the group are not there or not running yet."
    REPLACING_PODS = "ReplacingPods", "A template or restart.id changed, or a pod was lost: pods are being replaced."
    SCALING = "Scaling", "Generators are being added or removed."
    WAITING_FOR_TRAINERS = "WaitingForTrainers", "Not every trainer rank has registered yet."
    WAITING_FOR_GENERATORS = "WaitingForGenerators", "No complete engine class has registered yet, so nothing can be planned."
    WAITING_FOR_PUBLISH = "WaitingForPublish", "No usable version yet, or a new engine class needs the next one: the trainer must publish."
    ROLLING_OUT = "RollingOut", "Generators are staging or committing the target version."
    FRAMEWORK_DRIVEN = "FrameworkDriven", "rollout.policy Manual: the framework decides when generators take the newest version."
    PAUSED = "Paused", "rollout.paused: new versions are recorded, generators stay where they are."
    CATALOG_REBUILDING = "CatalogRebuilding", "The catalog lost its memory; workers are registering again, nothing is decided from absence."
    SUSPEND_REQUESTED = "SuspendRequested", "spec.suspend is true."
    SLOTS_MISSING = "SlotsMissing", "Not every trainer rank has sealed its shards yet."
    INSTALLING = "Installing", "Some generators have not installed the version yet."
    DRAINING = "Draining", "The version takes no new leases; its readers finish."
    SUPERSEDED = "Superseded", "A newer version became the target before all generators had this one."

    # a person must act
    NOT_IMPLEMENTED = "NotImplemented", "The spec sets a field to a value that this release does not carry out; the message lists each with what is allowed."
    INVALID_SPEC = "InvalidSpec", "The spec contradicts itself or the cluster in a way that the schema cannot see."
    INVALID_TEMPLATE = "InvalidTemplate", "The API server refused a pod made from a template; its answer is in the message."
    TRAINER_SELECTOR_MATCHES_NOTHING = "TrainerSelectorMatchesNothing", "trainer.selector matches no pod. *Not yet.*"
    LWS_NOT_INSTALLED = "LWSNotInstalled", "groupSize is above 1 and the cluster has no LeaderWorkerSet API. *Not yet.*"
    NAME_TAKEN = "NameTaken", "A child object's name belongs to an object that the group does not own."
    PODS_REFUSED = "PodsRefused", "The API server refuses the group's pods: quota, admission policy or Pod Security."
    VERSION_NOT_FOUND = "VersionNotFound", "The pinned version has no holder; the message lists the versions that have."
    IMPOSSIBLE_REFIT = "ImpossibleRefit", "Trainer and engine layouts do not fit; the message names tensor, seen and expected."
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded", "No generator made progress for progressDeadlineSeconds."
    DRAIN_DEADLINE_EXCEEDED = "DrainDeadlineExceeded", "Leases outlived drainSeconds + leaseSeconds; the version was released without them."

    # something failed, and is being dealt with
    GENERATORS_FAILED = "GeneratorsFailed", "Generators could not stage or install the target; status.stragglers names them."
    GENERATORS_FENCED = "GeneratorsFenced", "Generators refuse requests until a full install succeeds."
    GENERATORS_LAGGING = "GeneratorsLagging", "Generators serve a version more than maxLag behind the target."
    TRAINERS_FAILING = "TrainersFailing", "Trainer pods fail or restart."

    # why a version ended or cannot be used
    PUBLISH_DEADLINE_EXCEEDED = "PublishDeadlineExceeded", "Not every slot was sealed within publishDeadlineSeconds."
    ABORTED = "Aborted", "Aborted by spec.abort, by deletion or by a client."
    RUN_REPLACED = "RunReplaced", "The trainer started again: unfinished versions of its earlier run cannot be completed."
    HOLDERS_LOST = "HoldersLost", "The last holder is gone, and nobody staged or serves the version."
    NO_HOLDER = "NoHolder", "Nobody holds the whole version any more, but it is leased, staged or served somewhere."
    RETIRED = "Retired", "Beyond versions.retain, or retired by a client or by deletion."
    ROLLED_BACK = "RolledBack", "rollout.onFailure: Rollback took it back."

"""The status of both kinds: what the operator, its only writer, saw when it last looked. About 3 KB for a RefitGroup: counters rather than lists.

Invariants:
- Nothing is added up over time: every counter is counted anew from what is there.
- No time that moves by itself; written only when something differs.
- Unknown fields are ignored, and no field is required: the writer may be newer or older than the reader.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from refit_api.dialect import ByType, Int32, Int64, Items, Observed, Time

Count = Annotated[Int32, Field(ge=0)]
Number = Annotated[Int64, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(max_length=253)]


class ConditionStatus(Observed):
    """One condition, as in metav1.Condition."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Which condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Number | None = None
    """The generation that it was computed from."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in one stable word; see the list of reasons."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Why, for people, and what to do."""


Conditions = Annotated[ByType[ConditionStatus], Field(max_length=16)]


class GeneratorsStatus(Observed):
    """Generators, counted."""

    replicas: Count = 0
    """Generators that exist and are not being deleted."""
    ready: Count = 0
    """Generators that serve an allowed version."""
    staged: Count = 0
    """Generators that have staged the target and do not serve it yet."""
    at_target: Count = 0
    """Generators that serve the target."""
    lagging: Count = 0
    """Generators more than maxLag behind the target."""
    failed: Count = 0
    """Generators whose last stage or install of the target failed."""
    fenced: Count = 0
    """Generators that refuse requests until a full install succeeds."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the generator pods, for the scale subresource."""
    arena_bytes: Number | None = None
    """Bytes of the largest arena that an engine rank of the group needs beside its live weights."""
    reloaded_modules: Annotated[Items[Text], Field(max_length=16)] = ()
    """Modules that the engine reloads as a whole at each install, because their live layout cannot be written in place; the first 16."""


class TrainerStatus(Observed):
    """Trainer pods and ranks, counted."""

    replicas: Count = 0
    """Trainer pods that exist and are not being deleted."""
    ready: Count = 0
    """Trainer pods whose ranks are all registered."""
    world_size: Count | None = None
    """Trainer ranks, as they say themselves."""


class FanoutStatus(Observed):
    """The shape in use."""

    topology: Literal["Direct", "Chain", "Tree"] | None = None
    """The shape of the last rollout."""
    depth: Count = 0
    """Hops from a trainer to the farthest generator."""
    sources: Count = 0
    """Trainer ranks and generators that others read from."""


class LastRefitStatus(Observed):
    """Numbers of the newest version that all its generators have installed."""

    version: Number
    """The version."""
    bytes: Number = 0
    """Bytes that one generator pulled."""
    wire_seconds: Seconds = 0
    """Median time of a pull, over the generators."""
    stall_seconds_p50: Seconds = 0
    """Median time from pausing an engine to resuming it."""
    stall_seconds_max: Seconds = 0
    """Longest time from pausing an engine to resuming it."""
    publish_to_serving_seconds: Seconds = 0
    """From the first rank's publish until the last generator served it."""


class Straggler(Observed):
    """A generator that failed or lags."""

    pod: Text
    """Name of the pod."""
    version: Number | None = None
    """The version that it serves; absent: none."""
    reason: Annotated[str, Field(max_length=64)]
    """Why, in one word; see the list of reasons."""


class RefitGroupStatus(Observed):
    """What the operator sees."""

    observed_generation: Number | None = None
    """The generation of the spec that this status was computed from."""
    conditions: Conditions = ()
    """What holds and what does not. `Ready`: enough generators serve an allowed version. `WeightsCurrent`: all serve the target; turns with every version."""
    phase: Literal["Pending", "Reconciling", "Ready", "Degraded", "Stalled", "Suspended"] | None = None
    """One word for people and tables; programs read the conditions."""
    target_version: Number | None = None
    """The version that generators are sent to."""
    ordered_version: Number | None = None
    """With barrier Fleet: the last version whose barrier passed; it is completed, never aborted."""
    current_version: Number | None = None
    """The newest version that at least minAvailable generators serve."""
    previous_version: Number | None = None
    """The current version before this one."""
    catalog_epoch: Number | None = None
    """Raised each time the catalog lost its memory or its leader; older orders are refused."""
    version_ceiling: Number | None = None
    """Highest version number handed out in advance; after lost memory the next version is above it."""
    generators: GeneratorsStatus | None = None
    """Generators, counted."""
    trainer: TrainerStatus | None = None
    """Trainer pods and ranks, counted."""
    fanout: FanoutStatus | None = None
    """The shape in use."""
    last_refit: LastRefitStatus | None = None
    """Numbers of the newest version that all its generators have installed."""
    stragglers: Annotated[Items[Straggler], Field(max_length=16)] = ()
    """Generators that failed or lag, the worst 16; the counters count all."""
    template_hash: Annotated[str, Field(max_length=64)] | None = None
    """Hash of everything that makes pods differ, replicas excepted: a change replaces pods."""


class ShardsStatus(Observed):
    """Shards, counted."""

    expected: Count = 0
    """Shards that make the version complete."""
    sealed: Count = 0
    """Shards that are sealed."""
    bytes: Number = 0
    """Bytes of the sealed shards, replicas included."""


class LeasesStatus(Observed):
    """Readers."""

    active: Count = 0
    """Generators that hold a lease on the version."""
    drain_deadline: Time | None = None
    """When the last lease ends at the latest, once the version takes no new ones."""


class HoldersStatus(Observed):
    """Who holds their whole part of the version."""

    trainers: Count = 0
    """Trainer ranks, host copies included."""
    generators: Count = 0
    """Generator ranks."""
    total: Count = 0
    """Both, because a column of `kubectl get` cannot add."""

    @model_validator(mode="before")
    @classmethod
    def _added(cls, given: dict[str, int]) -> dict[str, int]:
        return {**given, "total": given.get("trainers", 0) + given.get("generators", 0)}


class AdoptionStatus(Observed):
    """How far the version came."""

    desired: Count = 0
    """Generators that were sent to the version."""
    staged: Count = 0
    """Generators that have staged it and do not serve it yet."""
    installed: Count = 0
    """Generators that serve it."""
    failed: Count = 0
    """Generators whose last stage or install of it failed."""


class WeightVersionStatus(Observed):
    """What the operator sees."""

    observed_generation: Number | None = None
    """The generation of the spec that this status was computed from."""
    phase: Literal["Publishing", "Ready", "Releasing", "Released", "Failed"] | None = None
    """`Publishing`: slots are being sealed. `Ready`: it may be pulled. `Releasing`: no new readers. `Released`: nobody reads it. `Failed`: it never became
    usable, or its last holder is gone."""
    shards: ShardsStatus | None = None
    """Shards, counted."""
    digest: Annotated[str, Field(max_length=128)] | None = None
    """Merkle root over all tensors, fixed for the version's life."""
    leases: LeasesStatus | None = None
    """Readers."""
    holders: HoldersStatus | None = None
    """Who holds their whole part of the version."""
    adoption: AdoptionStatus | None = None
    """How far the version came."""
    pinned_by: Annotated[Items[Annotated[str, Field(max_length=63)]], Field(max_length=8)] = ()
    """What keeps the version beyond retention: target, current, previous, pinned, hold."""
    ready_at: Time | None = None
    """When the last slot was sealed."""
    converged_at: Time | None = None
    """When the last generator that was sent to the version served it."""
    conditions: Conditions = ()
    """What holds and what does not."""

"""The two kinds of `refit.dev/v1alpha1`: `RefitGroup` and `WeightVersion`. Import them, and their specs and statuses, from here.

These models are the source of `crds/*.yaml` and of the reference manual (`crd.py`).

Invariants:
- Everything that one object shows is checked by the API server; what needs a look at other objects ends in a `Stalled` condition.
- Defaults are the schema's: the operator never writes a spec.
- Additive only: a served version never changes the type of a field.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from refit_api.dialect import Column, Int32, Int64, Items, Part, Resource, Rule, immutable, rules
from refit_api.document import JsonObject
from refit_api.spec import RefitGroupSpec, Version, Word
from refit_api.status import RefitGroupStatus, WeightVersionStatus

__all__ = ["KINDS", "ApiObject", "RefitGroup", "RefitGroupSpec", "RefitGroupStatus", "WeightVersion", "WeightVersionSpec", "WeightVersionStatus"]


class Select(Part):
    """Which tensors a subset replaces. A tensor is selected by any of the three."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "has(self.params) || has(self.layers) || has(self.layerGroups)",
                "select must name something: set params, layers or layerGroups",
                field=".params",
                reason="FieldValueRequired",
            )
        )
    )

    params: Annotated[Items[Annotated[str, Field(min_length=1, max_length=512)]], Field(min_length=1, max_length=4096)] | None = None
    """Tensors by their checkpoint names."""
    layers: Annotated[Items[Annotated[Int32, Field(ge=0, le=100_000)]], Field(min_length=1, max_length=4096)] | None = None
    """Layers by number: tensors whose name has `.layers.<n>.` in it."""
    layer_groups: Annotated[Items[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=256)] | None = None
    """Tensors whose name contains one of these texts."""


class GroupRef(Part):
    """The RefitGroup that a version belongs to."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """Name of the RefitGroup, in the same namespace."""


_FIXED = ("groupRef", "version", "trainerStep", "trainerRunId", "format", "baseVersion", "select", "expectedSlots", "planKey", "idempotencyKey")


class WeightVersionSpec(Part):
    """What was published. Written once by the operator; people change `hold` and `abort` only."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(immutable(field, f"{field} is immutable: a version is what was published; only hold and abort may change") for field in _FIXED),
            Rule(
                "(self.format == 'Subset') == has(self.baseVersion) && (self.format == 'Subset') == has(self.select)",
                "baseVersion and select belong to format Subset: set both with Subset, and none with FullTensor",
                field=".format",
            ),
            Rule(
                "!has(self.baseVersion) || self.baseVersion < self.version",
                "baseVersion must be an earlier version than version",
                field=".baseVersion",
            ),
        )
    )

    group_ref: GroupRef
    """The RefitGroup that the version belongs to, in the same namespace. Immutable."""
    version: Version
    """Number of the version: grows within its group and is never used twice; gaps are normal. Immutable."""
    trainer_step: Annotated[Int64, Field(ge=0)]
    """The optimiser step whose weights these are. Immutable."""
    trainer_run_id: Word
    """The training run that published it, with its restart count: a step trained again is another version. Immutable."""
    format: Literal["FullTensor", "Subset"] = "FullTensor"
    """`FullTensor`: every tensor was published. `Subset`: the version is `baseVersion` with the selected tensors replaced. Immutable."""
    base_version: Version | None = None
    """With format Subset: the version that supplies the other tensors. Immutable."""
    select: Select | None = None
    """With format Subset: which tensors were published. Immutable."""
    expected_slots: Annotated[Int32, Field(ge=1, le=1_000_000)]
    """Slots, one for each tuple of trainer ranks that own the same bytes; the version is Ready when all are sealed. Immutable."""
    plan_key: Annotated[str, Field(min_length=1, max_length=128)]
    """Hash of the layouts, the engine classes and the redundancy that the version was planned with. Immutable."""
    idempotency_key: Annotated[str, Field(min_length=1, max_length=256)]
    """`<run id>:<step>`: all ranks of one publish give the same, and get the same version. Immutable."""
    hold: bool = False
    """True: retention spares the version. Holds the record and asks holders to keep the bytes; it cannot bring back bytes that nobody has."""
    abort: bool = False
    """True: the version is given up. While it is being published it becomes Failed; later it is retired, unless generators are sent to it or serve it."""


class ApiObject(Part):
    """What both kinds share. `metadata` stays as the API server sent it."""

    api_version: Literal["refit.dev/v1alpha1"] = "refit.dev/v1alpha1"
    metadata: JsonObject

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace", ""))

    @property
    def uid(self) -> str:
        return str(self.metadata.get("uid", ""))


class RefitGroup(ApiObject):
    """One trainer, its generators, and the way new weights take from one to the others."""

    resource: ClassVar[Resource] = Resource(
        kind="RefitGroup",
        plural="refitgroups",
        singular="refitgroup",
        short_names=("rfg",),
        categories=("all", "refit"),
        columns=(
            Column("MODEL", ".spec.model.name", description="The model that trainer and engines share."),
            Column("POLICY", ".spec.rollout.policy", description="Which version generators go to."),
            Column("TARGET", ".status.targetVersion", "integer", description="The version that generators are sent to."),
            Column("CURRENT", ".status.currentVersion", "integer", description="The newest version that at least minAvailable generators serve."),
            Column("GENERATORS", ".status.generators.replicas", "integer", description="Generators that exist."),
            Column("READY", '.status.conditions[?(@.type=="Ready")].status', description="Whether enough generators serve an allowed version."),
            Column("AGE", ".metadata.creationTimestamp", "date", description="Time since the group was created."),
            Column("READY-GENS", ".status.generators.ready", "integer", wide=True, description="Generators that serve an allowed version."),
            Column("AT-TARGET", ".status.generators.atTarget", "integer", wide=True, description="Generators that serve the target."),
            Column("LAGGING", ".status.generators.lagging", "integer", wide=True, description="Generators more than maxLag behind the target."),
            Column("STALL", ".status.lastRefit.stallSecondsMax", "number", wide=True, description="Longest pause of an engine at the last refit, in seconds."),
            Column("DEPTH", ".status.fanout.depth", "integer", wide=True, description="Hops from a trainer to the farthest generator."),
            Column("REASON", '.status.conditions[?(@.type=="Ready")].reason', wide=True, description="Why the group is Ready, or not."),
        ),
        scale={
            "specReplicasPath": ".spec.generators.replicas",
            "statusReplicasPath": ".status.generators.replicas",
            "labelSelectorPath": ".status.generators.selector",
        },
    )
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "size(self.metadata.name) <= 40",
                "metadata.name must have at most 40 characters, because names of pods and versions are made from it",
                binds="new objects",
            ),
            Rule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must start with a letter and have lower-case letters, digits and '-' only, because a Service is named after it",
                binds="new objects",
            ),
        )
    )

    kind: Literal["RefitGroup"] = "RefitGroup"
    spec: RefitGroupSpec
    """Who trains, who generates, how versions roll out."""
    status: RefitGroupStatus = RefitGroupStatus()
    """What the operator sees. Written by the operator only."""


class WeightVersion(ApiObject):
    """An immutable, numbered set of published weights. Created by the operator; deleting one aborts or retires the version."""

    resource: ClassVar[Resource] = Resource(
        kind="WeightVersion",
        plural="weightversions",
        singular="weightversion",
        short_names=("wv",),
        categories=("refit",),
        columns=(
            Column("GROUP", ".spec.groupRef.name", description="The RefitGroup that the version belongs to."),
            Column("VERSION", ".spec.version", "integer", description="Number of the version."),
            Column("STEP", ".spec.trainerStep", "integer", description="The optimiser step whose weights these are."),
            Column("PHASE", ".status.phase", description="Publishing, Ready, Releasing, Released or Failed."),
            Column("INSTALLED", ".status.adoption.installed", "integer", description="Generators that serve the version."),
            Column("LEASES", ".status.leases.active", "integer", description="Generators that hold a lease on it."),
            Column("AGE", ".metadata.creationTimestamp", "date", description="Time since the version was created."),
            Column("SHARDS", ".status.shards.sealed", "integer", wide=True, description="Shards that are sealed."),
            Column("EXPECTED", ".status.shards.expected", "integer", wide=True, description="Shards that make the version complete."),
            Column("HOLDERS", ".status.holders.total", "integer", wide=True, description="Trainer and generator ranks that hold their whole part."),
            Column("BYTES", ".status.shards.bytes", "integer", wide=True, description="Bytes of the sealed shards."),
            Column("DIGEST", ".status.digest", wide=True, description="Merkle root over all tensors."),
            Column("FORMAT", ".spec.format", wide=True, description="FullTensor or Subset."),
        ),
        selectable=(".spec.groupRef.name", ".status.phase"),
    )
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "size(self.metadata.name) == size(self.spec.groupRef.name) + 11 && self.metadata.name.startsWith(self.spec.groupRef.name + '-v') && "
                "int(self.metadata.name.substring(size(self.metadata.name) - 9)) == self.spec.version",
                "metadata.name must be spec.groupRef.name, -v and the nine digits of spec.version",
                binds="new objects",
            ),
        )
    )

    kind: Literal["WeightVersion"] = "WeightVersion"
    spec: WeightVersionSpec
    """What was published. Written once by the operator; people change `hold` and `abort` only."""
    status: WeightVersionStatus = WeightVersionStatus()
    """What the operator sees. Written by the operator only."""


KINDS: tuple[type[RefitGroup] | type[WeightVersion], ...] = (RefitGroup, WeightVersion)

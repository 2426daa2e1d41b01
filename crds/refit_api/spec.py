"""RefitGroup.spec, part by part: who trains, who generates, how versions roll out.

The text under a field is its manual, in the CRD and in the reference: what it means, its unit, what its default does, what follows from changing it.
Rules stand beside the model that they bind; a refusal names the field and says what to do.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from refit_api.dialect import CountOrPercent, Int32, Int64, Items, Opaque, Part, Rule, immutable, rules

Seconds = Annotated[Int32, Field(ge=1, le=86400)]
Name = Annotated[str, Field(min_length=1, max_length=63)]
Word = Annotated[str, Field(min_length=1, max_length=128)]
Version = Annotated[Int64, Field(ge=1, le=999_999_999)]  # nine digits of a WeightVersion's name
LabelValue = Annotated[str, Field(max_length=63)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]


class ModelSpec(Part):
    """The model that trainers and engines must share."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the model, such as `meta-llama/Llama-3.1-8B`. Trainer ranks and engine ranks send theirs when they register; another one is refused.
    Nothing is downloaded by this name. Immutable: another model is another group."""
    revision: Annotated[str, Field(max_length=128)] = ""
    """Revision of the model, such as a commit or a tag of your own, compared in the same way. Empty: not compared further than the name. Immutable."""


class Expression(Part):
    """One condition on a pod label."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "(self.operator == 'In' || self.operator == 'NotIn') == (has(self.values) && size(self.values) > 0)",
                "values must have at least one entry with the operators In and NotIn, and must be left out with Exists and DoesNotExist",
                field=".values",
                binds="always",
            )
        )
    )

    key: LabelKey
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label is compared with `values`."""
    values: Annotated[Items[LabelValue], Field(max_length=16)] | None = None
    """Values to compare with: required with In and NotIn, forbidden with Exists and DoesNotExist."""


class Selector(Part):
    """A label selector; both parts must match."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",
                "an empty selector would adopt every pod of the namespace: set matchLabels or matchExpressions",
                field=".matchLabels",
                reason="FieldValueRequired",
            )
        )
    )

    match_labels: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    """Labels that a pod must carry, with exactly these values."""
    match_expressions: Annotated[Items[Expression], Field(max_length=16)] | None = None
    """Conditions on labels that a pod must fulfil, all of them."""


class TrainerSpec(Part):
    """The workload that makes and publishes weights."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "has(self.template) != has(self.selector)",
                "set exactly one of template (Refit runs the trainer pods) and selector (pods that a TrainJob, JobSet or RayCluster runs)",
                field=".template",
            ),
            Rule(
                "self.snapshot != 'InPlace' || self.arenas == 1",
                "snapshot InPlace publishes the live memory itself and has no arenas: leave arenas at 1, or use snapshot Device or Host",
                field=".arenas",
            ),
        )
    )

    template: Opaque | None = None
    """Pod template of the trainer ranks, as in a StatefulSet. Refit hands it on unread and adds only what the quickstart lists, such as the settings
    and token volumes, `POD_*` variables and a grace period. The API server judges it in a dry run; its answer is the condition TemplateValid.
    A change replaces the trainer pods and ends the run in them."""
    selector: Selector | None = None
    """Adopts trainer pods that something else owns, such as a TrainJob, a JobSet or a RayCluster. Adopted pods are never changed, restarted or deleted;
    their template mounts the ConfigMap `<group>-refit` and a token volume itself."""
    replicas: Annotated[Int32, Field(ge=0, le=4096)] = 1
    """Trainer pods to run from `template`, each with a stable name and network identity. Not read with `selector`.
    A change alters the world size, which is a new layout: the next version is planned anew."""
    redundancy: Annotated[Int32, Field(ge=1, le=8)] = 2
    """How many trainer ranks hold each run of bytes, so that readers continue elsewhere when one dies. Never more per byte than the distinct ranks that own it:
    without data-parallel replicas it is 1 in effect. Higher costs arena memory on every owner: about shard bytes x min(redundancy, replicas) / replicas."""
    snapshot: Literal["Device", "Host", "InPlace"] = "Device"
    """Where a published version lives. `Device`: copied into an arena on the accelerator; training goes on at once; costs one copy of the shards there.
    `Host`: copied into host memory; saves accelerator memory, slower to publish and to read.
    `InPlace`: the live memory itself is read; costs no memory, but training waits until the version is released (`TrainerClient.release`), and what lies
    there must be what is published: tensors that need a cast, or 1 added to a norm, are refused by name."""
    arenas: Annotated[Int32, Field(ge=1, le=3)] = 1
    """Arenas of each trainer rank, used in turn. With 1 a publish waits (or skips, see `onBusy`) while readers still hold the version before;
    with 2 the version before stays readable during the next publish. Each costs its bytes in accelerator or host memory."""
    on_busy: Literal["Wait", "Skip"] = "Wait"
    """What a publish does while the arena that it reuses is still leased; decided once for all ranks. `Wait`: the version in that arena takes no new readers
    and every rank waits for its own leases, at most drainSeconds + leaseSeconds. `Skip`: with any live lease on any rank nothing is published,
    `publish` returns None on every rank, and training goes on."""
    host_copies: Annotated[Int32, Field(ge=0, le=8)] = 0
    """Older versions that each trainer rank keeps in pinned host memory after their arena is reused. They are what a later rollback or pin can reach
    once no generator holds the version. Each costs the rank's shard bytes in host memory."""


class EngineSpec(Part):
    """The inference engine inside a generator, and what a commit does to it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.staging != 'Windowed' || self.commit == 'Copy'",
                "staging Windowed installs layer groups by copies: set commit to Copy, or staging to Full",
                field=".commit",
            ),
            Rule(
                "self.staging != 'Windowed' || !self.keepPrevious",
                "staging Windowed never holds a whole version: set keepPrevious to false, or staging to Full",
                field=".keepPrevious",
            ),
            Rule(
                "self.staging != 'Windowed' || !has(self.relay) || !self.relay",
                "staging Windowed never holds a whole version to relay: leave relay out, or set staging to Full",
                field=".relay",
            ),
        )
    )

    kind: Literal["vLLM", "Custom"] = "vLLM"
    """`vLLM`: the plug-ins of Refit drive a vLLM server (0.32 or newer in managed groups). `Custom`: any process that runs
    `refit_runtime.agent.Agent` over its ranks (`refit_runtime.rank.GeneratorRank`)."""
    commit: Literal["Copy", "Remap"] = "Copy"
    """How verified bytes become live. `Copy`: copied from the arena into the live parameters while the engine is paused; works everywhere.
    `Remap`: a second physical copy in live layout is swapped in behind unchanged addresses (CUDA only); the pause no longer depends on the size,
    for one more copy of the weights in device memory."""
    staging: Literal["Full", "Windowed"] = "Full"
    """`Full`: the whole version is staged beside the live weights while requests run, then committed. `Windowed`: for hosts without room for that: a ring of
    layer groups is pulled and installed group by group under one long pause, at most 8 transport chunks large (512 MiB). Trainers keep the version until then:
    their next publish waits for it. Such a generator relays nothing; a failure after the first group fences it, and `pauseTimeoutSeconds` must suffice for all
    bytes."""
    keep_previous: bool = False
    """True: a second arena keeps the version served before, so that a rollback to it needs no pull. Costs one more copy of the weights in device memory."""
    relay: bool | None = None
    """Whether a generator offers what it staged to other generators. Left out: true with commit Copy, false with Remap and with staging Windowed.
    False leaves every pull to the trainers. True with Remap costs one arena more."""
    kv: Literal["Salt", "Reset", "Keep"] = "Salt"
    """What a commit does to cached keys and values. `Salt`: the version becomes part of the cache key, so entries of older weights are never hit again and
    nothing is flushed. `Reset`: the caches are flushed. `Keep`: old entries are reused with new weights, which mixes versions inside one answer."""
    pause: Literal["Keep", "Wait", "Abort"] = "Keep"
    """What a commit does to running requests. `Keep`: they stand still for the pause and go on with the new weights. `Wait`: they finish first, while new ones
    queue. `Abort`: they end at once and the client sees it."""
    pause_timeout_seconds: Annotated[Int32, Field(ge=1, le=3600)] = 30
    """Seconds. Longest wait for running requests with pause Wait; beyond it the engine resumes on the old version (EngineBusy). Also how long a prepared rank
    waits for its order, how long an install may take (with staging Windowed that is the whole move: weights over the rate of the network, twice to be safe),
    and how long an engine may stay paused without its agent before it is fenced."""

    @property
    def relays(self) -> bool:
        """`relay`, or what it means to leave it out."""
        return self.relay if self.relay is not None else self.commit == "Copy" and self.staging == "Full"


class TemplateRef(Part):
    """A core PodTemplate of the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the PodTemplate."""


class GeneratorsSpec(Part):
    """The pods that serve."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "(has(self.template) ? 1 : 0) + (has(self.templateRef) ? 1 : 0) + (has(self.selector) ? 1 : 0) == 1",
                "set exactly one of template, templateRef and selector",
                field=".template",
            ),
            immutable("groupSize", "groupSize is immutable, because it decides which object owns the pods: create another RefitGroup"),
            Rule(
                "!((type(self.maxSurge) == int ? self.maxSurge == 0 : self.maxSurge == '0%') && "
                "(type(self.maxUnavailable) == int ? self.maxUnavailable == 0 : self.maxUnavailable == '0%'))",
                "maxSurge and maxUnavailable must not both be zero, or no pod could ever be replaced: raise one of them",
                field=".maxUnavailable",
            ),
        )
    )

    replicas: Annotated[Int32, Field(ge=0, le=5000)] = 1
    """Generators to run; behind the scale subresource. Leave it out of manifests where an autoscaler or `kubectl scale` sets it, or every apply takes
    it back. New generators join from a peer that holds the version; nobody pauses for them. Not read with `selector`."""
    template: Opaque | None = None
    """Pod template of a generator, as in a Deployment. Refit hands it on unread and adds only what the quickstart lists, such as the settings and token
    volumes, `POD_*` variables, a readiness gate, a grace period and a preStop hook. The API server judges it in a dry run; its answer is the condition
    TemplateValid. A change replaces pods; new weights never do."""
    template_ref: TemplateRef | None = None
    """Names a core PodTemplate of the same namespace instead. A change of that object replaces pods as well."""
    selector: Selector | None = None
    """Adopts generator pods that a framework owns; only with rollout.policy Manual. Adopted pods are never changed, restarted or deleted."""
    group_size: Annotated[Int32, Field(ge=1, le=64)] = 1
    """Pods that make up one generator. Above 1 each generator is a group of a LeaderWorkerSet, whose API must be installed; its leader stands for it.
    Immutable."""
    min_available: CountOrPercent = 1
    """Generators that must serve an allowed version for the group to be Ready; also the disruption budget. A number, or a percentage of `replicas`,
    rounded up."""
    max_surge: CountOrPercent = 1
    """Extra generators while pods are replaced. A number, or a percentage of `replicas`, rounded up. New weights never replace pods."""
    max_unavailable: CountOrPercent = 0
    """Generators that may be missing while pods are replaced. A number, or a percentage of `replicas`, rounded down."""
    engine: EngineSpec = EngineSpec()
    """The inference engine inside a generator, and what a commit does to it."""


class FanoutSpec(Part):
    """Who reads from whom."""

    topology: Literal["Auto", "Direct", "Chain", "Tree"] = "Auto"
    """`Auto`: the shape with the smallest predicted time, from measured rates, anew for each version. `Direct`: every generator reads from the trainers.
    `Chain`: each reads from the one before it while that is still pulling; best for large versions. `Tree`: up to `degree` readers each; for small ones."""
    degree: Annotated[Int32, Field(ge=2, le=64)] = 4
    """Readers of each generator in a tree. Not read by other shapes."""
    max_readers_per_source: Annotated[Int32, Field(ge=1, le=256)] | None = None
    """Readers that one source serves at a time; others wait or read elsewhere. Left out: 1 in chains, `degree` in trees, no limit on trainers read directly."""
    topology_key: LabelKey | None = None
    """Node label, such as `topology.kubernetes.io/zone`. Generators prefer sources on nodes with the same value. Left out: nodes are not told apart."""
    max_rate: Annotated[str, Field(max_length=16, pattern=r"^[1-9][0-9]{0,8}(\.[0-9]{1,3})?(k|M|G|T|Ki|Mi|Gi|Ti)?$")] | None = None
    """Bytes per second that one source may send to all of its readers together, as a quantity such as "10G". Left out: no limit."""


class RolloutSpec(Part):
    """Which version generators serve, and how they get there."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.policy != 'Pinned' || has(self.pinnedVersion)",
                "pinnedVersion is required with policy Pinned: set the number of a WeightVersion of this group",
                field=".pinnedVersion",
                reason="FieldValueRequired",
            ),
            Rule(
                "type(self.maxConcurrent) == int ? self.maxConcurrent > 0 : self.maxConcurrent != '0%'",
                'maxConcurrent must not be zero, or no generator could ever commit: use 1 or more, or a percentage above "0%"; to stop, set paused',
                field=".maxConcurrent",
            ),
        )
    )

    policy: Literal["Latest", "Pinned", "Manual"] = "Latest"
    """`Latest`: generators follow the newest Ready version. `Pinned`: they go to `pinnedVersion` and stay. `Manual`: a framework stages and installs at its own
    safe points; Refit protects memory and reports, with the newest Ready version as the target. No order is given, so of the rest of `rollout` only `maxLag`
    (counted) is read: lagAction and onFailure have no effect. A change between Manual and the others replaces the generators."""
    pinned_version: Version | None = None
    """The version to serve with policy Pinned; retention spares it. Somebody must still hold it, else the group is Stalled (VersionNotFound).
    Not read with other policies, so that going back to the pin is one change."""
    barrier: Literal["Generator", "Fleet"] = "Generator"
    """`Generator`: each one commits when it has staged. `Fleet`: nobody commits before every generator has staged; once the first order is out, that version is
    completed everywhere, and late ones stay unready until they have it. Costs waiting for the slowest."""
    max_concurrent: CountOrPercent = "100%"
    """Generators inside a commit at once, so that the others keep serving. A number, or a percentage of the generators, rounded up. Above zero."""
    partition: CountOrPercent = 0
    """Share of the generators held back on the previous version, as a canary. A number, or a percentage of the generators, rounded up. 0: none."""
    max_lag: Annotated[Int32, Field(ge=0, le=100_000)] = 0
    """Ready versions that a generator may be behind the target before it counts as lagging and the group as Degraded. 0: no bound."""
    lag_action: Literal["None", "NotReady"] = "None"
    """What happens to a generator beyond `maxLag`. `None`: it is counted. `NotReady`: it also gets no more requests through Services, but never so many that
    fewer than minAvailable are left, and never while paused or with policy Pinned or Manual."""
    paused: bool = False
    """True: trainers publish, versions are recorded, and generators stay where they are; new ones join on the current version."""
    progress_deadline_seconds: Annotated[Int32, Field(ge=30, le=86400)] = 600
    """Seconds without any generator making progress after which the group is Stalled (ProgressDeadlineExceeded), a Fleet barrier that did not pass is aborted,
    and a fenced engine is restarted. Longer than the slowest pull and the slowest engine start."""
    on_failure: Literal["KeepPrevious", "Retry", "Rollback"] = "KeepPrevious"
    """What happens when generators cannot install a version, by an error that does not pass by itself. `KeepPrevious`: they stay on the old one and try the
    next. `Retry`: the same one three times more, with growing pauses. `Rollback`: all go back to the version before, and this one is Rejected: Latest never
    selects it again. A version that was served everywhere once is not taken back. Rollback acts with policy Latest only: a pin is the author's word."""


class VersionsSpec(Part):
    """The life of versions."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.publishDeadlineSeconds >= self.drainSeconds + self.leaseSeconds + 30",
                "publishDeadlineSeconds must be at least drainSeconds + leaseSeconds + 30, or a publish that waits for readers fails: raise it, or lower those",
                field=".publishDeadlineSeconds",
            )
        )
    )

    retain: Annotated[Int32, Field(ge=1, le=500)] = 8
    """Newest WeightVersion objects to keep; more are kept while they are target, current, previous, pinned or held. Counts records, not bytes:
    who still holds a version is in its status."""
    record_every: Annotated[Int32, Field(ge=1, le=10_000)] = 1
    """Every n-th version gets a WeightVersion object. Raise it when steps are shorter than about 5 seconds. Versions without an object are served all the same,
    but cannot be looked at, held or aborted."""
    publish_deadline_seconds: Seconds = 150
    """Seconds from the first rank's publish until every slot must be sealed; beyond it the version is Failed and generators stay on the old one.
    At least drainSeconds + leaseSeconds + 30."""
    lease_seconds: Annotated[Int32, Field(ge=15, le=3600)] = 30
    """Seconds that a reader's lease lives without renewal. Shorter frees the memory of dead readers sooner, longer survives longer gaps of the catalog.
    Heartbeats come three times as often."""
    drain_seconds: Annotated[Int32, Field(ge=0, le=3600)] = 60
    """Seconds that readers of a closed or retired version may still go on. The memory is free at most drainSeconds + leaseSeconds later.
    Shorter than a pull takes, readers lose versions under them."""


class Prompt(Part):
    """One prompt of the canary."""

    model_config = ConfigDict(
        json_schema_extra=rules(Rule("has(self.text) != has(self.tokenIds)", "set exactly one of text and tokenIds", field=".text", binds="always"))
    )

    text: Annotated[str, Field(min_length=1, max_length=8192)] | None = None
    """The prompt as text; the engine needs a tokenizer."""
    token_ids: Annotated[Items[Annotated[Int32, Field(ge=0)]], Field(min_length=1, max_length=2048)] | None = None
    """The prompt as token ids."""


class CanarySpec(Part):
    """Prompts that the first generator must answer as before."""

    prompts: Annotated[Items[Prompt], Field(min_length=1, max_length=16)]
    """Prompts whose mean log-probability is compared before and after the first generator's commit."""
    logprob_tolerance: Annotated[str, Field(max_length=16, pattern=r"^[0-9]{1,3}(\.[0-9]{1,6})?$")] = "1.0"
    """Largest accepted change of a prompt's mean log-probability per token, in nats, as a decimal number in quotes. Beyond it the others do not follow:
    `rollout.onFailure` decides what happens to the version. 0 accepts equal answers only."""


class VerificationSpec(Part):
    """What is checked beside the bytes, which are always verified before they are installed."""

    installed: Literal["Async", "Blocking", "Off"] = "Async"
    """Whether live parameters are read again after an install and compared with the published digests: finds double writes, interrupted copies and memory
    damage; a mismatch fences. `Async`: while requests run. `Blocking`: inside the pause, which it lengthens. `Off`: not at all.
    The first version after an engine start is always checked Blocking, unless Off."""
    canary: CanarySpec | None = None
    """Prompts that the first generator must answer as before, within a tolerance, before the others follow. Left out: no such check."""


class TransportSpec(Part):
    """How bytes travel."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            immutable("kind", "kind is immutable, because both sides registered their memory with it: create another RefitGroup"),
            Rule("self.backend == 'UCX' || !has(self.tls) || size(self.tls) == 0", "tls belongs to UCX: leave it out with backend LIBFABRIC", field=".tls"),
        )
    )

    kind: Literal["NIXL"] = "NIXL"
    """The transfer library. Immutable."""
    backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    """The NIXL backend. `UCX`: InfiniBand, RoCE, NVLink, shared memory, TCP. `LIBFABRIC`: EFA. `refit doctor` checks it at pod start."""
    devices: Annotated[Items[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=32)] | None = None
    """Network devices to use, such as `mlx5_0:1`. Left out: the backend's own choice by distance from the accelerator."""
    rails: Annotated[Int32, Field(ge=1, le=32)] | None = None
    """Devices that one rank uses at the same time. Left out: the backend's own choice."""
    tls: Annotated[Items[Annotated[str, Field(min_length=1, max_length=32)]], Field(max_length=16)] | None = None
    """UCX transports to allow, such as `rc`, `cuda_ipc`, `tcp`. Left out: all that UCX finds."""


class SchedulingSpec(Part):
    """How pods of the group are scheduled together."""

    gang: Literal["None", "Kueue", "Volcano", "Workload"] = "None"
    """Puts the labels and annotations of a gang scheduler on the group's pods, nothing else; the scheduler must be installed. A queue is named by that
    scheduler's own label in your template."""


class RestartSpec(Part):
    """Asks for new pods."""

    id: Word | None = None
    """Any new value replaces all pods made from templates, within maxSurge and maxUnavailable, such as a date. Adopted pods are not touched."""


class RefitGroupSpec(Part):
    """Who trains, who generates, how versions roll out."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            immutable("model", "model is immutable: another model or revision is another RefitGroup"),
            immutable("managedBy", "managedBy is immutable, also adding and removing it: create another RefitGroup"),
            Rule(
                "!has(self.generators.selector) || self.rollout.policy == 'Manual'",
                "adopted generators are driven by their framework: set rollout.policy to Manual, or use generators.template",
                field=".generators.selector",
                reason="FieldValueForbidden",
            ),
            Rule(
                "self.rollout.barrier != 'Fleet' || self.generators.engine.staging != 'Windowed'",
                "barrier Fleet needs generators that stage while they serve: set generators.engine.staging to Full, or barrier to Generator",
                field=".rollout.barrier",
            ),
            Rule(
                "self.generators.replicas != 1 || (self.rollout.onFailure != 'Rollback' && !has(self.verification.canary)) || "
                "self.generators.engine.keepPrevious || self.generators.engine.commit == 'Remap' || self.trainer.hostCopies >= 1",
                "with one generator nobody else holds the previous version, so onFailure Rollback and verification.canary have nothing to go back to: "
                "set generators.engine.keepPrevious, generators.engine.commit Remap or trainer.hostCopies, or run more generators",
                field=".rollout.onFailure",
            ),
        )
    )

    model: ModelSpec
    """The model that trainers and engines must share. Immutable."""
    trainer: TrainerSpec
    """The workload that makes and publishes weights."""
    generators: GeneratorsSpec
    """The pods that serve."""
    fanout: FanoutSpec = FanoutSpec()
    """Who reads from whom."""
    rollout: RolloutSpec = RolloutSpec()
    """Which version generators serve, and how they get there."""
    versions: VersionsSpec = VersionsSpec()
    """The life of versions: retention, deadlines, leases."""
    verification: VerificationSpec = VerificationSpec()
    """What is checked beside the bytes, which are always verified before they are installed."""
    transport: TransportSpec = TransportSpec()
    """How bytes travel."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """How pods of the group are scheduled together."""
    restart: RestartSpec = RestartSpec()
    """Asks for new pods, as `kubectl rollout restart` does."""
    suspend: bool = False
    """True: the pods made from templates are removed, and with them the weights that only they held; objects, records and settings stay. False brings the pods
    back."""
    managed_by: Annotated[str, Field(min_length=3, max_length=63, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] | None = None
    """Name of another controller that reconciles this group, as `example.com/name`: the Refit operator leaves it alone. Immutable, also its presence."""
    deletion_policy: Literal["Delete", "Orphan"] = "Delete"
    """What deleting the group does to its pods. `Delete`: they go with it. `Orphan`: they keep running and serve their last version; nobody refits them."""

"""Each rule of the two kinds, judged by a real API server: one document that it accepts and one that it refuses, naming the field and what to do.

The rows are the specification of the rules; a rule without a row fails `test_every_rule_has_a_row`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from kubernetes.client import ApiextensionsV1Api
from refit_api.crd import crd
from refit_api.document import JsonObject, parts, string, table, tables
from refit_api.v1alpha1 import KINDS, RefitGroup

from tests.crds.documents import group, merged, weight_version
from tests.crds.judge import Judge, Refusal

SELECTOR: JsonObject = {"matchLabels": {"app": "x"}}
MANUAL: JsonObject = {"policy": "Manual"}


@dataclass(frozen=True)
class Row:
    """`accepted` and `refused` change a document that is right; `field` and `told` are in the answer to the second."""

    name: str
    field: str
    told: str
    refused: JsonObject
    accepted: JsonObject = field(default_factory=dict)
    before: JsonObject = field(default_factory=dict)
    """For rules about changes: what is stored before."""


def spec(**change: object) -> JsonObject:
    return {"spec": change}  # type: ignore[dict-item]


GROUPS = [
    Row(
        "short name",
        "",
        "metadata.name must have at most 40 characters, because names of pods and versions are made from it",
        accepted={"metadata": {"name": "a" * 40}},
        refused={"metadata": {"name": "a" * 41}},
    ),
    Row(
        "name of a Service",
        "",
        "metadata.name must start with a letter and have lower-case letters, digits and '-' only, because a Service is named after it",
        accepted={"metadata": {"name": "a-1"}},
        refused={"metadata": {"name": "a.b"}},
    ),
    Row(
        "one source of trainer pods",
        "spec.trainer.template",
        "set exactly one of template (Refit runs the trainer pods) and selector (pods that a TrainJob, JobSet or RayCluster runs)",
        accepted=spec(trainer={"template": None, "selector": SELECTOR}),
        refused=spec(trainer={"selector": SELECTOR}),
    ),
    Row(
        "some source of trainer pods",
        "spec.trainer.template",
        "set exactly one of template (Refit runs the trainer pods) and selector (pods that a TrainJob, JobSet or RayCluster runs)",
        refused=spec(trainer={"template": None}),
    ),
    Row(
        "live memory has no arenas",
        "spec.trainer.arenas",
        "snapshot InPlace publishes the live memory itself and has no arenas: leave arenas at 1, or use snapshot Device or Host",
        accepted=spec(trainer={"snapshot": "InPlace"}),
        refused=spec(trainer={"snapshot": "InPlace", "arenas": 2}),
    ),
    Row(
        "a selector selects",
        "spec.trainer.selector.matchLabels",
        "an empty selector would adopt every pod of the namespace: set matchLabels or matchExpressions",
        accepted=spec(trainer={"template": None, "selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}),
        refused=spec(trainer={"template": None, "selector": {"matchLabels": {}}}),
    ),
    Row(
        "operators and values",
        "spec.trainer.selector.matchExpressions[0].values",
        "values must have at least one entry with the operators In and NotIn, and must be left out with Exists and DoesNotExist",
        accepted=spec(trainer={"template": None, "selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["a"]}]}}),
        refused=spec(trainer={"template": None, "selector": {"matchExpressions": [{"key": "app", "operator": "Exists", "values": ["a"]}]}}),
    ),
    Row(
        "one source of generator pods",
        "spec.generators.template",
        "set exactly one of template, templateRef and selector",
        accepted=spec(generators={"template": None, "templateRef": {"name": "t"}}),
        refused=spec(generators={"templateRef": {"name": "t"}}),
    ),
    Row(
        "some source of generator pods",
        "spec.generators.template",
        "set exactly one of template, templateRef and selector",
        refused=spec(generators={"template": None}),
    ),
    Row(
        "pods can be replaced",
        "spec.generators.maxUnavailable",
        "maxSurge and maxUnavailable must not both be zero, or no pod could ever be replaced: raise one of them",
        accepted=spec(generators={"maxSurge": 0, "maxUnavailable": "1%"}),
        refused=spec(generators={"maxSurge": "0%", "maxUnavailable": 0}),
    ),
    Row(
        "windows are copied",
        "spec.generators.engine.commit",
        "staging Windowed installs layer groups by copies: set commit to Copy, or staging to Full",
        accepted=spec(generators={"engine": {"staging": "Windowed"}}),
        refused=spec(generators={"engine": {"staging": "Windowed", "commit": "Remap"}}),
    ),
    Row(
        "windows keep nothing",
        "spec.generators.engine.keepPrevious",
        "staging Windowed never holds a whole version: set keepPrevious to false, or staging to Full",
        accepted=spec(generators={"engine": {"staging": "Full", "keepPrevious": True}}),
        refused=spec(generators={"engine": {"staging": "Windowed", "keepPrevious": True}}),
    ),
    Row(
        "windows relay nothing",
        "spec.generators.engine.relay",
        "staging Windowed never holds a whole version to relay: leave relay out, or set staging to Full",
        accepted=spec(generators={"engine": {"staging": "Windowed", "relay": False}}),
        refused=spec(generators={"engine": {"staging": "Windowed", "relay": True}}),
    ),
    Row(
        "a framework drives what it owns",
        "spec.generators.selector",
        "adopted generators are driven by their framework: set rollout.policy to Manual, or use generators.template",
        accepted=spec(generators={"template": None, "selector": SELECTOR}, rollout=MANUAL),
        refused=spec(generators={"template": None, "selector": SELECTOR}),
    ),
    Row(
        "pinned to something",
        "spec.rollout.pinnedVersion",
        "pinnedVersion is required with policy Pinned: set the number of a WeightVersion of this group",
        accepted=spec(rollout={"policy": "Pinned", "pinnedVersion": 7}),
        refused=spec(rollout={"policy": "Pinned"}),
    ),
    Row(
        "somebody may commit",
        "spec.rollout.maxConcurrent",
        'maxConcurrent must not be zero, or no generator could ever commit: use 1 or more, or a percentage above "0%"; to stop, set paused',
        accepted=spec(rollout={"maxConcurrent": 1}),
        refused=spec(rollout={"maxConcurrent": 0}),
    ),
    Row(
        "some share may commit",
        "spec.rollout.maxConcurrent",
        'maxConcurrent must not be zero, or no generator could ever commit: use 1 or more, or a percentage above "0%"; to stop, set paused',
        accepted=spec(rollout={"maxConcurrent": "1%"}),
        refused=spec(rollout={"maxConcurrent": "0%"}),
    ),
    Row(
        "a barrier needs staged generators",
        "spec.rollout.barrier",
        "barrier Fleet needs generators that stage while they serve: set generators.engine.staging to Full, or barrier to Generator",
        accepted=spec(rollout={"barrier": "Fleet"}),
        refused=spec(rollout={"barrier": "Fleet"}, generators={"engine": {"staging": "Windowed"}}),
    ),
    Row(
        "time to wait for readers",
        "spec.versions.publishDeadlineSeconds",
        "publishDeadlineSeconds must be at least drainSeconds + leaseSeconds + 30, or a publish that waits for readers fails: raise it, or lower those",
        accepted=spec(versions={"publishDeadlineSeconds": 120}),
        refused=spec(versions={"publishDeadlineSeconds": 119}),
    ),
    Row(
        "a way back for one generator",
        "spec.rollout.onFailure",
        "with one generator nobody else holds the previous version, so onFailure Rollback and verification.canary have nothing to go back to: "
        "set generators.engine.keepPrevious, generators.engine.commit Remap or trainer.hostCopies, or run more generators",
        accepted=spec(rollout={"onFailure": "Rollback"}, trainer={"hostCopies": 1}),
        refused=spec(rollout={"onFailure": "Rollback"}),
    ),
    Row(
        "a way back from a canary",
        "spec.rollout.onFailure",
        "with one generator nobody else holds the previous version, so onFailure Rollback and verification.canary have nothing to go back to: "
        "set generators.engine.keepPrevious, generators.engine.commit Remap or trainer.hostCopies, or run more generators",
        accepted=spec(verification={"canary": {"prompts": [{"text": "x"}]}}, generators={"replicas": 2}),
        refused=spec(verification={"canary": {"prompts": [{"text": "x"}]}}),
    ),
    Row(
        "one form of a prompt",
        "spec.verification.canary.prompts[0].text",
        "set exactly one of text and tokenIds",
        accepted=spec(verification={"canary": {"prompts": [{"tokenIds": [1]}]}}, generators={"replicas": 2}),
        refused=spec(verification={"canary": {"prompts": [{"text": "x", "tokenIds": [1]}]}}, generators={"replicas": 2}),
    ),
    Row(
        "transports of UCX",
        "spec.transport.tls",
        "tls belongs to UCX: leave it out with backend LIBFABRIC",
        accepted=spec(transport={"tls": ["tcp"]}),
        refused=spec(transport={"tls": ["tcp"], "backend": "LIBFABRIC"}),
    ),
]

GROUP_CHANGES = [
    Row(
        "another model",
        "spec.model",
        "model is immutable: another model or revision is another RefitGroup",
        accepted=spec(model={"name": "m"}),
        refused=spec(model={"revision": "2"}),
    ),
    Row(
        "other group size",
        "spec.generators.groupSize",
        "groupSize is immutable, because it decides which object owns the pods: create another RefitGroup",
        accepted=spec(generators={"groupSize": 1}),
        refused=spec(generators={"groupSize": 2}),
    ),
    Row(
        "group size removed",
        "spec.generators.groupSize",
        "groupSize is immutable, because it decides which object owns the pods: create another RefitGroup",
        before=spec(generators={"groupSize": 2}),
        refused=spec(generators={"groupSize": None}),
    ),
    Row(
        "another controller",
        "spec.managedBy",
        "managedBy is immutable, also adding and removing it: create another RefitGroup",
        before=spec(managedBy="a.example/b"),
        accepted=spec(managedBy="a.example/b"),
        refused=spec(managedBy="a.example/c"),
    ),
    Row(
        "controller removed",
        "spec.managedBy",
        "managedBy is immutable, also adding and removing it: create another RefitGroup",
        before=spec(managedBy="a.example/b"),
        refused=spec(managedBy=None),
    ),
    Row(
        "controller added",
        "spec.managedBy",
        "managedBy is immutable, also adding and removing it: create another RefitGroup",
        refused=spec(managedBy="a.example/b"),
    ),
]

NAME = "metadata.name must be spec.groupRef.name, -v and the nine digits of spec.version"
SUBSET: JsonObject = {"format": "Subset", "baseVersion": 11, "select": {"layers": [1]}}
VERSIONS = [
    Row("number in the name", "", NAME, refused=spec(version=13)),
    Row("name without a number", "", NAME, refused={"metadata": {"name": "x"}}),
    Row("nine digits", "", NAME, refused={"metadata": {"name": "rules-v12"}}),
    Row("digits in the name", "", NAME, refused={"metadata": {"name": "rules-v0000000xx"}}),
    Row("-v in the name", "", NAME, refused={"metadata": {"name": "rules-w000000012"}}),
    Row(
        "group in the name",
        "",
        NAME,
        accepted={"metadata": {"name": "rules-v9-v000000012"}, "spec": {"groupRef": {"name": "rules-v9"}}},
        refused=spec(groupRef={"name": "other"}),
    ),
    Row(
        "a subset has a base",
        "spec.format",
        "baseVersion and select belong to format Subset: set both with Subset, and none with FullTensor",
        accepted=spec(**SUBSET),
        refused=spec(**SUBSET | {"baseVersion": None}),
    ),
    Row(
        "a whole version has no base",
        "spec.format",
        "baseVersion and select belong to format Subset: set both with Subset, and none with FullTensor",
        refused=spec(select={"layers": [1]}),
    ),
    Row(
        "the base came before",
        "spec.baseVersion",
        "baseVersion must be an earlier version than version",
        accepted=spec(**SUBSET),
        refused=spec(**SUBSET | {"baseVersion": 12}),
    ),
    Row(
        "a subset is not nothing",
        "spec.select.params",
        "select must name something: set params, layers or layerGroups",
        accepted=spec(**SUBSET | {"select": {"layerGroups": ["attention"]}}),
        refused=spec(**SUBSET | {"select": {}}),
    ),
]


def _fixed(name: str, refused: object, before: JsonObject | None = None) -> Row:
    told = f"{name} is immutable: a version is what was published; only hold and abort may change"
    return Row(f"another {name}", f"spec.{name}", told, before=spec(**before or {}), accepted=spec(hold=True, abort=True), refused=spec(**{name: refused}))


VERSION_CHANGES = [
    _fixed("groupRef", {"name": "other"}),
    _fixed("version", 13),
    _fixed("trainerStep", 4),
    _fixed("trainerRunId", "run.1"),
    _fixed("format", "Subset"),
    _fixed("baseVersion", 10, SUBSET),
    _fixed("baseVersion", None, SUBSET),
    _fixed("select", {"layers": [2]}, SUBSET),
    _fixed("select", None, SUBSET),
    _fixed("expectedSlots", 3),
    _fixed("planKey", "q"),
    _fixed("idempotencyKey", "run.0:4"),
]

CREATED = [(group, row) for row in GROUPS] + [(weight_version, row) for row in VERSIONS]
CHANGED = [(group, row) for row in GROUP_CHANGES] + [(weight_version, row) for row in VERSION_CHANGES]


def _ids(rows: list[tuple[object, Row]]) -> list[str]:
    return [row.name for _, row in rows]  # pytest numbers equal ones


def _found(answer: list[Refusal], row: Row) -> bool:
    return any(refusal.message.endswith(row.told) and (refusal.field == row.field or not row.field) for refusal in answer)


@pytest.mark.parametrize(("make", "row"), CREATED, ids=_ids(CREATED))
def test_a_document_is_judged(judge: Judge, make: type, row: Row) -> None:
    assert judge.creating(make(row.accepted)) == []
    answer = judge.creating(make(row.refused))
    assert _found(answer, row), answer


def test_a_right_object_cannot_be_broken(judge: Judge) -> None:
    """The rules on what one document shows hold for changes as well."""
    judge.create(group())
    try:
        for row in GROUPS:
            if row.field:
                answer = judge.changing(group(), row.refused)
                assert _found(answer, row), (row.name, answer)
    finally:
        judge.delete(group())


@pytest.mark.parametrize(("make", "row"), CHANGED, ids=_ids(CHANGED))
def test_a_change_is_judged(judge: Judge, make: type, row: Row) -> None:
    document = make(row.before)
    judge.create(document)
    try:
        assert judge.changing(document, row.accepted) == []
        answer = judge.changing(document, row.refused)
        assert _found(answer, row), answer
    finally:
        judge.delete(document)


TRANSPORT_KIND = "kind is immutable, because both sides registered their memory with it: create another RefitGroup"


def test_every_rule_has_a_row() -> None:
    told = {row.told for _, row in CREATED + CHANGED} | {TRANSPORT_KIND}
    assert {message for kind in KINDS for message in _messages(table(crd(kind), "spec"))} == told


def _messages(version: JsonObject) -> Iterator[str]:
    yield from _below(table(tables(version, "versions")[0], "schema", "openAPIV3Schema"))


def _below(schema: JsonObject) -> Iterator[str]:
    yield from (string(rule, "message") for rule in tables(schema, "x-kubernetes-validations"))
    for _, part in parts(schema):
        yield from _below(part)


def _other_release(api_group: str, kind: str) -> JsonObject:
    """The CRD of RefitGroup under names of its own, to be changed as another release would."""
    spoken: JsonObject = {"kind": kind, "listKind": f"{kind}List", "singular": kind.lower(), "plural": f"{kind.lower()}s", "shortNames": [], "categories": []}
    return merged(crd(RefitGroup), {"metadata": {"name": f"{kind.lower()}s.{api_group}"}, "spec": {"group": api_group, "names": spoken}})


def _schema(definition: JsonObject) -> JsonObject:
    return table(tables(table(definition, "spec"), "versions")[0], "schema", "openAPIV3Schema")


def _eventually_accepted(judge: Judge, document: JsonObject) -> None:
    """A definition is served a moment after it was stored."""
    deadline = time.monotonic() + 20
    while answer := judge.creating(document):
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)


def test_the_transport_stays_what_it_is_once_there_are_two(judge: Judge) -> None:
    """With one word in the enum the rule cannot be reached; a release with a second one must find it in place."""
    later = Judge(judge.api, "later.example")
    definition = _other_release(later.api_group, "LaterGroup")
    table(_schema(definition), "properties", "spec", "properties", "transport", "properties", "kind")["enum"] = ["NIXL", "WPI"]
    ApiextensionsV1Api(judge.api.api_client).create_custom_resource_definition(definition)
    document = group({"apiVersion": "later.example/v1alpha1", "kind": "LaterGroup"})
    _eventually_accepted(later, document)
    later.create(document)
    assert later.changing(document, spec(transport={"backend": "LIBFABRIC"})) == []
    answer = later.changing(document, spec(transport={"kind": "WPI"}))
    assert [refusal.field for refusal in answer if refusal.message.endswith(TRANSPORT_KIND)] == ["spec.transport.kind"]


def test_a_rule_that_comes_later_locks_nobody_out(judge: Judge) -> None:
    """Objects from before a rule can still be changed elsewhere; new ones cannot start out broken."""
    earlier = Judge(judge.api, "earlier.example")
    definitions = ApiextensionsV1Api(judge.api.api_client)
    ruled = _other_release(earlier.api_group, "EarlierGroup")
    unruled = _other_release(earlier.api_group, "EarlierGroup")
    _without_rules(_schema(unruled))
    definitions.create_custom_resource_definition(unruled)
    rows = [row for row in GROUPS if row.field]
    documents = [
        merged(group(row.refused), {"apiVersion": "earlier.example/v1alpha1", "kind": "EarlierGroup", "metadata": {"name": f"row-{number}"}})
        for number, row in enumerate(rows)
    ]
    _eventually_accepted(earlier, documents[0])
    for document in documents:
        earlier.create(document)
    definitions.patch_custom_resource_definition(str(table(ruled, "metadata")["name"]), {"spec": {"versions": table(ruled, "spec")["versions"]}})
    deadline = time.monotonic() + 20
    while not earlier.creating(merged(documents[0], {"metadata": {"name": "fresh"}})):
        assert time.monotonic() < deadline, "the rules never came into force"
        time.sleep(0.2)
    for row, document in zip(rows, documents, strict=True):
        assert earlier.changing(document, spec(versions={"retain": 9}, generators={"minAvailable": 2})) == [], row.name
        assert _found(earlier.creating(merged(document, {"metadata": {"name": "fresh"}})), row), row.name


def _without_rules(schema: JsonObject) -> None:
    schema.pop("x-kubernetes-validations", None)
    for _, part in parts(schema):
        _without_rules(part)

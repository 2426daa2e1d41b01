"""The models in Python: strict where a silent conversion would hide a mistake, and the same document out as in."""

from __future__ import annotations

import pytest
from refit_api import names
from refit_api.dialect import from_api, to_api
from refit_api.document import JsonObject
from refit_api.errors import SpecError
from refit_api.v1alpha1 import RefitGroup, RefitGroupSpec, WeightVersion

MINIMAL = {"model": {"name": "m"}, "trainer": {"template": {"spec": {"containers": []}}}, "generators": {"template": {}}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param({"trainer": {"template": {}, "replicas": True}}, "trainer.replicas: input should be a valid integer, seen True", id="true is no number"),
        pytest.param({"trainer": {"template": {}, "replicas": "2"}}, "trainer.replicas: input should be a valid integer, seen '2'", id="text is no number"),
        pytest.param({"suspend": "yes"}, "suspend: input should be a valid boolean, seen 'yes'", id="text is no boolean"),
        pytest.param({"rollout": {"polcy": "Latest"}}, "rollout.polcy: unknown field; remove it or correct its spelling", id="unknown field"),
        pytest.param({"rollout": {"policy": "Newest"}}, "rollout.policy: input should be 'Latest', 'Pinned' or 'Manual', seen 'Newest'", id="unknown word"),
        pytest.param({"rollout": {"maxConcurrent": "101%"}}, 'expected a whole number or a percentage from "0%" to "100%"', id="above all"),
        pytest.param({"rollout": {"maxConcurrent": -1}}, "expected 0 or more", id="below nothing"),
        pytest.param({"model": {}}, "model.name: required, but absent", id="missing"),
        pytest.param({"fanout": {"maxRate": "10 GB"}}, "fanout.maxRate", id="not a quantity"),
    ],
)
def test_a_wrong_document_is_refused_with_its_field(change: JsonObject, told: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_api(RefitGroupSpec, MINIMAL | change)
    assert told in refused.value.message


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(SpecError) as refused:
        from_api(RefitGroupSpec, {"model": {"name": 1}, "trainer": {}, "suspend": 1})
    assert [part in refused.value.message for part in ("model.name", "generators: required", "suspend")] == [True] * 3


def test_an_opaque_template_comes_back_as_it_was() -> None:
    """Nulls, empty parts and fields that no release of ours knows belong to the pods' API server."""
    template = {"metadata": {"creationTimestamp": None}, "spec": {"containers": [{"name": "c", "unheardOf": {"x": [1, None, {}]}}], "n": 1.5}}
    spec = from_api(RefitGroupSpec, MINIMAL | {"generators": {"template": template}})
    generators = to_api(spec)["generators"]
    assert isinstance(generators, dict)
    assert generators["template"] == template


def test_a_document_survives_the_way_through_the_models() -> None:
    group = from_api(RefitGroup, {"apiVersion": names.API_VERSION, "kind": "RefitGroup", "metadata": {"name": "g", "managedFields": [{}]}, "spec": MINIMAL})
    assert from_api(RefitGroup, to_api(group)) == group
    assert to_api(group)["metadata"] == {"name": "g", "managedFields": [{}]}
    assert (group.name, group.namespace, group.uid) == ("g", "", "")


def test_models_cannot_be_changed() -> None:
    spec = from_api(RefitGroupSpec, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        spec.suspend = True  # type: ignore[misc]


def test_a_newer_status_is_read() -> None:
    """The operator may have been newer than this reader; only what a person wrote is strict."""
    version = {
        "apiVersion": names.API_VERSION,
        "kind": "WeightVersion",
        "metadata": {"name": "g-v000000001"},
        "spec": {
            "groupRef": {"name": "g"},
            "version": 1,
            "trainerStep": 0,
            "trainerRunId": "r.0",
            "expectedSlots": 1,
            "planKey": "k",
            "idempotencyKey": "r.0:0",
        },
        "status": {"phase": "Ready", "invented": 1, "shards": {"sealed": 1, "later": True}},
    }
    status = from_api(WeightVersion, version).status
    assert (status.phase, status.shards.sealed if status.shards else None) == ("Ready", 1)


@pytest.mark.parametrize(
    ("engine", "relays"),
    [
        pytest.param({}, True, id="copies relay"),
        pytest.param({"commit": "Remap"}, False, id="remapped memory is no source"),
        pytest.param({"commit": "Remap", "relay": True}, True, id="unless a plain arena is asked for"),
        pytest.param({"staging": "Windowed"}, False, id="windows hold no whole version"),
        pytest.param({"relay": False}, False, id="as asked"),
    ],
)
def test_relay_left_out_means_what_the_commit_allows(engine: JsonObject, relays: bool) -> None:
    spec = from_api(RefitGroupSpec, MINIMAL | {"generators": {"template": {}, "engine": engine}})
    assert spec.generators.engine.relays is relays


def test_names_agree() -> None:
    """A literal cannot refer to a constant."""
    assert RefitGroup.model_fields["api_version"].default == names.API_VERSION
    assert {kind.resource.kind for kind in (RefitGroup, WeightVersion)} == {kind.model_fields["kind"].default for kind in (RefitGroup, WeightVersion)}

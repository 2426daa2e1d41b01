"""Bad RefitGroups: an answer at once where the schema can tell, a condition that says what to do where it cannot."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.fleet import GROUP, Fleet
from e2e.groups import Object, refit_group
from e2e.installation import Installation
from e2e.kubectl import KubectlError

pytestmark = pytest.mark.story
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "localhost/none:0", "imagePullPolicy": "Never"}]}}


@pytest.fixture(scope="module")
def alone(installation: Installation) -> Iterator[Fleet]:
    """A namespace where nothing runs."""
    fleet = Fleet.create(installation, "stories-refusals")
    yield fleet
    fleet.remove()


def sample(fleet: Fleet, **spec: Any) -> Object:
    return refit_group(GROUP, fleet.namespace, copy.deepcopy(TEMPLATE), copy.deepcopy(TEMPLATE), 0, **spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"rollout": {"policy": "Pinned"}}, "pinnedVersion"),
        ({"versions": {"publishDeadlineSeconds": 40}}, "publishDeadlineSeconds"),
        ({"rolout": {}}, "unknown field"),
    ],
    ids=["pinned without a version", "deadline shorter than a drain", "a misspelt field"],
)
@pytest.mark.parametrize("server_side", [False, True], ids=["apply", "server-side apply"])
def test_the_api_server_refuses_and_names_the_field(alone: Fleet, spec: Object, said: str, server_side: bool) -> None:
    with pytest.raises(KubectlError) as refused:
        alone.kubectl.apply(sample(alone, **spec), server_side=server_side)
    wanted = "field not declared in schema" if server_side and said == "unknown field" else said
    assert wanted in refused.value.stderr


def test_a_field_that_is_not_carried_out_is_a_condition(alone: Fleet) -> None:
    group = sample(alone)
    group["spec"]["generators"]["groupSize"] = 2
    alone.kubectl.apply(group)
    seen = alone.until_condition("Stalled", "True", "NotImplemented")
    assert "spec.generators.groupSize" in seen["message"]
    alone.kubectl.delete("refitgroup", GROUP, alone.namespace)


def test_an_impossible_template_is_a_condition(alone: Fleet) -> None:
    bad = copy.deepcopy(TEMPLATE)
    bad["spec"]["containers"][0]["ports"] = [{"containerPort": 700000}]
    group = sample(alone)
    group["spec"]["generators"]["template"] = bad
    alone.kubectl.apply(group)
    seen = alone.until_condition("TemplateValid", "False", "InvalidTemplate")
    assert "containerPort" in seen["message"]
    alone.until_condition("Stalled", "True", "InvalidTemplate")
    assert alone.kubectl.list("pods", alone.namespace) == []
    alone.kubectl.delete("refitgroup", GROUP, alone.namespace)

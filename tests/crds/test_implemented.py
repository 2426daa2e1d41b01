"""A field that is not carried out is refused by name: the table decides, and nothing outside it slips through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from refit_api.dialect import Part, from_api
from refit_api.document import JsonObject
from refit_api.implemented import IMPLEMENTED, unimplemented
from refit_api.v1alpha1 import RefitGroupSpec

MINIMAL: JsonObject = {"model": {"name": "m"}, "trainer": {"template": {}}, "generators": {"template": {}}}


def test_defaults_are_implemented() -> None:
    assert unimplemented(from_api(RefitGroupSpec, MINIMAL)) == []


@pytest.mark.parametrize(
    ("change", "field", "seen", "allowed"),
    [
        pytest.param({"generators": {"template": {}, "engine": {"commit": "Remap"}}}, "spec.generators.engine.commit", "Remap", "Copy", id="a word"),
        pytest.param({"trainer": {"template": {}, "arenas": 2}}, "spec.trainer.arenas", "2", "1", id="another number"),
        pytest.param({"generators": {"templateRef": {"name": "t"}}}, "spec.generators.templateRef", "a value", "leave it out", id="a part"),
        pytest.param({"rollout": {"barrier": "Fleet"}}, "spec.rollout.barrier", "Fleet", "Generator", id="one word of several"),
        pytest.param({"transport": {"tls": ["rc"]}}, "spec.transport.tls", "a value", "leave it out", id="a list"),
        pytest.param({"rollout": {"partition": "20%"}}, "spec.rollout.partition", "20%", "0", id="a percentage"),
    ],
)
def test_what_is_not_implemented_is_named(change: JsonObject, field: str, seen: str, allowed: str) -> None:
    found = unimplemented(from_api(RefitGroupSpec, MINIMAL | change))
    assert found == [(field, seen, allowed)]
    assert found[0].message == f"{field}: {seen} is not implemented in this release; allowed: {allowed}"


def test_every_line_of_the_table_is_a_field() -> None:
    """A misspelt line would refuse a field that is implemented."""
    assert set(IMPLEMENTED) - set(_paths("", RefitGroupSpec)) == set()


def _paths(prefix: str, part: type[Part]) -> Iterator[str]:
    for name, field in part.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        if isinstance(field.annotation, type) and issubclass(field.annotation, Part):
            yield from _paths(f"{path}.", field.annotation)

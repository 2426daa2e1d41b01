"""From models to CRDs: what is committed is what the models say, and what a CRD cannot say is refused before an API server has to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from refit_api.crd import MOST_BYTES, Unsayable, check_rules, generated, main, structural
from refit_api.dialect import CountOrPercent, Int32, Int64, Items, Opaque, Part, Rule, rules
from refit_api.document import JsonObject

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(generated()), ids=str)
def test_what_is_committed_is_what_the_models_say(path: Path) -> None:
    assert (ROOT / path).read_text() == generated()[path], "run `make gen`"


@pytest.mark.parametrize("path", [path for path in sorted(generated()) if path.suffix == ".yaml"], ids=str)
def test_kubectl_can_apply_it(path: Path) -> None:
    """Client-side apply copies the object into an annotation; and the default YAML dumper would write anchors for shared parts."""
    text = generated()[path]
    assert len(text.encode()) < MOST_BYTES
    assert "&id" not in text


def test_check_names_what_differs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert "crds/refitgroups.yaml: differs from the models; run make gen" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0


class Inner(Part):
    """Inner."""

    word: Literal["A"] = "A"
    """A word."""
    count: CountOrPercent = "10%"
    """A count."""
    names: Annotated[Items[Annotated[str, Field(max_length=3)]], Field(max_length=2)] = ()
    """Names."""


class Outer(Part):
    """Outer."""

    first: Inner = Inner()
    """First,
    over two lines."""
    second: Inner | None = None
    """Second."""
    number: Annotated[Int64, Field(ge=1)]
    """Number."""
    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=16)] | None = None
    """Labels."""
    template: Opaque | None = None
    """Template."""


def test_what_both_can_say_is_rewritten() -> None:
    """References in place, null unions optional, one literal an enum, defaults without nulls and empty parts, no titles."""
    inner: JsonObject = {
        "type": "object",
        "properties": {
            "word": {"type": "string", "enum": ["A"], "default": "A", "description": "A word."},
            "count": {
                "x-kubernetes-int-or-string": True,
                "pattern": "^(100|[1-9]?[0-9])%$",
                "minimum": 0,
                "maxLength": 4,
                "default": "10%",
                "description": "A count.",
            },
            "names": {
                "type": "array",
                "items": {"type": "string", "maxLength": 3},
                "maxItems": 2,
                "x-kubernetes-list-type": "atomic",
                "description": "Names.",
            },
        },
    }
    assert structural(Outer.model_json_schema(by_alias=True), "Outer") == {
        "type": "object",
        "description": "Outer.",
        "required": ["number"],
        "properties": {
            "first": inner | {"description": "First, over two lines.", "default": {"word": "A", "count": "10%"}},
            "second": inner | {"description": "Second."},
            "number": {"type": "integer", "format": "int64", "minimum": 1, "description": "Number."},
            "labels": {"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 63}, "description": "Labels."},
            "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "description": "Template."},
        },
    }


class Base(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class UnionOfModels(Base):
    field: Inner | Outer
    """Text."""


class FixedTuple(Base):
    field: tuple[Int32, Int32]
    """Text."""


class SetOfWords(Base):
    field: Annotated[set[Annotated[str, Field(max_length=3)]], Field(max_length=2)]
    """Text."""


class ExclusiveBound(Base):
    field: Annotated[Int32, Field(gt=0)]
    """Text."""


class Deprecated(Base):
    field: Annotated[Int32, Field(deprecated=True)]
    """Text."""


class WithExamples(Base):
    field: Annotated[Int32, Field(examples=[1])]
    """Text."""


class UnboundedText(Base):
    field: str
    """Text."""


class UnboundedList(Base):
    field: Items[Int32]
    """Text."""


class ListWithoutType(Base):
    field: Annotated[tuple[Int32, ...], Field(max_length=2)]
    """Text."""


class UnboundedMap(Base):
    field: dict[str, Int32]
    """Text."""


class PlainInteger(Base):
    field: int
    """Text."""


class RoundedBound(Base):
    field: Annotated[Int64, Field(le=2**63 - 1)]
    """Text."""


class Undescribed(Base):
    field: Int32


class Anything(Base):
    field: object
    """Text."""


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        pytest.param(UnionOfModels, "unions are not allowed", id="union of models"),
        pytest.param(FixedTuple, "cannot say prefixItems", id="fixed tuple"),
        pytest.param(SetOfWords, "cannot say uniqueItems", id="set"),
        pytest.param(ExclusiveBound, "cannot say exclusiveMinimum", id="exclusive bound"),
        pytest.param(Deprecated, "cannot say deprecated", id="deprecated"),
        pytest.param(WithExamples, "cannot say examples", id="examples"),
        pytest.param(UnboundedText, "a string needs max_length", id="string without bound"),
        pytest.param(UnboundedList, "a list needs max_length", id="list without bound"),
        pytest.param(ListWithoutType, "and a list type", id="list without list type"),
        pytest.param(UnboundedMap, "a map needs max_length", id="map without bound"),
        pytest.param(PlainInteger, "an integer is Int32 or Int64", id="integer without format"),
        pytest.param(RoundedBound, "comes back rounded", id="bound beyond what JSON keeps"),
        pytest.param(Undescribed, "has no description", id="field without manual"),
        pytest.param(Anything, "has no type", id="anything"),
    ],
)
def test_what_a_crd_cannot_say_is_refused(model: type[BaseModel], problem: str) -> None:
    with pytest.raises(Unsayable, match=problem) as refused:
        structural(model.model_json_schema(by_alias=True), model.__name__)
    assert str(refused.value).startswith(f"{model.__name__}.field")


def _ruled(rule: Rule) -> JsonObject:
    class Ruled(Part):
        """Ruled."""

        model_config = ConfigDict(json_schema_extra=rules(rule))

        sure: Inner = Inner()
        """There."""
        maybe: Int32 | None = None
        """Perhaps there."""

    return structural(Ruled.model_json_schema(by_alias=True), "Ruled")


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        pytest.param(Rule("self.sure.word == 'A'", "m", field=".sure.word"), None, id="reads defaults"),
        pytest.param(Rule("!has(self.maybe) || self.maybe > 1", "m", field=".maybe"), None, id="asks first"),
        pytest.param(Rule("self.maybe > 1", "m"), "reads self.maybe, which may be absent", id="reads what may be absent"),
        pytest.param(Rule("self.sure.other == 1", "m"), "reads self.sure.other, which may be absent", id="reads what does not exist"),
        pytest.param(Rule("self.sure.word.startsWith('A')", "m"), None, id="calls a function"),
        pytest.param(Rule("true", "m", field=".sure.other"), "points at .sure.other, which does not exist", id="points at nothing"),
    ],
)
def test_a_rule_reads_only_what_is_there(rule: Rule, problem: str | None) -> None:
    if problem is None:
        check_rules(_ruled(rule), "Ruled")
    else:
        with pytest.raises(Unsayable, match=problem):
            check_rules(_ruled(rule), "Ruled")

"""What models may say so that a CustomResourceDefinition can say it too: the base model, the named types, rules and columns.

Invariants:
- Names are snake_case in code and camelCase in the API; nothing else is renamed.
- Unknown fields are refused in specs and ignored in status, where a newer operator may have written.
- Integers are strict: Python would take `True` for 1.
- Lists are tuples in models, so a parsed object cannot change under its readers.
- A rule binds new content only: whoever already broke it when it came may still change everything else (`Rule.schema`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from refit_api.document import JsonObject
from refit_api.errors import SpecError

T = TypeVar("T")


class Part(BaseModel):
    """A part of a spec: frozen, strict, unknown fields refused. The text under a field is its manual, in the CRD as well."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Observed(Part):
    """A part of a status."""

    model_config = ConfigDict(extra="ignore")


PERCENT = r"^(100|[1-9]?[0-9])%$"


def _count_or_percent(value: int | str) -> int | str:
    if isinstance(value, str) and re.match(PERCENT, value) is None:
        raise ValueError('expected a whole number or a percentage from "0%" to "100%"')
    if isinstance(value, int) and value < 0:
        raise ValueError("expected 0 or more")
    return value


Opaque = Annotated[JsonObject, WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""A pod template that Refit hands on unread: the API server of the pod's own version judges it."""

CountOrPercent = Annotated[
    int | str,
    AfterValidator(_count_or_percent),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": PERCENT, "minimum": 0, "maxLength": 4}),
]
Int32 = Annotated[int, Field(json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Items = Annotated[tuple[T, ...], Strict(False), Field(json_schema_extra={"x-kubernetes-list-type": "atomic"})]
"""A list with one writer: replaced as a whole."""
ByType = Annotated[tuple[T, ...], Strict(False), Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})]

FieldReason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL rule on the model that carries it: `field` is the path below that model which a refusal points at.

    `binds` new content: an object that broke the rule before may still be changed elsewhere, so a rule that comes later locks nobody out.
    New objects: for what cannot change anyway, such as names (string functions on an old self would exceed the cost budget).
    Always: inside atomic lists, whose entries have no old selves, and for rules about changes.
    """

    rule: str
    message: str
    field: str = ""
    reason: FieldReason = "FieldValueInvalid"
    binds: Literal["new content", "new objects", "always"] = "new content"

    def schema(self) -> JsonDict:
        """The rule as the API server wants it."""
        told: JsonDict = {"rule": self.rule, "message": self.message, "reason": self.reason}
        if self.binds == "new content":
            before = re.sub(r"\bself\b", "oldSelf.value()", self.rule)
            told |= {"rule": f"({self.rule}) || (oldSelf.hasValue() && !({before}))", "optionalOldSelf": True}
        if self.binds == "new objects":
            told |= {"rule": f"oldSelf.hasValue() || ({self.rule})", "optionalOldSelf": True}
        if self.field:
            told["fieldPath"] = self.field
        return told


def immutable(field: str, message: str) -> Rule:
    """On the parent, because a rule on an optional field does not run when the field is removed."""
    kept = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
    return Rule(kept, message, field=f".{field}", reason="FieldValueForbidden", binds="always")


def rules(*those: Rule) -> JsonDict:
    """For `json_schema_extra` of the model that they bind."""
    return {"x-kubernetes-validations": [rule.schema() for rule in those]}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`; `wide` ones show with `-o wide` only."""

    name: str
    path: str
    type: Literal["string", "integer", "number", "date"] = "string"
    wide: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class Resource:
    """What the API server is told about a kind beside its schema."""

    kind: str
    plural: str
    singular: str
    short_names: tuple[str, ...]
    categories: tuple[str, ...]
    columns: tuple[Column, ...]
    scale: JsonObject | None = None
    selectable: tuple[str, ...] = ()


def to_api(model: BaseModel) -> JsonObject:
    """As the API server sees it: camelCase, defaults written out, nothing for None."""
    dumped: JsonObject = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


M = TypeVar("M", bound=BaseModel)


def from_api(model: type[M], document: object) -> M:
    """The other way. Raises SpecError that names every field that does not fit, what was seen and what is allowed."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        told = "; ".join(_said(fault["loc"], fault["msg"], fault["input"], fault["type"]) for fault in error.errors(include_url=False))
        raise SpecError(f"{model.__name__}: {told}", object=model.__name__) from error


def _said(place: tuple[int | str, ...], message: str, seen: object, kind: str) -> str:
    path = ".".join(str(step) for step in place) or "the object"
    if kind == "extra_forbidden":
        return f"{path}: unknown field; remove it or correct its spelling"
    if kind == "missing":
        return f"{path}: required, but absent"
    shown = repr(seen) if isinstance(seen, (bool, int, float, str)) else type(seen).__name__
    return f"{path}: {message[:1].lower()}{message[1:]}, seen {shown[:80]}"

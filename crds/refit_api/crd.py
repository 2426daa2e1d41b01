"""Models -> `crds/*.yaml` and `docs/reference/api.md`: `python -m refit_api.crd` writes them, `--check` says whether they are current.

pydantic emits JSON schema, Kubernetes takes structural schemas. What means the same in both is rewritten: references are put in place, a union with null
becomes an optional field, a single literal an enum; titles and null defaults go. Everything else that a structural schema cannot say is refused
(`Unsayable`), so that a model never promises what the API server will not keep.

Invariants of what comes out:
- Every field has a description; every list, map and string a bound (the cost of rules is estimated from them).
- A rule reads only fields that are required, have a default, or stand under `has()` in the same rule.
- A status has no defaults: its one writer says what it saw.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import yaml
from pydantic import JsonValue

from refit_api import names
from refit_api.dialect import Column
from refit_api.document import JsonObject, named, parts, string, strings, tables
from refit_api.manual import manual
from refit_api.v1alpha1 import KINDS, RefitGroup, WeightVersion

MOST_BYTES = 256 * 1024  # client-side apply copies the object into an annotation of at most this size
SAFE_INTEGER = 2**53  # larger ones come back rounded: a permanent diff

_KEPT = frozenset({
    "type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
})  # fmt: skip
_REWRITTEN = frozenset({"$ref", "$defs", "anyOf", "const", "title", "description", "default", "required", "properties", "items", "additionalProperties"})


class Unsayable(Exception):
    """A model says something that a CustomResourceDefinition cannot."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")


def structural(document: JsonObject, place: str) -> JsonObject:
    """The structural schema of a model's JSON schema. Raises Unsayable."""
    return _Converter(named(document, "$defs")).convert(document, place)


class _Converter:
    """Puts `definitions` in the place of references."""

    def __init__(self, definitions: dict[str, JsonObject]) -> None:
        self._definitions = definitions

    def convert(self, given: JsonObject, place: str) -> JsonObject:
        schema = self._resolved(given, place)
        if unknown := sorted(schema.keys() - _KEPT - _REWRITTEN):
            raise Unsayable(place, f"a structural schema cannot say {', '.join(unknown)}")
        made: JsonObject = {}
        if manual_text := " ".join(string(schema, "description").split()):  # line breaks are those of the source file
            made["description"] = manual_text
        made |= {key: value for key, value in schema.items() if key in _KEPT}
        if "const" in schema:
            made["enum"] = [schema["const"]]
        if (default := _without_blanks(schema.get("default"))) is not None:
            made["default"] = default
        made |= self._inside(schema, place)
        _bounded(made, place)
        return made

    def _resolved(self, schema: JsonObject, place: str) -> JsonObject:
        """Without references and without unions with null; what stands beside a reference wins over what it refers to."""
        while "$ref" in schema or "anyOf" in schema:
            beside = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf")}
            if "$ref" in schema:
                schema = self._definitions[str(schema["$ref"]).rpartition("/")[2]] | beside
                continue
            members = schema["anyOf"]
            assert isinstance(members, list)
            real = [member for member in members if isinstance(member, dict) and member.get("type") != "null"]
            if len(real) != 1:
                raise Unsayable(place, "unions are not allowed; an optional field may be `X | None`, nothing else")
            schema = real[0] | beside
        return schema

    def _inside(self, schema: JsonObject, place: str) -> JsonObject:
        made: JsonObject = {}
        properties = named(schema, "properties")
        more = schema.get("additionalProperties")
        if properties and isinstance(more, dict):
            raise Unsayable(place, "an object has either properties or additionalProperties")
        if properties:
            made["properties"] = {name: self._field(child, f"{place}.{name}") for name, child in properties.items()}
            if schema.get("required"):
                made["required"] = schema["required"]
        elif isinstance(more, dict):
            made["additionalProperties"] = self.convert(more, f"{place}.*")
        if isinstance(items := schema.get("items"), dict):
            made["items"] = self.convert(items, f"{place}[]")
        return made

    def _field(self, child: JsonObject, place: str) -> JsonObject:
        made = self.convert(child, place)
        if "description" not in made:
            raise Unsayable(place, "has no description: write its manual under the field")
        return made


def _bounded(made: JsonObject, place: str) -> None:
    """Raises Unsayable where the API server could not bound the cost of a rule, or would not give back what it was given."""
    kind = made.get("type")
    if kind == "string" and not made.keys() & {"maxLength", "enum"}:
        raise Unsayable(place, "a string needs max_length")
    if kind == "array" and not {"maxItems", "items", "x-kubernetes-list-type"} <= made.keys():
        raise Unsayable(place, "a list needs max_length, an item type and a list type (Items or ByType)")
    if (
        kind == "object"
        and not made.keys() & {"properties", "x-kubernetes-preserve-unknown-fields"}
        and not {"additionalProperties", "maxProperties"} <= made.keys()
    ):
        raise Unsayable(place, "an object needs fields, and a map needs max_length")
    if kind == "integer" and "format" not in made:
        raise Unsayable(place, "an integer is Int32 or Int64")
    if kind is None and "x-kubernetes-int-or-string" not in made:
        raise Unsayable(place, "has no type")
    for bound in ("minimum", "maximum"):
        if isinstance(limit := made.get(bound), (int, float)) and abs(limit) >= SAFE_INTEGER:
            raise Unsayable(place, f"{bound} {limit} comes back rounded: stay below 2**53")


def _without_blanks(default: JsonValue) -> JsonValue:
    """A default without nulls and empty parts: the API server refuses the first, and the second only repeat what absence means."""
    if isinstance(default, dict):
        kept: JsonObject = {key: inner for key, value in default.items() if (inner := _without_blanks(value)) is not None}
        return kept or None
    return None if default == [] else default


def _tell_defaults(schema: JsonObject) -> None:
    """`kubectl explain` shows no defaults, so the text does."""
    for _, part in parts(schema):
        default = part.get("default")
        if "description" in part and default not in (None, "") and not isinstance(default, dict):
            part["description"] = f"{part['description']} Default: {str(default).lower() if isinstance(default, bool) else default}."
        _tell_defaults(part)


def _without_defaults(schema: JsonValue) -> JsonValue:
    if isinstance(schema, dict):
        return {key: _without_defaults(value) for key, value in schema.items() if key != "default"}
    return [_without_defaults(value) for value in schema] if isinstance(schema, list) else schema


_READ = re.compile(r"\bself((?:\.[a-zA-Z]+(?!\w*\())+)")  # a path below self, without the function that is called on it


def check_rules(schema: JsonObject, place: str) -> None:
    """Raises Unsayable for a rule that reads a field which may be absent, or points at one that does not exist."""
    for entry in tables(schema, "x-kubernetes-validations"):
        rule, target = string(entry, "rule"), string(entry, "fieldPath")
        if target and _certainty(schema, target.lstrip(".").split(".")) is None:
            raise Unsayable(place, f"a rule points at {target}, which does not exist")
        for path in sorted(set(_READ.findall(rule))):
            steps = path.lstrip(".").split(".")
            asked = any(f"has(self.{'.'.join(steps[:end])})" in rule for end in range(1, len(steps) + 1))
            if steps[0] != "metadata" and not asked and not _certainty(schema, steps):
                raise Unsayable(place, f"a rule reads self{path}, which may be absent: give it a default, require it, or ask has()")
    for step, part in parts(schema):
        check_rules(part, f"{place}{step}")


def _certainty(schema: JsonObject, steps: list[str]) -> bool | None:
    """Whether the path is there in every object that the API server accepts; None if the schema has no such path."""
    certain = True
    for step in steps:
        properties = named(schema, "properties")
        if step not in properties:
            return None
        certain = certain and (step in strings(schema, "required") or "default" in properties[step])
        schema = properties[step]
    return certain


def crd(kind: type[RefitGroup] | type[WeightVersion]) -> JsonObject:
    """The CustomResourceDefinition of a kind. Raises Unsayable."""
    resource = kind.resource
    document = kind.model_json_schema(by_alias=True)
    properties = named(document, "properties")
    root: JsonObject = {key: document[key] for key in ("$defs", "description", "x-kubernetes-validations")}
    root |= {"type": "object", "properties": {"spec": properties["spec"], "status": properties["status"]}, "required": ["spec"]}
    schema = structural(root, resource.kind)
    made = named(schema, "properties")
    envelope: JsonObject = {name: {"type": "string", "description": text} for name, text in _ENVELOPE.items()}
    schema["properties"] = {**envelope, "metadata": {"type": "object"}, "spec": made["spec"], "status": _without_defaults(made["status"])}
    _tell_defaults(made["spec"])
    check_rules(schema, resource.kind)
    version: JsonObject = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in resource.columns],
        "subresources": {"status": {}, **({"scale": resource.scale} if resource.scale else {})},
    }
    if resource.selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in resource.selectable]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.singular,
                "shortNames": list(resource.short_names),
                "categories": list(resource.categories),
            },
            "scope": "Namespaced",
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }


_ENVELOPE = {
    "apiVersion": "Version of this representation of the object.",
    "kind": "The kind of object that this represents.",
}


def _column(column: Column) -> JsonObject:
    told: JsonObject = {"name": column.name, "type": column.type, "jsonPath": column.path, "description": column.description}
    return told | {"priority": 1} if column.wide else told


class _Plain(yaml.SafeDumper):
    """Without anchors: shared parts are written out."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def generated() -> dict[Path, str]:
    """Every generated file, by its path in the repository."""
    crds = [crd(kind) for kind in KINDS]
    files: dict[Path, str] = {}
    for kind, made in zip(KINDS, crds, strict=True):
        text = yaml.dump(made, Dumper=_Plain, sort_keys=False, width=160, allow_unicode=True)
        if len(text.encode()) >= MOST_BYTES:
            raise Unsayable(kind.resource.kind, f"{len(text.encode())} bytes; `kubectl apply` takes less than {MOST_BYTES}")
        files[Path("crds", f"{kind.resource.plural}.yaml")] = f"# Generated by `make gen` from crds/refit_api; do not edit.\n{text}"
    return files | {Path("docs/reference/api.md"): manual(crds)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m refit_api.crd", description="Write the CRDs and the reference of the two kinds.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the files that differ")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: the current folder)")
    options = parser.parse_args(arguments)
    stale = {path: text for path, text in generated().items() if not (options.root / path).is_file() or (options.root / path).read_text() != text}
    for path, text in stale.items():
        if not options.check:
            (options.root / path).parent.mkdir(parents=True, exist_ok=True)
            (options.root / path).write_text(text)
        sys.stdout.write(f"{path}: {'differs from the models; run make gen' if options.check else 'written'}\n")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

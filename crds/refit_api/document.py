"""Typed reading of JSON documents whose shape is known: what is not there reads as empty, what has another shape is a bug."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

JsonObject = dict[str, JsonValue]


def string(document: JsonObject, key: str) -> str:
    value = document.get(key, "")
    assert isinstance(value, str), (key, value)
    return value


def table(document: JsonObject, *keys: str) -> JsonObject:
    """The object under the path of keys."""
    for key in keys:
        value = document.get(key, {})
        assert isinstance(value, dict), (key, value)
        document = value
    return document


def tables(document: JsonObject, key: str) -> list[JsonObject]:
    """The objects of a list."""
    return [entry for entry in _list(document, key) if isinstance(entry, dict)]


def named(document: JsonObject, key: str) -> dict[str, JsonObject]:
    """The objects of an object, by name."""
    return {name: entry for name, entry in table(document, key).items() if isinstance(entry, dict)}


def strings(document: JsonObject, key: str) -> list[str]:
    return [entry for entry in _list(document, key) if isinstance(entry, str)]


def parts(schema: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """What a schema is made of: its fields as `.name`, its list items as `[]`."""
    for name, field in named(schema, "properties").items():
        yield f".{name}", field
    if "items" in schema:
        yield "[]", table(schema, "items")


def _list(document: JsonObject, key: str) -> list[JsonValue]:
    value = document.get(key, [])
    assert isinstance(value, list), (key, value)
    return value

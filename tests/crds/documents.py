"""Objects that every rule accepts, to be changed by a row of a table."""

from __future__ import annotations

import copy

from refit_api import names
from refit_api.document import JsonObject

PODS: JsonObject = {"spec": {"containers": [{"name": "main", "image": "example/main:1"}]}}


def merged(base: JsonObject, change: JsonObject) -> JsonObject:
    """JSON merge patch: objects are merged, None removes, everything else replaces."""
    result = copy.deepcopy(base)
    for key, value in change.items():
        below = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(below if isinstance(below, dict) else {}, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def group(change: JsonObject | None = None) -> JsonObject:
    """A RefitGroup that every rule accepts, changed."""
    base: JsonObject = {
        "apiVersion": names.API_VERSION,
        "kind": "RefitGroup",
        "metadata": {"name": "rules", "namespace": "default"},
        "spec": {"model": {"name": "m"}, "trainer": {"template": PODS}, "generators": {"template": PODS}},
    }
    return merged(base, change or {})


def weight_version(change: JsonObject | None = None) -> JsonObject:
    """A WeightVersion that every rule accepts, changed."""
    spec: JsonObject = {
        "groupRef": {"name": "rules"},
        "version": 12,
        "trainerStep": 3,
        "trainerRunId": "run.0",
        "expectedSlots": 2,
        "planKey": "p" * 64,
        "idempotencyKey": "run.0:3",
    }
    base: JsonObject = {
        "apiVersion": names.API_VERSION,
        "kind": "WeightVersion",
        "metadata": {"name": "rules-v000000012", "namespace": "default"},
        "spec": spec,
    }
    return merged(base, change or {})

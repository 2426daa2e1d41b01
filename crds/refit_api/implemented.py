"""What this release carries out. A field outside this table may only keep its default: it is refused in a `Stalled` condition, never silently ignored.

One line per field of RefitGroup.spec. `ANY` takes every value that the schema takes; a tuple lists the values that are carried out.
To implement a field is to add or widen its line; when every field is `ANY`, this module has done its work and goes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from refit_api.dialect import Part
from refit_api.v1alpha1 import RefitGroupSpec

ANY: Final = None

IMPLEMENTED: dict[str, tuple[object, ...] | None] = {
    "model.name": ANY,
    "model.revision": ANY,
    "trainer.template": ANY,
    "trainer.replicas": ANY,
    "trainer.redundancy": ANY,
    "trainer.snapshot": ANY,
    "trainer.onBusy": ANY,
    "generators.replicas": ANY,
    "generators.template": ANY,
    "generators.minAvailable": ANY,
    "generators.maxSurge": ANY,
    "generators.maxUnavailable": ANY,
    "generators.engine.kind": ANY,
    "generators.engine.staging": ANY,
    "generators.engine.keepPrevious": ANY,
    "generators.engine.relay": ANY,
    "generators.engine.kv": ANY,
    "generators.engine.pause": ANY,
    "generators.engine.pauseTimeoutSeconds": ANY,
    "fanout.topology": ANY,
    "fanout.degree": ANY,
    "fanout.maxReadersPerSource": ANY,
    "rollout.policy": ANY,
    "rollout.pinnedVersion": ANY,
    "rollout.maxConcurrent": ANY,
    "rollout.maxLag": ANY,
    "rollout.paused": ANY,
    "rollout.progressDeadlineSeconds": ANY,
    "rollout.onFailure": ANY,
    "versions.retain": ANY,
    "versions.recordEvery": ANY,
    "versions.publishDeadlineSeconds": ANY,
    "versions.leaseSeconds": ANY,
    "versions.drainSeconds": ANY,
    "verification.installed": ANY,
    "transport.kind": ANY,
    "restart.id": ANY,
    "suspend": ANY,
    "managedBy": ANY,
}


class Unimplemented(NamedTuple):
    """A field that asks for more than this release does; `field` is its path in the object."""

    field: str
    seen: str
    allowed: str

    @property
    def message(self) -> str:
        return f"{self.field}: {self.seen} is not implemented in this release; allowed: {self.allowed}"


def unimplemented(spec: RefitGroupSpec) -> list[Unimplemented]:
    """Every field of the spec that this release does not carry out as written, in the order of the manual."""
    return _below("", spec)


def _below(prefix: str, part: Part) -> list[Unimplemented]:
    found: list[Unimplemented] = []
    for name, field in type(part).model_fields.items():
        path, value = f"{prefix}{field.alias or name}", getattr(part, name)
        if path in IMPLEMENTED:
            allowed = IMPLEMENTED[path]
            if allowed is not ANY and value not in allowed:
                found.append(Unimplemented(f"spec.{path}", _shown(value), " or ".join(map(_shown, allowed))))
        elif isinstance(value, Part) and field.default is not None:
            found += _below(f"{path}.", value)
        elif value != field.default:
            allowed_text = "leave it out" if field.default in (None, ()) else _shown(field.default)
            found.append(Unimplemented(f"spec.{path}", _shown(value), allowed_text))
    return found


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, str)) else "a value"

"""Objects as the watch shows them -> facts. Small tuples are kept, not bodies; only a RefitGroup's spec is kept whole.

Pure. A body of an unexpected shape gives defaults rather than an error: it is the API server's object, not ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from refit_api import names
from refit_api.wire import Role, Select

from refit_operator.decide.conditions import seconds
from refit_operator.decide.facts import Child, Group, Pod, Record

Body = Mapping[str, Any]
_TROUBLES = frozenset(
    ("CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
)


def owner(body: Body) -> tuple[str, str]:
    """Name and uid of the RefitGroup that controls the object; empty when none does."""
    for reference in body.get("metadata", {}).get("ownerReferences") or ():
        if reference.get("kind") == "RefitGroup" and reference.get("controller") and reference.get("apiVersion", "").startswith(f"{names.GROUP}/"):
            return reference["name"], reference["uid"]
    return "", ""


def group(body: Body) -> Group:
    metadata = body["metadata"]
    return Group(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 1)),
        revision=_revision(metadata),
        deleting="deletionTimestamp" in metadata,
        status=body.get("status") or {},
    )


def record(body: Body) -> Record:
    metadata, spec = body["metadata"], body.get("spec") or {}
    return Record(
        name=metadata["name"],
        uid=metadata["uid"],
        number=int(spec.get("version", 0)),
        step=int(spec.get("trainerStep", 0)),
        run_id=str(spec.get("trainerRunId", "")),
        key=str(spec.get("idempotencyKey", "")),
        plan_key=str(spec.get("planKey", "")),
        slots=int(spec.get("expectedSlots", 0)),
        created=seconds(metadata["creationTimestamp"]),
        base=int(spec.get("baseVersion", 0)),
        select=_select(spec["select"]) if "select" in spec else None,
        hold=bool(spec.get("hold", False)),
        abort=bool(spec.get("abort", False)),
        deleted=seconds(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        finalized=names.FINALIZER in (metadata.get("finalizers") or ()),
        generation=int(metadata.get("generation", 1)),
        revision=_revision(metadata),
        status=body.get("status") or {},
    )


def _select(spec: Mapping[str, Any]) -> Select:
    return Select(tuple(spec.get("params", ())), tuple(spec.get("layers", ())), tuple(spec.get("layerGroups", ())))


def pod(body: Body) -> Pod:
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    labels, conditions = metadata.get("labels") or {}, {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
    gate = conditions.get(names.READINESS_GATE)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=Role(labels[names.LABEL_ROLE]),
        created=seconds(metadata["creationTimestamp"]),
        node=str(spec.get("nodeName", "")),
        ready=conditions.get("Ready") == "True",
        synced=None if gate is None else gate == "True",
        leaving="deletionTimestamp" in metadata,
        ended=status.get("phase") in ("Succeeded", "Failed"),
        template=str(labels.get(names.LABEL_TEMPLATE, "")),
        trouble=_trouble(status, conditions),
        ended_before=next((told for told in map(_last_end, _containers(status)) if told), ""),
    )


def child(body: Body, kind: str) -> Child:
    """`kind` is the watch's: listed items carry none."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    generation = int(metadata.get("generation", 0))
    failures = (c.get("message", "") for c in status.get("conditions") or () if c.get("type") == "ReplicaFailure" and c.get("status") == "True")
    return Child(
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        owner=owner(body)[1],
        wanted=int(spec.get("replicas", 0)),
        pods=int(status.get("replicas", 0)),
        updated=int(status.get("updatedReplicas", 0)),
        ready=int(status.get("readyReplicas", 0)),
        settled=int(status.get("observedGeneration", generation if kind not in ("Deployment", "StatefulSet") else 0)) >= generation,
        trouble=next(failures, ""),
        revision=_revision(metadata),
        generation=generation,
    )


def _revision(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get("resourceVersion", 0))


def _trouble(status: Body, conditions: Mapping[str, str]) -> str:
    """The first container that cannot run, or why the pod cannot be placed."""
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _TROUBLES:
            told = _last_end(container) or str(waiting.get("message", ""))
            return f"container {container.get('name')}: {waiting['reason']}" + (f": {told}" if told else "")
    if conditions.get("PodScheduled") == "False":
        told = next((c.get("message", "") for c in status.get("conditions") or () if c.get("type") == "PodScheduled"), "")
        return f"not scheduled: {told}"
    return ""


def _last_end(container: Body) -> str:
    """How the container before this one ended, with the last words of its termination message."""
    ended = (container.get("lastState") or {}).get("terminated") or {}
    if not ended:
        return ""
    told = str(ended.get("message", "")).strip()[-300:]
    count = int(container.get("restartCount", 0))
    return f"ended {count} time{'s' if count != 1 else ''}, last with exit code {ended.get('exitCode', '?')}" + (f": {told}" if told else "")


def _containers(status: Body) -> Iterable[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()

"""RefitGroup -> child objects, as plain data. Pure: the same spec gives the same bytes.

Invariants:
- what the user wrote in a pod template stays as it is: we add what docs/quickstart.md lists (labels, annotations, service account, volumes, mounts,
  environment, readiness gate, grace period, preStop hook, termination message policy), each only where the user has none of the same name, our own labels
  and annotations excepted; never args, commands, images or resources. A template of the wrong shape is passed on: the API server judges it;
- `replicas` never enters the template hash, so scaling never restarts pods; weight versions are nowhere in here, so refits never restart pods;
- settings that a process reads once at its start are part of the template (as a hash), so that changing them replaces the pods of that role;
- names: `<group>-trainer`, `<group>-generator`, and `<group>-refit` for Service, ConfigMap and ServiceAccount. All belong to the group (ownerReferences).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from refit_api import mounted, names
from refit_api.v1alpha1 import RefitGroupSpec

from refit_operator.decide.facts import Group

Manifest = dict[str, Any]

ANNOTATION_RESTART = f"{names.GROUP}/restart-id"
ANNOTATION_SETTINGS = f"{names.GROUP}/settings-hash"
_GRACE_SPARE_SECONDS = 15  # after the drain: the process's own shutdown
_TRAINER_GRACE_SECONDS = 105  # what the defaults of drainSeconds and leaseSeconds make; a new value in the template would replace trainers and end their run
_TOKEN_SECONDS = 600  # the shortest that the API server grants
_VOLUME_SETTINGS = "refit-settings"
_VOLUME_TOKEN = "refit-token"


def generator_name(group: str) -> str:
    return f"{group}-{names.ROLE_GENERATOR}"


def trainer_name(group: str) -> str:
    return f"{group}-{names.ROLE_TRAINER}"


def shared_name(group: str) -> str:
    """Of the headless Service, the ConfigMap and the ServiceAccount."""
    return f"{group}-refit"


def children(group: Group, spec: RefitGroupSpec, catalog: str, ca: str) -> tuple[Manifest, ...]:
    """All child objects, in the order in which they are applied: what pods need comes before the pods."""
    made = [_service_account(group), _settings(group, spec, catalog, ca), _service(group)]
    made += workloads(group, spec)
    if spec.generators.template is not None:
        made.append(_disruption_budget(group, spec))
    return tuple(made)


def workloads(group: Group, spec: RefitGroupSpec) -> tuple[Manifest, ...]:
    """What runs pods: also what the API server is asked about in a dry run."""
    made = []
    if spec.trainer.template is not None:
        made.append(_trainers(group, spec, spec.trainer.template))
    if spec.generators.template is not None:
        made.append(_generators(group, spec, spec.generators.template))
    return tuple(made)


def template_hash(workload: Mapping[str, Any]) -> str:
    """The hash that a workload's pods carry as a label."""
    return str(workload["spec"]["template"]["metadata"]["labels"][names.LABEL_TEMPLATE])


def mounted_settings(group: Group, spec: RefitGroupSpec, catalog: str) -> mounted.Mounted:
    """What pods of the group read from the ConfigMap."""
    words = spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    return mounted.Mounted(
        group=mounted.Group(namespace=group.namespace, name=group.name),
        model=mounted.Model.model_validate(words["model"]),
        catalog=catalog,
        trainer=_part(mounted.Trainer, words["trainer"]),
        engine=_part(mounted.Engine, words["generators"]["engine"]),
        rollout=_part(mounted.Rollout, words["rollout"]),
        versions=_part(mounted.Versions, words["versions"]),
        verification=_part(mounted.Verification, words["verification"]),
        transport=_part(mounted.TransportSettings, words["transport"]),
    )


def _part(part: type[Any], words: Mapping[str, Any]) -> Any:
    """The words that pods need, of those that the spec has."""
    known = {field.alias or name for name, field in part.model_fields.items()}
    return part.model_validate({word: value for word, value in words.items() if word in known})


def _object(kind: str, api: str, group: Group, name: str, role: str | None, **body: Any) -> Manifest:
    labels = {names.LABEL_GROUP: group.name, "app.kubernetes.io/managed-by": names.FIELD_MANAGER}
    owner = {"apiVersion": names.API_VERSION, "kind": "RefitGroup", "name": group.name, "uid": group.uid, "controller": True, "blockOwnerDeletion": True}
    metadata = {
        "name": name,
        "namespace": group.namespace,
        "labels": {**labels, **({names.LABEL_ROLE: role} if role else {})},
        "ownerReferences": [owner],
    }
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def _pods_of(group: Group, role: str) -> dict[str, str]:
    return {names.LABEL_GROUP: group.name, names.LABEL_ROLE: role}


def _service_account(group: Group) -> Manifest:
    return _object("ServiceAccount", "v1", group, shared_name(group.name), None, automountServiceAccountToken=False)


def _settings(group: Group, spec: RefitGroupSpec, catalog: str, ca: str) -> Manifest:
    data = {"settings.json": mounted_settings(group, spec, catalog).model_dump_json(by_alias=True, exclude_none=True, indent=2), "ca.crt": ca}
    return _object("ConfigMap", "v1", group, shared_name(group.name), None, data=data)


def _service(group: Group) -> Manifest:
    """Gives trainer pods their stable DNS names; ranks look for each other long before they are ready."""
    ports = [{"name": "refit", "port": names.WORKER_PORT, "protocol": "TCP"}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {names.LABEL_GROUP: group.name}, "ports": ports}
    return _object("Service", "v1", group, shared_name(group.name), None, spec=spec)


def _trainers(group: Group, spec: RefitGroupSpec, template: Mapping[str, Any]) -> Manifest:
    """All ranks start together and are replaced together (OnDelete: the operator deletes them at once): half a job of either template can do nothing."""
    body = {
        "replicas": 0 if spec.suspend else spec.trainer.replicas,
        "serviceName": shared_name(group.name),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": _pods_of(group, names.ROLE_TRAINER)},
        "template": _pod_template(group, spec, names.ROLE_TRAINER, template),
    }
    return _object("StatefulSet", "apps/v1", group, trainer_name(group.name), names.ROLE_TRAINER, spec=body)


def _generators(group: Group, spec: RefitGroupSpec, template: Mapping[str, Any]) -> Manifest:
    generators = spec.generators
    body = {
        "replicas": 0 if spec.suspend else generators.replicas,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": generators.max_surge, "maxUnavailable": generators.max_unavailable}},
        "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": _pods_of(group, names.ROLE_GENERATOR)},
        "template": _pod_template(group, spec, names.ROLE_GENERATOR, template),
    }
    return _object("Deployment", "apps/v1", group, generator_name(group.name), names.ROLE_GENERATOR, spec=body)


def _disruption_budget(group: Group, spec: RefitGroupSpec) -> Manifest:
    """Keeps minAvailable. With no pod to spare one at a time may still be evicted: a budget that allows none would block node drains for ever."""
    least = spec.generators.min_available
    spare = spec.generators.replicas > resolved(least, spec.generators.replicas)
    body = {
        **({"minAvailable": least} if spare else {"maxUnavailable": 1}),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _pods_of(group, names.ROLE_GENERATOR)},
    }
    return _object("PodDisruptionBudget", "policy/v1", group, generator_name(group.name), names.ROLE_GENERATOR, spec=body)


def resolved(amount: int | str, whole: int) -> int:
    """An int-or-percent of `whole`, rounded up, as Kubernetes rounds what must be available."""
    return amount if isinstance(amount, int) else -(-int(amount.removesuffix("%")) * whole // 100)


def _pod_template(group: Group, spec: RefitGroupSpec, role: str, template: Mapping[str, Any]) -> Manifest:
    made: Manifest = deepcopy(dict(template))
    metadata = made.setdefault("metadata", {})
    pod = made.setdefault("spec", {})
    if not (isinstance(metadata, dict) and isinstance(pod, dict)):
        return made
    annotations = {ANNOTATION_SETTINGS: _digest(_start_settings(group, spec, role))}
    if spec.restart.id:
        annotations[ANNOTATION_RESTART] = spec.restart.id
    metadata["annotations"] = {**(metadata.get("annotations") or {}), **annotations}
    metadata["labels"] = {**(metadata.get("labels") or {}), **_pods_of(group, role)}
    _inject(group, spec, role, pod)
    metadata["labels"][names.LABEL_TEMPLATE] = _digest(made)
    return made


def _inject(group: Group, spec: RefitGroupSpec, role: str, pod: Manifest) -> None:
    if not (pod.get("serviceAccountName") or pod.get("serviceAccount")):  # who names an account wants its token: that is left to the account
        pod["serviceAccountName"] = shared_name(group.name)
        pod.setdefault("automountServiceAccountToken", False)
    _add(pod, "volumes", "name", _volumes(group))
    for container in (*_items(pod, "initContainers"), *_items(pod, "containers")):
        _add(container, "env", "name", _environment())
        _add(container, "volumeMounts", "mountPath", _mounts())
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    drain = spec.versions.drain_seconds + spec.versions.lease_seconds + _GRACE_SPARE_SECONDS
    pod.setdefault("terminationGracePeriodSeconds", drain if role == names.ROLE_GENERATOR else _TRAINER_GRACE_SECONDS)
    if role == names.ROLE_GENERATOR:
        _add(pod, "readinessGates", "conditionType", [{"conditionType": names.READINESS_GATE}])
        for container in _items(pod, "containers")[: 1 if spec.rollout.policy != "Manual" else 0]:  # its route is the agent's, which Manual has not
            _prestop(container)


def _prestop(container: Manifest) -> None:
    """The agent's HTTP port lives in the engine's API server: an HTTP hook needs no program in the image and starts none in a pod under pressure."""
    port = _http_port(container)
    lifecycle = container.setdefault("lifecycle", {})
    if port is not None and isinstance(lifecycle, dict):
        lifecycle.setdefault("preStop", {"httpGet": {"path": names.PRESTOP_PATH, "port": port}})


def _http_port(container: Mapping[str, Any]) -> int | str | None:
    """Where the readiness probe asks, else the port named `http`, else the first."""
    probe = container.get("readinessProbe")
    probed = probe.get("httpGet") if isinstance(probe, dict) else None
    port = probed.get("port") if isinstance(probed, dict) else None
    if isinstance(port, int | str):
        return port
    ports = [p for p in _items(container, "ports") if isinstance(p.get("containerPort"), int)]
    named = [p for p in ports if p.get("name") == "http"]
    return next((int(p["containerPort"]) for p in (*named, *ports)), None)


def _items(holder: Mapping[str, Any], field: str) -> list[Manifest]:
    found = holder.get(field)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _add(holder: Manifest, field: str, key: str, ours: Iterable[Manifest]) -> None:
    """Appends those of ours that the user has no item of the same key for."""
    present = holder.get(field)
    if present is not None and not isinstance(present, list):
        return
    taken = {item.get(key) for item in _items(holder, field)}
    holder[field] = [*(present or []), *(item for item in ours if item[key] not in taken)]


def _environment() -> list[Manifest]:
    """Who the pod is, as `refit_runtime.settings.Pod` reads it."""
    paths = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid", "POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP"}
    return [{"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}} for name, path in paths.items()]


def _volumes(group: Group) -> list[Manifest]:
    directory, token = names.TOKEN_FILE.rsplit("/", 1)
    assert directory, "the token lies in a directory of its own"
    projected = {"serviceAccountToken": {"audience": names.AUDIENCE, "expirationSeconds": _TOKEN_SECONDS, "path": token}}
    return [
        {"name": _VOLUME_SETTINGS, "configMap": {"name": shared_name(group.name)}},
        {"name": _VOLUME_TOKEN, "projected": {"sources": [projected]}},
    ]


def _mounts() -> list[Manifest]:
    return [
        {"name": _VOLUME_SETTINGS, "mountPath": names.SETTINGS_DIR, "readOnly": True},
        {"name": _VOLUME_TOKEN, "mountPath": names.TOKEN_FILE.rsplit("/", 1)[0], "readOnly": True},
    ]


def _start_settings(group: Group, spec: RefitGroupSpec, role: str) -> Any:
    settings = mounted_settings(group, spec, "catalog:1")
    if role == names.ROLE_TRAINER:
        return [part.model_dump(mode="json") for part in (settings.model, settings.trainer, settings.transport)]
    driven = [] if settings.rollout.managed else ["driven"]
    return [part.model_dump(mode="json") for part in (settings.model, settings.engine, settings.transport)] + driven


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:10]

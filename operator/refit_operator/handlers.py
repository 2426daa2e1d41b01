"""kopf: indices and `on.event` only. A handler puts the owning group's key into the queue; nothing that can fail lives here.

All are coroutines: kopf runs plain functions in threads. kopf keeps the watches and fills the indices before any handler runs; it writes nothing:
no finalizer, no annotation, no event. Wired objects come with the registry, once before start; indices reach `Watch` in `on.startup`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kopf
from refit_api import names
from refit_api.wire import GroupRef, Role

from refit_operator import shown, telemetry
from refit_operator.decide.facts import Child, Group, Pod, Record
from refit_operator.ports import Manifest, Seen

_CHILDREN = (
    ("apps", "v1", "deployments", "Deployment"),
    ("apps", "v1", "statefulsets", "StatefulSet"),
    ("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    ("", "v1", "services", "Service"),
    ("", "v1", "configmaps", "ConfigMap"),
    ("", "v1", "serviceaccounts", "ServiceAccount"),
)
_OURS = {names.LABEL_GROUP: kopf.PRESENT}


@dataclass(slots=True)
class Watch:
    """`ports.Watched` and `ports.PodIndex` over kopf's indices; empty until `fill`."""

    _groups: Mapping[GroupRef, Collection[tuple[Group, Manifest]]] = field(default_factory=dict)
    _records: Mapping[GroupRef, Collection[Record]] = field(default_factory=dict)
    _pods: Mapping[GroupRef, Collection[Pod]] = field(default_factory=dict)
    _children: Mapping[GroupRef, Collection[Child]] = field(default_factory=dict)
    _uids: Mapping[tuple[str, str, str], Collection[GroupRef]] = field(default_factory=dict)

    def fill(self, groups: Any, records: Any, pods: Any, children: Any, uids: Any) -> None:
        self._groups, self._records, self._pods, self._children, self._uids = groups, records, pods, children, uids

    def see(self, key: GroupRef) -> Seen:
        group, manifest = next(iter(self._groups.get(key, ())), (None, None))
        return Seen(group, manifest, tuple(self._pods.get(key, ())), tuple(self._children.get(key, ())), tuple(self._records.get(key, ())))

    def role(self, key: GroupRef, pod_name: str, pod_uid: str) -> Role | None:
        return next((pod.role for pod in self._pods.get(key, ()) if pod.name == pod_name and pod.uid == pod_uid and not pod.ended), None)

    def group(self, namespace: str, pod_name: str, pod_uid: str) -> GroupRef | None:
        return next(iter(self._uids.get((namespace, pod_name, pod_uid), ())), None)

    def leaving(self, key: GroupRef, pod_uid: str) -> bool:
        return any(pod.leaving for pod in self._pods.get(key, ()) if pod.uid == pod_uid)


@dataclass(slots=True)
class Wiring:
    """What the handlers are given. `put`: into the queue."""

    watch: Watch
    put: Callable[[GroupRef], None]


def registry(wiring: Wiring, login: Callable[..., kopf.ConnectionInfo | None]) -> kopf.OperatorRegistry:
    """A registry of its own for each operator, so that tests may run several."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(login)
    kopf.on.startup(registry=made)(_started(wiring))
    _groups(made, wiring)
    _versions(made, wiring)
    _pods(made, wiring)
    _children(made, wiring)
    return made


def configure(settings: kopf.OperatorSettings) -> None:
    """Watches are told apart from dead ones; the operator exits well within its grace period."""
    settings.posting.enabled = False
    settings.scanning.disabled = True  # needs rights to watch CRDs; `wiring` waits for the kinds, and a watch of one that went away ends the process
    settings.networking.request_timeout = 30.0
    settings.watching.server_timeout = 300  # sent as written: the API server takes whole seconds only
    settings.watching.chunk_size = 500
    settings.queueing.idle_timeout = 1.0  # a worker for each object; a limit would make a first list of thousands wait for idle ones
    settings.process.ultimate_exiting_timeout = 10.0
    for group, version, plural, _ in (*_CHILDREN, ("", "v1", "pods", "Pod")):
        selector = (f"{group}/{version}", plural) if group else (version, plural)
        settings.watching.label_selectors[selector] = names.LABEL_GROUP


def _started(wiring: Wiring) -> Callable[..., Coroutine[Any, Any, None]]:
    async def started(groups: Any, records: Any, pods: Any, children: Any, uids: Any, **_: Any) -> None:
        wiring.watch.fill(groups, records, pods, children, uids)

    return started


def _groups(made: kopf.OperatorRegistry, wiring: Wiring) -> None:
    resource = (names.GROUP, names.VERSION, "refitgroups")

    async def groups(body: kopf.Body, **_: Any) -> dict[GroupRef, tuple[Group, Manifest]]:
        return {_own(body): (shown.group(body), {"spec": _plain(body.get("spec"))})}

    kopf.index(*resource, id="groups", registry=made)(groups)
    _event(made, wiring, resource, _own, "refitgroups")


def _versions(made: kopf.OperatorRegistry, wiring: Wiring) -> None:
    resource = (names.GROUP, names.VERSION, "weightversions")

    def key(body: kopf.Body) -> GroupRef:
        return GroupRef(body["metadata"]["namespace"], body["spec"]["groupRef"]["name"])

    async def records(body: kopf.Body, **_: Any) -> dict[GroupRef, Record]:
        return {key(body): shown.record(_plain(body))}

    kopf.index(*resource, id="records", registry=made)(records)
    _event(made, wiring, resource, key, "weightversions")


def _pods(made: kopf.OperatorRegistry, wiring: Wiring) -> None:
    resource = ("", "v1", "pods")
    roles = {**_OURS, names.LABEL_ROLE: kopf.PRESENT}

    async def pods(body: kopf.Body, **_: Any) -> dict[GroupRef, Pod]:
        return {_labelled(body): shown.pod(body)} if _has_role(body) else {}

    async def uids(body: kopf.Body, **_: Any) -> dict[tuple[str, str, str], GroupRef]:
        metadata = body["metadata"]
        return {(metadata["namespace"], metadata["name"], metadata["uid"]): _labelled(body)} if _has_role(body) else {}

    kopf.index(*resource[1:], id="pods", labels=roles, registry=made)(pods)
    kopf.index(*resource[1:], id="uids", labels=roles, registry=made)(uids)
    _event(made, wiring, resource[1:], _labelled, "pods", labels=roles)


def _children(made: kopf.OperatorRegistry, wiring: Wiring) -> None:
    for group, version, plural, kind in _CHILDREN:
        resource = (group, version, plural) if group else (version, plural)

        async def children(body: kopf.Body, kind: str = kind, **_: Any) -> dict[GroupRef, Child]:
            return {_labelled(body): shown.child(body, kind)}

        kopf.index(*resource, id="children", labels=_OURS, registry=made)(children)
        _event(made, wiring, resource, _labelled, plural, labels=_OURS)


def _event(made: kopf.OperatorRegistry, wiring: Wiring, resource: Iterable[str], key: Callable[[kopf.Body], GroupRef], plural: str, labels: Any = None) -> None:
    async def happened(body: kopf.Body, **_: Any) -> None:
        telemetry.WATCH_SEEN.labels(plural).set_to_current_time()
        wiring.put(key(body))

    kopf.on.event(*resource, id=f"wake-{plural}", labels=labels, registry=made)(happened)


def _own(body: kopf.Body) -> GroupRef:
    return GroupRef(body["metadata"]["namespace"], body["metadata"]["name"])


def _labelled(body: kopf.Body) -> GroupRef:
    return GroupRef(body["metadata"]["namespace"], body["metadata"]["labels"][names.LABEL_GROUP])


def _has_role(body: kopf.Body) -> bool:
    return body["metadata"]["labels"].get(names.LABEL_ROLE) in {role.value for role in Role}


def _plain(value: Any) -> Any:
    """kopf's views as plain data: facts are compared and kept."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value

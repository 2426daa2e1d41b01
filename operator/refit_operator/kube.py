"""The one client of the Kubernetes API: `ports.Cluster` and `ports.TokenAuthority` over `kubernetes.aio`, with plain data both ways.

Answers become the error tree here and nowhere else:
- what the author must change (400, 403 of a workload, 422, and 500 "failed to create typed patch object") is SpecError with the server's words;
- what may pass (409, 429, 5xx, no connection, a namespace that is ending) is PeerUnavailable with the time to wait; missing rights are Denied.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import kopf
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from refit_api import names
from refit_api.errors import Denied, PeerUnavailable, SpecError
from refit_api.names import Reason
from refit_api.wire import GroupRef

from refit_operator import shown, telemetry
from refit_operator.decide.actions import Announce
from refit_operator.decide.conditions import stamp
from refit_operator.decide.facts import Verdict
from refit_operator.ports import Manifest, Stamp

_PATHS = {
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Secret": ("/api/v1", "secrets"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "RefitGroup": (f"/apis/{names.API_VERSION}", "refitgroups"),
    "WeightVersion": (f"/apis/{names.API_VERSION}", "weightversions"),
    "Event": ("/apis/events.k8s.io/v1", "events"),
}
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_TYPED_PATCH = "failed to create typed patch object"  # server-side apply's answer to unknown fields and wrong types, with code 500
_NOTE_LIMIT = 1024
_SYNCED_COST = "100"  # of two pods, the one without weights goes first


class Refused(Exception):
    """An answer above 299, before it is translated. Stays inside this module."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after


async def connect(kubeconfig: Path | None) -> ApiClient:
    """In the cluster by the mounted service account, else by a kubeconfig. Raises SpecError."""
    configuration = Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        place = kubeconfig if kubeconfig is not None else "the pod's service account"
        raise SpecError(f"no way to the API server by {place}: {error}; run in a cluster, or set REFIT_OPERATOR_KUBECONFIG") from error
    configuration.retries = None  # the queue retries
    return ApiClient(configuration)


def connection(client: ApiClient, **_: object) -> kopf.ConnectionInfo:
    """The same server and identity for kopf's watches."""
    known = client.configuration
    return kopf.ConnectionInfo(
        server=known.host,
        ca_path=known.ssl_ca_cert,
        certificate_path=known.cert_file,
        private_key_path=known.key_file,
        token=str(known.api_key.get("BearerToken", "")).removeprefix("Bearer ") or None,
    )


class KubeCluster:
    """Every request has a deadline."""

    def __init__(self, client: ApiClient, timeout: float = 30.0) -> None:
        self._client = client
        self._timeout = timeout

    async def close(self) -> None:
        await self._client.close()

    # --- children -------------------------------------------------------------------------------------------------------------

    async def claim(self, manifest: Manifest) -> bool:
        metadata = manifest["metadata"]
        try:
            found = await self._call("GET", _object(manifest["kind"], metadata["namespace"], metadata["name"]))
        except Refused as refusal:
            if refusal.code == 404:
                return True
            raise translated(refusal) from refusal
        (wanted,) = metadata["ownerReferences"]
        name, uid = shown.owner(found)
        if name == wanted["name"]:
            return bool(uid == wanted["uid"])
        told = f"{manifest['kind']} {metadata['name']} is in namespace {metadata['namespace']} already and does not belong to this group"
        raise SpecError(f"{told}: delete it, or give the group another name", reason=Reason.NAME_TAKEN)

    async def apply(self, manifest: Manifest) -> Stamp:
        metadata = manifest["metadata"]
        path = _object(manifest["kind"], metadata["namespace"], metadata["name"])
        return _stamp(await self.request("PATCH", path, manifest, _APPLY, fieldManager=names.FIELD_MANAGER, force="true"))

    async def dry_run(self, manifest: Manifest) -> Verdict:
        metadata = {**manifest["metadata"], "generateName": f"{manifest['metadata']['name']}-"}
        del metadata["name"]
        path = _objects(manifest["kind"], metadata["namespace"])
        try:
            await self._call("POST", path, {**manifest, "metadata": metadata}, dryRun="All", fieldValidation="Strict", fieldManager=names.FIELD_MANAGER)
        except Refused as refusal:
            error = translated(refusal)
            if isinstance(error, SpecError):
                return Verdict(False, error.message)
            raise error from refusal
        return Verdict(True)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", _object(kind, namespace, name), options)
        except Refused as refusal:
            if refusal.code not in (404, 409):  # gone, or another one by now
                raise translated(refusal) from refusal

    # --- status and records ---------------------------------------------------------------------------------------------------

    async def write_status(self, kind: str, namespace: str, name: str, uid: str, status: Manifest) -> Stamp:
        body = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name, "namespace": namespace, "uid": uid}, "status": status}
        path = f"{_object(kind, namespace, name)}/status"
        try:
            return _stamp(await self._call("PATCH", path, body, _APPLY, fieldManager=names.FIELD_MANAGER, force="true"))
        except Refused as refusal:
            if refusal.code in (404, 409):  # gone, or another one by now
                return Stamp(0, 0)
            raise translated(refusal) from refusal

    async def create_record(self, manifest: Manifest) -> None:
        try:
            await self._call("POST", _objects("WeightVersion", manifest["metadata"]["namespace"]), manifest, fieldManager=names.FIELD_MANAGER)
        except Refused as refusal:
            if refusal.reason != "AlreadyExists":
                raise translated(refusal) from refusal

    async def release_record(self, namespace: str, name: str, uid: str) -> None:
        path = _object("WeightVersion", namespace, name)
        try:
            metadata = (await self._call("GET", path))["metadata"]
            if metadata["uid"] != uid:
                return
            others = [finalizer for finalizer in metadata.get("finalizers", ()) if finalizer != names.FINALIZER]
            body = {"metadata": {"uid": uid, "resourceVersion": metadata["resourceVersion"], "finalizers": others}}
            await self._call("PATCH", path, body, _MERGE)
        except Refused as refusal:
            if refusal.code != 404:
                raise translated(refusal) from refusal

    # --- pods and events ------------------------------------------------------------------------------------------------------

    async def mark_pod(self, namespace: str, name: str, uid: str, synced: bool, message: str, now: float) -> None:
        gate = {
            "type": names.READINESS_GATE,
            "status": "True" if synced else "False",
            "reason": "Synced" if synced else "NotSynced",
            "message": message,
            "lastTransitionTime": stamp(now),
        }
        cost = {"metadata": {"uid": uid, "annotations": {names.POD_DELETION_COST: _SYNCED_COST if synced else None}}}
        path = _object("Pod", namespace, name)
        try:
            await self._call("PATCH", path, cost, _MERGE)
            await self._call("PATCH", f"{path}/status", {"metadata": {"uid": uid}, "status": {"conditions": [gate]}}, _STRATEGIC)
        except Refused as refusal:
            if refusal.code not in (404, 409):
                raise translated(refusal) from refusal

    async def post_event(self, namespace: str, event: Announce, now: float) -> None:
        at = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        regarding = {"apiVersion": names.API_VERSION, "kind": event.kind, "name": event.name, "namespace": namespace, "uid": event.uid}
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": f"{event.name[:40]}-", "namespace": namespace},
            "eventTime": at,
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "action": "Reconcile",
            "note": event.note[:_NOTE_LIMIT],
            "regarding": regarding,
            "reportingController": f"{names.GROUP}/operator",
            "reportingInstance": names.FIELD_MANAGER,
        }
        await self.request("POST", _objects("Event", namespace), body)

    # --- kinds ----------------------------------------------------------------------------------------------------------------

    async def served(self) -> frozenset[str]:
        """The plurals of our kinds that the API server has. The list of groups fills a moment later than what it lists, and watchers begin with it."""
        groups = (await self.request("GET", "/apis"))["groups"]
        if not any(version["groupVersion"] == names.API_VERSION for group in groups for version in group["versions"]):
            return frozenset()
        try:
            found = await self._call("GET", f"/apis/{names.API_VERSION}")
        except Refused as refusal:
            if refusal.code == 404:
                return frozenset()
            raise translated(refusal) from refusal
        return frozenset(resource["name"] for resource in found["resources"])

    # --- tokens and secrets ---------------------------------------------------------------------------------------------------

    async def signing_keys(self) -> Mapping[str, Any]:
        return await self.request("GET", "/openid/v1/jwks")

    async def issuer(self) -> str:
        return str((await self.request("GET", "/.well-known/openid-configuration"))["issuer"])

    async def review(self, token: str, audience: str) -> Mapping[str, Any] | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token, "audiences": [audience]}}
        status = (await self.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body)).get("status", {})
        accepted = status.get("authenticated") and audience in status.get("audiences", ())
        return dict(status["user"]) if accepted else None

    async def may_get(self, user: Mapping[str, Any], key: GroupRef) -> bool:
        asked = {"group": names.GROUP, "resource": "refitgroups", "verb": "get", "namespace": key.namespace, "name": key.name}
        who = {"user": user.get("username", ""), "groups": user.get("groups", []), "uid": user.get("uid", ""), "extra": user.get("extra", {})}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {**who, "resourceAttributes": asked}}
        answer = await self.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        return bool(answer.get("status", {}).get("allowed"))

    async def read_secret(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """The whole object, or None."""
        try:
            return await self._call("GET", _object("Secret", namespace, name))
        except Refused as refusal:
            if refusal.code == 404:
                return None
            raise translated(refusal) from refusal

    async def write_secret(self, manifest: Manifest) -> None:
        """Creates it, or replaces the one whose resourceVersion the manifest names."""
        metadata = manifest["metadata"]
        if "resourceVersion" in metadata:
            await self.request("PUT", _object("Secret", metadata["namespace"], metadata["name"]), manifest)
        else:
            await self.request("POST", _objects("Secret", metadata["namespace"]), manifest)

    # --- requests -------------------------------------------------------------------------------------------------------------

    async def request(self, method: str, path: str, body: Any = None, content: str = "application/json", **query: str) -> dict[str, Any]:
        """One request with its failure translated."""
        try:
            return await self._call(method, path, body, content, **query)
        except Refused as refusal:
            raise translated(refusal) from refusal

    async def _call(self, method: str, path: str, body: Any = None, content: str = "application/json", **query: str) -> dict[str, Any]:
        headers = {"Content-Type": content, "Accept": "application/json, */*"}  # key sets have a type of their own
        resource = f"{path}?{urlencode(query)}" if query else path
        try:
            request = await self._client.param_serialize(method, resource, header_params=headers, body=body, auth_settings=["BearerToken"])
            answer = await self._client.call_api(*request, _request_timeout=self._timeout)
            text = await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            telemetry.REQUESTS.labels(method, "none").inc()
            raise PeerUnavailable(f"the API server does not answer {method} {path}: {error or type(error).__name__}", retry_after=1.0) from error
        telemetry.REQUESTS.labels(method, str(answer.status)).inc()
        told = _json(text)
        if answer.status > 299:
            raise Refused(answer.status, str(told.get("reason", "")), str(told.get("message", text[:300])), _retry_after(answer.getheader("Retry-After")))
        return told


def _objects(kind: str, namespace: str) -> str:
    prefix, plural = _PATHS[kind]
    return f"{prefix}/namespaces/{namespace}/{plural}"


def _object(kind: str, namespace: str, name: str) -> str:
    return f"{_objects(kind, namespace)}/{name}"


def _stamp(written: Mapping[str, Any]) -> Stamp:
    return Stamp(int(written["metadata"]["resourceVersion"]), int(written["metadata"].get("generation", 0)))


def _json(text: bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _retry_after(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdigit() else None


def translated(refusal: Refused) -> SpecError | PeerUnavailable | Denied:
    message = f"the API server answers {refusal.code} {refusal.reason}: {refusal.message}"
    if refusal.code in (400, 422) or (refusal.code == 500 and _TYPED_PATCH in refusal.message):
        return SpecError(refusal.message)
    if refusal.code == 403 and "is being terminated" in refusal.message:
        return PeerUnavailable(message, retry_after=5.0)
    if refusal.code == 403 and "cannot " not in refusal.message:  # admission, not missing rights
        return SpecError(refusal.message)
    if refusal.code in (401, 403):
        return Denied(f"{message}. The operator lacks a right: apply its RBAC again", retry_after=30.0)
    return PeerUnavailable(message, retry_after=refusal.retry_after)

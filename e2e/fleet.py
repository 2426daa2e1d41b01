"""One RefitGroup's world as a story sees it: apply, let the trainer publish, look at generators, kill, wait."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refit_api import names

from e2e.cluster.pod_packages import workloads
from e2e.groups import CONTROL, HTTP_PORT, Object, Pods, refit_group
from e2e.installation import Installation
from e2e.kubectl import Kubectl, KubectlError, condition, eventually

GROUP = "tiny"
TRAINER = f"{GROUP}-trainer-0"
START_SECONDS = 300.0  # torch, Megatron and an engine start on a busy machine
MOST_VERSIONS = 1000  # of one trainer pod; stories allow them one by one
ANY_PHASE = ("Publishing", "Ready", "Releasing", "Released", "Failed")


@dataclass(frozen=True)
class Fleet:
    """The group is called `tiny` and lives in a namespace of its own."""

    installation: Installation
    namespace: str
    pods_of: Pods

    @staticmethod
    def create(installation: Installation, namespace: str) -> Fleet:
        kubectl, pods = installation.kubectl, installation.pods
        folder = installation.exports / namespace
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # pods run as a user of their own
        kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(workloads(namespace)))
        return Fleet(installation, namespace, Pods(pods.image, pods.packages, folder))

    @property
    def exports(self) -> Path:
        """The trainer's checkpoints, by version number; a folder of the node, read here."""
        assert self.pods_of.exports is not None
        return self.pods_of.exports

    @property
    def kubectl(self) -> Kubectl:
        return self.installation.kubectl

    def apply(self, replicas: int = 1, **spec: Any) -> None:
        """A custom-engine group whose trainer publishes only what `allow` lets it."""
        trainer = self.pods_of.trainer(MOST_VERSIONS, controlled=True, TRAINER_INTERVAL_SECONDS="0.5", TRAINER_STEPS="1")
        self.kubectl.apply(refit_group(GROUP, self.namespace, trainer, self.pods_of.custom_engine(), replicas, **spec))

    def patch(self, spec: Object) -> None:
        self.kubectl("patch", "refitgroup", GROUP, "-n", self.namespace, "--type=merge", "-p", json.dumps({"spec": spec}))

    def allowed(self) -> int:
        """How many versions the trainer's pod may publish by now."""
        said = self._in_trainer(f"cat {CONTROL}/allowed 2>/dev/null || echo 0")
        return int(said)

    def allow(self, count: int) -> None:
        """Lets the trainer publish `count` versions in all, counted from its pod's start."""
        self._in_trainer(f"echo {count} > {CONTROL}/.allowed && mv {CONTROL}/.allowed {CONTROL}/allowed")

    def allow_one_more(self) -> int:
        """Returns the newest version there was before."""
        newest = self.newest(ANY_PHASE) or 0
        self.allow(self.allowed() + 1)
        return newest

    def publish(self, until: tuple[str, ...] = ("Ready",)) -> int:
        """The trainer's next version, as soon as it is in one of the phases."""
        before = self.allow_one_more()
        number: int = eventually(f"a version after {before} is {' or '.join(until)}", lambda: self.newest(until, above=before), START_SECONDS, 0.3)
        return number

    def newest(self, phases: tuple[str, ...], above: int = 0) -> int | None:
        found = [item["spec"]["version"] for item in self.versions() if item.get("status", {}).get("phase") in phases]
        return max((number for number in found if number > above), default=None)

    def phase(self, number: int) -> str | None:
        return next((item.get("status", {}).get("phase") for item in self.versions() if item["spec"]["version"] == number), None)

    def scale(self, replicas: int) -> None:
        self.kubectl("scale", f"refitgroup/{GROUP}", "-n", self.namespace, f"--replicas={replicas}")

    def restart_trainer(self) -> None:
        """Returns when its new pod runs."""
        old = self.kubectl.get("pod", TRAINER, self.namespace)
        uid = old["metadata"]["uid"] if old else ""
        self.kill(TRAINER, grace=5)

        def new() -> bool:
            pod = self.kubectl.get("pod", TRAINER, self.namespace)
            return bool(pod) and pod["metadata"]["uid"] != uid and self.is_running(TRAINER)

        eventually("the trainer's pod is a new one", new, 120)

    def until_whole(self, replicas: int) -> None:
        """So many generators, all serving the newest version; the first is published if there is none."""
        self.scale(replicas)
        if self.newest(("Ready",)) is None:
            self.publish()
        number = self.newest(("Ready",)) or 0
        self.until_all_serve(number, replicas)

    def group(self) -> Object:
        found = self.kubectl.get("refitgroup", GROUP, self.namespace)
        assert found is not None, "the RefitGroup is gone"
        return found

    def status(self) -> Object:
        status: Object = self.group().get("status", {})
        return status

    def condition(self, kind: str) -> Object:
        return condition(self.group(), kind)

    def versions(self) -> list[Object]:
        found = self.kubectl("get", "weightversions", "-n", self.namespace, "-o", "json")
        items: list[Object] = sorted(json.loads(found)["items"], key=lambda item: item["spec"]["version"])
        return items

    def pods(self, role: str) -> list[Object]:
        """Those that are not being deleted."""
        listed = self.kubectl.list("pods", self.namespace, f"{names.LABEL_GROUP}={GROUP},{names.LABEL_ROLE}={role}")
        return [pod for pod in listed if "deletionTimestamp" not in pod["metadata"]]

    def generators(self) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.pods(names.ROLE_GENERATOR))

    def ask(self, pod: str, path: str) -> Any:
        return json.loads(self.kubectl.pod_get(self.namespace, pod, HTTP_PORT, path))

    def serving(self) -> dict[str, int]:
        """Per generator pod: the version that it says it serves; 0 while it does not answer."""
        return {pod: self._served(pod) for pod in self.generators()}

    def until_all_serve(self, version: int, count: int, timeout: float = START_SECONDS) -> dict[str, int]:
        def there() -> dict[str, int] | None:
            serving = self.serving()
            return serving if len(serving) == count and set(serving.values()) == {version} else None

        found: dict[str, int] = eventually(f"{count} generators serve version {version}", there, timeout)
        return found

    def until_status(self, what: str, check: Any, timeout: float = 60) -> Object:
        found: Object = eventually(what, lambda: (status := self.status()) and check(status) and status, timeout)
        return found

    def until_condition(self, kind: str, value: str, reason: str | None = None, timeout: float = 60) -> Object:
        def there() -> Object | None:
            seen = self.condition(kind)
            return seen if seen.get("status") == value and reason in (None, seen.get("reason")) else None

        found: Object = eventually(f"condition {kind}={value} {reason or ''}", there, timeout)
        return found

    def checksums(self) -> dict[str, str]:
        """Per generator pod: SHA-256 over its live parameters."""
        return {pod: self.ask(pod, "/checksum")["sha256"] for pod in self.generators()}

    def kill(self, pod: str, grace: int = 0) -> None:
        self.kubectl("delete", "pod", pod, "-n", self.namespace, f"--grace-period={grace}", *(["--force"] if grace == 0 else []), "--wait=false")

    def signal_trainer_rank(self, rank: int, signal: str) -> None:
        """STOP makes it hang, CONT lets it go on, KILL ends it."""
        script = f"for p in /proc/[0-9]*; do grep -qzx RANK={rank} $p/environ 2>/dev/null && kill -{signal} ${{p#/proc/}}; done; true"
        self._in_trainer(script)

    def describe(self) -> str:
        parts = [
            ("describe", "refitgroup"),
            ("get", "weightversions,pods,events", "-o", "wide"),
        ]
        texts = [self._try(verb, kind, *rest, "-n", self.namespace) for verb, kind, *rest in parts]
        for pod in self.pods(names.ROLE_TRAINER) + self.pods(names.ROLE_GENERATOR):
            name = pod["metadata"]["name"]
            texts.append(f"--- {name}\n{self._try('logs', name, '-n', self.namespace, '--tail=40', '--all-containers')}")
        texts.append(f"--- operator\n{self._try('logs', 'deployment/refit-operator', '-n', 'refit-system', '--tail=60')}")
        return "\n".join(texts)

    def remove(self) -> None:
        self.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=true", "--timeout=120s", timeout=130)

    def _served(self, pod: str) -> int:
        try:
            return int(self.ask(pod, "/refit/version")["version"] or 0)
        except (KubectlError, json.JSONDecodeError, KeyError):
            return 0

    def _in_trainer(self, script: str) -> str:
        eventually("the trainer's container runs", lambda: self.is_running(TRAINER), START_SECONDS)
        return self.kubectl("exec", TRAINER, "-n", self.namespace, "--", "sh", "-c", script)

    def is_running(self, pod: str) -> bool:
        found = self.kubectl.get("pod", pod, self.namespace)
        states = (found or {}).get("status", {}).get("containerStatuses", [])
        return bool(states) and all("running" in state["state"] for state in states)

    def _try(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except KubectlError as error:
            return str(error)

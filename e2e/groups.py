"""RefitGroups of the demo and the stories: the tiny Llama, trained by Megatron TP2, served by vLLM or by a light custom engine.

Control over a trainer is one file in its pod, `/control/allowed`: how many versions it may have published so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refit_api import names

from e2e.cluster.pod_packages import PodPackages

Object = dict[str, Any]
CONTROL = "/control"
EXPORTS = "/exports"
HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class Pods:
    """What every pod of the examples has: the runtime image, the mounted packages and programs; `exports` is a folder of the node."""

    image: str
    packages: PodPackages
    exports: Path | None = None

    def template(self, name: str, command: list[str], environment: dict[str, str], **container: Any) -> Object:
        threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
        variables = [*self.packages.environment(), *({"name": key, "value": value} for key, value in {**threads, **environment}.items())]
        volumes: list[Object] = [*self.packages.volumes(), {"name": "control", "emptyDir": {}}, {"name": "scratch", "emptyDir": {}}]
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})  # a container's own has 64 MiB; vLLM's processes need more
        mounts: list[Object] = [*self.packages.mounts(), {"name": "control", "mountPath": CONTROL}, {"name": "scratch", "mountPath": "/tmp"}]
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        if self.exports is not None:
            volumes.append({"name": "exports", "hostPath": {"path": str(self.exports), "type": "DirectoryOrCreate"}})
            mounts.append({"name": "exports", "mountPath": EXPORTS})
        main: Object = {
            "name": name,
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": command,
            "env": variables,
            "volumeMounts": mounts,
            "resources": {"requests": {"cpu": "200m", "memory": "256Mi"}},  # pods that ask for nothing get nothing on a busy node
            **container,
        }
        return {"spec": {"terminationGracePeriodSeconds": 30, "containers": [main], "volumes": volumes}}

    def trainer(self, versions: int, controlled: bool = False, ranks: int = 2, **settings: str) -> Object:
        launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        environment = {"TRAINER_VERSIONS": str(versions), **settings}
        if self.exports is not None:
            environment["TRAINER_EXPORT"] = EXPORTS
        if controlled:
            environment["TRAINER_ALLOWED"] = f"{CONTROL}/allowed"
        return self.template("trainer", ["python3", *launch, "-m", "e2e.workloads.trainer"], environment)

    def module_trainer(self, versions: int, **settings: str) -> Object:
        """One process without a framework; it publishes what `/control/allowed` lets it."""
        environment = {"TRAINER_VERSIONS": str(versions), "TRAINER_ALLOWED": f"{CONTROL}/allowed", **settings}
        return self.template("trainer", ["python3", "-m", "e2e.workloads.module_trainer"], environment)

    def custom_engine(self, **settings: str) -> Object:
        return self.template(
            "engine",
            ["python3", "-m", "e2e.workloads.custom_engine"],
            settings,
            ports=[{"name": "http", "containerPort": HTTP_PORT}],
        )

    def vllm(self) -> Object:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return self.template(
            "engine",
            ["sh", "-c", f"python3 -m e2e.workloads.generator /tmp/model && exec python3 -m vllm.entrypoints.cli.main serve /tmp/model {VLLM_ARGUMENTS}"],
            environment,
            ports=[{"name": "http", "containerPort": HTTP_PORT}],
            readinessProbe={"httpGet": {"path": "/refit/version", "port": "http"}, "periodSeconds": 2, "failureThreshold": 3, "timeoutSeconds": 5},
        )


VLLM_ARGUMENTS = f"--served-model-name tiny --load-format dummy --skip-tokenizer-init --enforce-eager --max-model-len 128 --port {HTTP_PORT}"


def refit_group(name: str, namespace: str, trainer: Object, generator: Object, replicas: int = 1, custom: bool = True, **spec: Any) -> Object:
    """`spec` adds to or replaces top-level parts of the spec, e.g. `rollout={...}`."""
    body: Object = {
        "model": {"name": "example/tiny-llama"},
        "trainer": {"template": trainer},
        "generators": {"replicas": replicas, "engine": {"kind": "Custom" if custom else "vLLM"}, "template": generator},
    }
    return {"apiVersion": names.API_VERSION, "kind": "RefitGroup", "metadata": {"name": name, "namespace": namespace}, "spec": {**body, **spec}}

"""What a refit costs on the cluster: `python -m bench refit`. Prints a table and writes bench/results/refit.json.

A trainer pod and a generator pod of one RefitGroup, plain torch modules of 276 MB in both, and beside each a program that knows NIXL only. Rounds alternate:
one raw NIXL read of as many bytes between the two pods, then a version that is published, pulled, verified and installed. Rates are medians over rounds.

- "Pull" is from the first manifest fetched to the last block verified. Verifying needs the processor that TCP needs too, so on a machine where both pods
  share the cores the rates are compared over a link that is capped to half of what a raw read takes without a cap; uncapped figures have no target.
- "Warm" is from the second version on; counters are those of the two processes.
- Writes are the API server's own records of what the operator's account wrote in the namespace of the bench; they are there on the local cluster only.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from refit_api import names

from bench.figures import Metric, machine, metric, record
from e2e.cluster.audit import read_writes
from e2e.cluster.local import LocalCluster
from e2e.cluster.network import ENTER
from e2e.cluster.pod_packages import workloads
from e2e.groups import CONTROL, HTTP_PORT, Object, Pods, refit_group
from e2e.installation import NAMESPACE as OPERATOR_NAMESPACE
from e2e.installation import OPERATOR, Installation, install
from e2e.kubectl import Kubectl, eventually

NAMESPACE = GROUP = "bench"
TRAINER = f"{GROUP}-trainer-0"
SCALE, VERSION_BYTES = 18, 276_000_000
ROUNDS = 5
RAW_PORT, METRICS_PORT = 9000, names.METRICS_PORT
START_SECONDS, VERSION_SECONDS, SETTLE_SECONDS = 600.0, 300.0, 3.0
WARM = {"plans": "plans", "registrations": "memory registrations", "connections": "connections", "allocations": "arena allocations"}


@dataclass(frozen=True, slots=True)
class Round:
    """Rates in MB/s."""

    raw: float
    pull: float
    stage_seconds: float
    """Without waiting for the version to be Ready."""
    install_seconds: float


@dataclass(frozen=True)
class Pair:
    """One trainer and one generator, each with a raw reader beside it."""

    kubectl: Kubectl
    generator: str
    trainer_address: str
    published: list[int] = field(default_factory=list)
    """Numbers, by the trainer's count."""

    def round(self) -> Round:
        time.sleep(SETTLE_SECONDS)  # the live parameters of the version before are read back beside the serving, as long as that takes
        raw = json.loads(self.kubectl.pod_get(NAMESPACE, self.generator, RAW_PORT, f"/read?from={self.trainer_address}", VERSION_SECONDS))
        rank = self.publish()
        seconds = Counter[str]()
        for timing in rank["timings"]:
            seconds[timing["stage"]] += timing["seconds"]
        stage = sum(seconds[part] for part in ("plan", "drain", "lease", "pull"))
        return Round(raw["bytes"] / raw["seconds"] / 1e6, rank["bytes"] / seconds["pull"] / 1e6, stage, seconds["install"])

    def publish(self, timeout: float = VERSION_SECONDS) -> Object:
        """The report of the rank that serves the trainer's next version."""
        self.published.append(0)
        script = f"echo {len(self.published)} > {CONTROL}/.allowed && mv {CONTROL}/.allowed {CONTROL}/allowed"
        self.kubectl("exec", TRAINER, "-c", "trainer", "-n", NAMESPACE, "--", "sh", "-c", script)

        def served() -> Object | None:
            status = json.loads(self.kubectl.pod_get(NAMESPACE, self.generator, HTTP_PORT, names.STATUS_PATH))
            rank: Object | None = next(iter(status["ranks"]), None)
            return rank if rank is not None and status["version"] > max(self.published) and rank["phase"] == "Serving" else None

        rank: Object = eventually(f"a version after {max(self.published)} is served", served, timeout, 0.5)
        self.published[-1] = rank["serving"]
        return rank

    def counters(self) -> Counter[str]:
        """Of both processes together."""
        trainer = json.loads(self.kubectl("exec", TRAINER, "-c", "trainer", "-n", NAMESPACE, "--", "cat", f"{CONTROL}/counters"))
        return Counter(json.loads(self.kubectl.pod_get(NAMESPACE, self.generator, HTTP_PORT, "/counters"))) + Counter(trainer)

    def cap(self, rate: float) -> None:
        """What flows into the generator's pod, at its device on the node; the cap goes with the pod."""
        device = self._device()
        shape = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate * 8:.0f}mbit", "burst", "1mb", "latency", "200ms"]
        subprocess.run([*ENTER, *shape], check=True, capture_output=True, timeout=30)

    def _device(self) -> str:
        index = self.kubectl("exec", self.generator, "-c", "engine", "-n", NAMESPACE, "--", "cat", "/sys/class/net/eth0/iflink").strip()
        links = subprocess.run([*ENTER, "ip", "-json", "link"], check=True, capture_output=True, text=True, timeout=30)
        return next(str(link["ifname"]) for link in json.loads(links.stdout) if link["ifindex"] == int(index))


def templates(pods: Pods) -> tuple[Object, Object]:
    """Of the trainer and of the generator."""
    trainer = pods.module_trainer(100, TRAINER_SCALE=str(SCALE), TRAINER_COUNTERS=f"{CONTROL}/counters")
    engine = pods.custom_engine(ENGINE_SCALE=str(SCALE))
    raw = pods.template("raw", ["python3", "-m", "e2e.workloads.raw_read"], {"RAW_BYTES": str(VERSION_BYTES), "RAW_PORT": str(RAW_PORT)})
    for template in (trainer, engine):
        template["spec"]["containers"] += raw["spec"]["containers"]
    return trainer, engine


def running(kubectl: Kubectl, role: str) -> Object | None:
    """The only pod of a role, once all its containers run."""
    for pod in kubectl.list("pods", NAMESPACE, f"{names.LABEL_GROUP}={GROUP},{names.LABEL_ROLE}={role}"):
        states = pod.get("status", {}).get("containerStatuses", [])
        if states and all("running" in state["state"] for state in states):
            return pod
    return None


@contextmanager
def pair(installation: Installation) -> Iterator[Pair]:
    kubectl = installation.kubectl
    kubectl.delete("namespace", NAMESPACE, NAMESPACE)
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    try:
        kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(workloads(NAMESPACE)))
        kubectl.apply(refit_group(GROUP, NAMESPACE, *templates(installation.pods)))
        trainer, generator = (
            eventually(f"the {role} runs", partial(running, kubectl, role), START_SECONDS) for role in (names.ROLE_TRAINER, names.ROLE_GENERATOR)
        )
        yield Pair(kubectl, generator["metadata"]["name"], trainer["status"]["podIP"])
    finally:
        kubectl.delete("namespace", NAMESPACE, NAMESPACE)


def measure(installation: Installation) -> list[Metric]:
    local = installation.cluster if isinstance(installation.cluster, LocalCluster) else None
    with pair(installation) as two:
        two.publish(START_SECONDS)
        two.round()  # makes the raw reader's connection
        time.sleep(SETTLE_SECONDS)
        before, written = two.counters(), writes(installation)
        free = [two.round() for _ in range(ROUNDS)]
        capped: list[Round] = []
        if local is not None:
            two.cap(median(round_.raw for round_ in free) / 2)
            capped = [two.round() for _ in range(ROUNDS)]
        time.sleep(SETTLE_SECONDS)
        versions = len(free) + len(capped)
        after, wrote = two.counters(), writes(installation) - written
        return [
            *rates("no cap", free, None),
            *(rates("link capped", capped, 85) if capped else []),
            metric("warm rounds", versions, "versions"),
            *(metric(f"warm rounds: {WARM[name]}", after[name] - before[name], most=0) for name in WARM),
            *operator_writes(wrote, versions, installation),
            metric("operator: resident memory", resident(installation.kubectl) / 1e6, "MB", most=300),
        ]


def rates(name: str, rounds: list[Round], target: float | None) -> list[Metric]:
    raw, pull = (median(getattr(each, what) for each in rounds) for what in ("raw", "pull"))
    return [
        metric(f"{name}: raw NIXL read of {VERSION_BYTES / 1e6:.0f} MB", raw, "MB/s"),
        metric(f"{name}: pull of a version", pull, "MB/s"),
        metric(f"{name}: pull over raw read", 100 * pull / raw, "%", least=target),
        metric(f"{name}: whole stage", 1e3 * median(each.stage_seconds for each in rounds), "ms"),
        metric(f"{name}: install", 1e3 * median(each.install_seconds for each in rounds), "ms"),
    ]


def writes(installation: Installation) -> Counter[str]:
    """Of the operator in the namespace of the bench, by resource."""
    log = installation.cluster.audit_log
    if log is None:
        return Counter()
    user = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{OPERATOR}"
    return Counter(write.resource for write in read_writes(log) if write.user == user and write.namespace == NAMESPACE)


def operator_writes(wrote: Counter[str], versions: int, installation: Installation) -> list[Metric]:
    if installation.cluster.audit_log is None:
        return []
    ours = {resource: count for resource, count in wrote.items() if resource.startswith(("refitgroups", "weightversions"))}
    return [
        metric("operator: writes of custom resources", sum(ours.values()) / versions, "per version"),
        *(metric(f"operator: writes of {resource}", count / versions, "per version") for resource, count in sorted(wrote.items())),
    ]


def resident(kubectl: Kubectl) -> float:
    pods = kubectl.list("pods", OPERATOR_NAMESPACE, "app.kubernetes.io/component=operator")
    text = kubectl.pod_get(OPERATOR_NAMESPACE, pods[0]["metadata"]["name"], METRICS_PORT, "/metrics")
    found: dict[str, Any] = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return float(found["process_resident_memory_bytes"])


def main() -> None:
    record("refit", measure(install()), machine(), ("nixl", "torch", "numpy"))


if __name__ == "__main__":
    main()

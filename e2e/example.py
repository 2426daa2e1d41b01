"""`python -m e2e.example [--vllm]`: the group of the demo as YAML, to apply, change and look at by hand.

    python -m e2e.example | kubectl apply -f -

A namespace, the programs that its pods run, and a RefitGroup: a trainer (Megatron, TP2) that publishes a version every 20 seconds, and two generators.
Generators are light torch engines that start in seconds; with --vllm they are vLLM, which takes a minute or two and 2 GB each.
"""

from __future__ import annotations

import sys

import yaml

from e2e.cluster.errors import ClusterError
from e2e.cluster.pod_packages import workloads
from e2e.cluster.resolver import Cluster, resolve
from e2e.cluster.settings import ClusterSettings
from e2e.groups import Object, Pods, refit_group

NAMESPACE, GROUP = "example", "tiny"
VERSIONS, INTERVAL_SECONDS = 10_000, 20


def example(pods: Pods, vllm: bool) -> list[Object]:
    trainer = pods.trainer(VERSIONS, TRAINER_INTERVAL_SECONDS=str(INTERVAL_SECONDS))
    group = refit_group(GROUP, NAMESPACE, trainer, pods.vllm() if vllm else pods.custom_engine(), replicas=2, custom=not vllm)
    return [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, workloads(NAMESPACE), group]


def pods_of(cluster: Cluster) -> Pods:
    packages = cluster.ensure_packages()
    return Pods(cluster.ensure_images().runtime, packages)


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--vllm"]):
        sys.exit(__doc__)
    try:
        print(yaml.safe_dump_all(example(pods_of(resolve(ClusterSettings.load())), vllm=bool(arguments)), sort_keys=False), end="")
    except ClusterError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main(sys.argv[1:])

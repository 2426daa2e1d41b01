"""`python -m e2e.cluster VERB`: a Kubernetes for the demo, the stories and for trying things out.

up          start it, or repair it; prints how to reach it
down        end it and leave nothing of it
status      what runs
kubeconfig  the path of its kubeconfig
image       build both images from this checkout and bring them to its nodes
install     all of it: start it, build the images, put the operator on it and wait until it is ready
kubectl ... kubectl against it
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import kubectl_program
from e2e.cluster.progress import CONSOLE, failed
from e2e.cluster.resolver import Cluster, resolve
from e2e.cluster.settings import ClusterSettings
from e2e.installation import install_operator
from e2e.kubectl import KubectlError


def up(cluster: Cluster) -> None:
    print(f"export KUBECONFIG={cluster.up()}")


def down(cluster: Cluster) -> None:
    cluster.down()


def status(cluster: Cluster) -> None:
    rows = cluster.status()
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {state}" for name, state in rows))


def kubeconfig(cluster: Cluster) -> None:
    print(cluster.kubeconfig)


def image(cluster: Cluster) -> None:
    print("\n".join(cluster.ensure_images().names()))


def install(cluster: Cluster) -> None:
    install_operator(cluster)
    print(f"export KUBECONFIG={cluster.kubeconfig}")


VERBS: dict[str, Callable[[Cluster], None]] = {verb.__name__: verb for verb in (up, down, status, kubeconfig, image, install)}


def main(words: list[str]) -> int:
    try:
        match words:
            case ["kubectl", *rest]:
                program = kubectl_program()
                os.execv(program, [program, f"--kubeconfig={resolve(ClusterSettings.load()).kubeconfig}", *rest])
            case [verb] if verb in VERBS:
                VERBS[verb](resolve(ClusterSettings.load()))
            case _:
                CONSOLE.print(__doc__, markup=False)
                return 2
    except (ClusterError, KubectlError) as error:
        failed(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

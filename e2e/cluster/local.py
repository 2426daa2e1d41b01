"""The local cluster: a whole Kubernetes on this machine without Docker, a registry or root's own network.

`up` compares what runs with what should and starts the rest, so it is first start, second start and repair alike.
`down` ends what lives in the cluster's control group, takes back every mount, device and kernel setting, and removes the state folder.
Invariants: one cluster per machine (its namespace, addresses and control group are fixed); one caller at a time changes it (a lock).
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import cgroups, kernel, network, system_packages
from e2e.cluster.apiserver import is_ready, write_files
from e2e.cluster.build import PROGRAMS, build, location
from e2e.cluster.components import Components
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.errors import ClusterError
from e2e.cluster.images import Images, LocalBuilder, ensure_images
from e2e.cluster.kubectl import kubectl_program
from e2e.cluster.node import NODE_NAME, Node
from e2e.cluster.pod_packages import PodPackages, ensure_pod_packages
from e2e.cluster.processes import call, stop, wait_until
from e2e.cluster.progress import step
from e2e.cluster.settings import ClusterSettings

PORT, ETCD_PORT, ETCD_PEER_PORT = 6443, 2379, 2380
SYSTEM_COMMANDS = ("ip", "iptables", "nsenter", "runc", "buildah", "debootstrap")
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "containerd", "kubelet", "kube-proxy", "coredns")
READY_SECONDS = 180.0
IMPORT_SECONDS = 300.0
STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class LocalCluster:
    settings: ClusterSettings

    @property
    def state(self) -> Path:
        return self.settings.state

    @property
    def kubeconfig(self) -> Path:
        """Reaches the API server from the host and from within the cluster's network alike."""
        return self.state / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.state / "audit.log"

    @property
    def _kept(self) -> Path:
        return self.state / "kernel-switches.json"

    @property
    def builder(self) -> LocalBuilder:
        return LocalBuilder(self.settings.cache)

    def up(self) -> Path:
        _require_root()
        system_packages.ensure(SYSTEM_COMMANDS)
        programs = build(self.settings.cache, PROGRAMS)
        pause = self.builder.ensure_pause()
        with self._locked():
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            cgroups.components_group().mkdir(exist_ok=True)
            network.ensure()
            kernel.remember(self._kept)
            plane = ControlPlane(programs, self.state, network.NODE_ADDRESS, PORT, ETCD_PORT, ETCD_PEER_PORT)
            node = Node(programs, self.state, Path(shutil.which("runc") or "runc"), pause, masquerade_all=not network.bridged_packets_pass_iptables())
            write_files(plane, node.subjects())
            self._start(plane, node, self.components())
            for name in COMPONENTS:
                self.components().require(name)
        return self.kubeconfig

    def down(self) -> None:
        if not self.state.exists() and not network.NAMESPACE_FILE.exists():
            return
        _require_root()
        with self._locked(), step("end the local cluster", 5):
            containers = self._end_processes()
            kernel.unmount_below(self.state)
            network.remove()
            cgroups.remove(containers)
            kernel.restore(self._kept)
            kernel.remove_leftovers(self.state, containers)
            if self.state.exists():
                shutil.rmtree(self.state)

    def components(self) -> Components:
        return Components(self.state, network.ENTER, cgroups.components_group() / "cgroup.procs", location(self.settings.cache, PROGRAMS["containerd"]).parent)

    def status(self) -> list[tuple[str, str]]:
        records = [(name, self.components().running(name)) for name in COMPONENTS]
        return [(name, f"running, pid {record.identity.pid}" if record else "absent") for name, record in records]

    def operator_image(self) -> str:
        return self.ensure_images().operator

    def ensure_images(self) -> Images:
        images = ensure_images(self.settings.cache, self.builder)
        self._load(images.names())
        return images

    def ensure_packages(self) -> PodPackages:
        return ensure_pod_packages(self.settings.cache)

    def _start(self, plane: ControlPlane, node: Node, components: Components) -> None:
        files = node.files()
        for name, content in files.items():
            place = self.state / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
        with step("start the control plane", 8):
            components.ensure(plane.etcd())
            components.ensure(node.containerd(), files["containerd.toml"])
            components.ensure(plane.apiserver())
            self._await(lambda: is_ready(plane), f"{plane.url}/readyz", "kube-apiserver", components)
            for component in (plane.controller_manager(), plane.scheduler()):
                components.ensure(component)
            self._await(self._containerd_answers, str(node.socket), "containerd", components)
        self._load([node.pause_image])
        with step("start the node", 10):
            # what the API server says of a node outlives its kubelet: a new one must be heard of
            heard_since = datetime.datetime.now(datetime.UTC).replace(microsecond=0) if components.ensure(node.kubelet(), files["kubelet.json"]) else None
            components.ensure(node.proxy())
            self.kubectl("apply", "--server-side", "--filename", str(Path(__file__).with_name("dns.yaml")))
            components.ensure(node.dns(), files["Corefile"])
            self._await(lambda: self._node_is_ready(heard_since), f"node {NODE_NAME} to be Ready", "kubelet", components)
            kernel.restore(self._kept)

    def _await(self, ready: Callable[[], bool], what: str, component: str, components: Components) -> None:
        def alive_and_ready() -> bool:
            components.require(component)
            return ready()

        wait_until(alive_and_ready, what, READY_SECONDS, components.log(component), every=0.2)

    def _containerd_answers(self) -> bool:
        try:
            self._ctr("version")
        except ClusterError:
            return False
        return True

    def _node_is_ready(self, heard_since: datetime.datetime | None) -> bool:
        nodes = json.loads(self.kubectl("get", "nodes", "--output=json"))["items"]
        ready = [one for node in nodes for one in node["status"]["conditions"] if one["type"] == "Ready" and one["status"] == "True"]
        return any(heard_since is None or datetime.datetime.fromisoformat(one["lastHeartbeatTime"]) >= heard_since for one in ready)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return call([kubectl_program(), f"--kubeconfig={self.kubeconfig}", *words], stdin=stdin)

    def _ctr(self, *words: str) -> str:
        program = build(self.settings.cache, ["ctr"])["ctr"]
        return call([program, "--address", self.state / "containerd.sock", "--namespace", "k8s.io", *words], seconds=IMPORT_SECONDS)

    def _load(self, images: Sequence[str]) -> None:
        """From the local builder into containerd."""
        present = self._ctr("images", "list", "--quiet").split()
        for image in images:
            if image not in present:
                with step(f"load {image}", 15), tempfile.TemporaryDirectory(prefix="refit-image-") as folder:
                    archive = Path(folder) / "image.tar"
                    self.builder.export(image, archive)
                    self._ctr("images", "import", str(archive))

    def _containers(self) -> set[str]:
        """Ids of all that containerd has not forgotten, sandboxes included: each has a folder while it lives."""
        return {bundle.name for bundle in (self.state / "containerd" / "state" / "io.containerd.runtime.v2.task" / "k8s.io").glob("*")}

    def _end_processes(self) -> set[str]:
        """At once, as what they would save is removed next; repeated, as one may start another before it is killed. Returns the containers that were."""
        deadline = time.monotonic() + STOP_SECONDS
        containers = self._containers()
        while members := cgroups.members(containers):
            if time.monotonic() > deadline:
                raise ClusterError(f"processes {[member.pid for member in members]} keep coming back; see {cgroups.components_group()}")
            stop(members, grace=0)
            containers |= self._containers()
        return containers

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock lies outside the state folder, which comes and goes."""
        self.settings.cache.mkdir(parents=True, exist_ok=True)
        with (self.settings.cache / "cluster.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _require_root() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterError("the local cluster needs Linux and root: run this as root, or use REFIT_CLUSTER=kind")

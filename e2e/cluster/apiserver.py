"""A real API server for tests that need no nodes: etcd and kube-apiserver on loopback, ready in seconds, needing no root.

    with ApiServer.start(tmp_path) as server:
        config.load_kube_config(str(server.kubeconfig))

Everything it makes lies in the given folder; its processes end with the `with` block, and with the thread that started it if that dies first.
Without controllers nothing else moves: no default service accounts, no garbage collection, no Deployments; `controller_manager=True` brings them.
"""

from __future__ import annotations

import datetime
import json
import random
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.audit import POLICY, Write, read_writes
from e2e.cluster.build import build
from e2e.cluster.certificates import Authority, KeyPair, Subject, kubeconfig, write_authority, write_private
from e2e.cluster.controlplane import Component, ControlPlane
from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import tail, wait_until
from e2e.cluster.progress import step
from e2e.cluster.settings import ClusterSettings

LOOPBACK = "127.0.0.1"
READY_SECONDS = 120.0
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    kubeconfig: Path
    """Of a user in `system:masters`."""
    url: str
    audit_log: Path
    folder: Path
    authority: Authority

    @staticmethod
    @contextmanager
    def start(directory: Path, controller_manager: bool = False, settings: ClusterSettings | None = None) -> Iterator[ApiServer]:
        names = ["etcd", "kube-apiserver", *(["kube-controller-manager"] if controller_manager else [])]
        programs = build((settings or ClusterSettings.load()).cache, names)
        port, etcd_port, peer_port = free_ports(3)
        plane = ControlPlane(programs, directory, LOOPBACK, port, etcd_port, peer_port)
        authority = write_files(plane)
        with ExitStack() as processes:
            etcd = processes.enter_context(_running(plane.etcd(), directory))
            # no nodes: a loopback address is refused as an endpoint, and pods need no token
            alone = ("--endpoint-reconciler-type=none", *(() if controller_manager else ("--disable-admission-plugins=ServiceAccount",)))
            server = processes.enter_context(_running(plane.apiserver(*alone), directory))
            if controller_manager:
                processes.enter_context(_running(plane.controller_manager(), directory))
            with step("start an API server", 5):
                wait_until(
                    lambda: _running_and_ready(plane, {"etcd": etcd, "kube-apiserver": server}),
                    f"{plane.url}/readyz",
                    READY_SECONDS,
                    directory / "kube-apiserver.log",
                )
            yield ApiServer(directory / "admin.kubeconfig", plane.url, plane.audit_log, directory, authority)

    def user(self, name: str, groups: tuple[str, ...] = ()) -> Path:
        """The kubeconfig of another user, who may do what RBAC grants."""
        place = self.folder / f"user-{name.replace(':', '-')}.kubeconfig"
        pair = self.authority.issue(Subject(name, groups), datetime.datetime.now(datetime.UTC))
        write_private(place, kubeconfig(self.url, self.authority, name, pair))
        return place

    def writes(self) -> list[Write]:
        return list(read_writes(self.audit_log))


def write_files(plane: ControlPlane, more: dict[str, Subject] | None = None) -> Authority:
    """Keys, kubeconfigs and the audit policy; keys that are there stay."""
    plane.folder.mkdir(parents=True, exist_ok=True)
    subjects = plane.subjects() | (more or {})
    authority = write_authority(plane.keys, subjects, datetime.datetime.now(datetime.UTC))
    for name, subject in subjects.items():
        content = kubeconfig(plane.url, authority, subject.user, KeyPair.read(plane.keys, name))
        write_private(plane.folder / f"{name}.kubeconfig", content)
    (plane.folder / "audit-policy.json").write_text(json.dumps(POLICY))
    return authority


def is_ready(plane: ControlPlane) -> bool:
    context = ssl.create_default_context(cafile=str(plane.keys / "ca.crt"))
    context.load_cert_chain(plane.keys / "admin.crt", plane.keys / "admin.key")
    # no proxy of the environment: the server is on this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{plane.url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _running_and_ready(plane: ControlPlane, processes: dict[str, subprocess.Popen[bytes]]) -> bool:
    for name, process in processes.items():
        if process.poll() is not None:
            raise ClusterError(f"{name} ended with exit code {process.returncode}{tail(plane.folder / f'{name}.log')}")
    return is_ready(plane)


@contextmanager
def _running(component: Component, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    # the kernel ends the process with the thread that started it: a killed test run leaves no servers behind
    guard = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
    with (folder / f"{component.name}.log").open("ab") as log:
        process = subprocess.Popen((*guard, *component.command), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Of those that the kernel gives to no connection: a server may take a minute to come to listen, and finds its port free.

    Held together while they are chosen, so that they differ. Raises ClusterError if there are too few.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    candidates = list(range(10_000, min(lowest, 30_000)))  # NodePorts begin there
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    with ExitStack() as held:
        for port in candidates:
            if len(ports) == count:
                break
            with suppress(OSError):
                held.enter_context(socket.create_server((LOOPBACK, port)))
                ports.append(port)
    if len(ports) < count:
        raise ClusterError(f"{len(ports)} free ports from 10000 to {min(lowest, 30_000)}, {count} are needed: see net.ipv4.ip_local_port_range")
    return ports

"""Command lines of etcd, the API server and the controllers: one spelling for the whole cluster and for the API server alone.

Pure: facts in, words out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.certificates import ADMINISTRATORS, Subject

SERVICE_NETWORK = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """`address` is where the API server listens and is known; on loopback it does not publish itself to pods, as there are none."""

    programs: Mapping[str, Path]
    folder: Path
    address: str
    port: int
    etcd_port: int
    etcd_peer_port: int

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def subjects(self) -> dict[str, Subject]:
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
        addresses = tuple(dict.fromkeys(("127.0.0.1", self.address, API_SERVICE_ADDRESS)))
        return {
            "apiserver": Subject("kube-apiserver", names=names, addresses=addresses),
            "apiserver-kubelet-client": Subject("kube-apiserver-kubelet-client", (ADMINISTRATORS,)),
            "admin": Subject("admin", (ADMINISTRATORS,)),
            "controller-manager": Subject("system:kube-controller-manager"),
            "scheduler": Subject("system:kube-scheduler"),
        }

    def etcd(self) -> Component:
        clients, peers = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{self.etcd_peer_port}"
        return Component("etcd", (
            str(self.programs["etcd"]),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}",
            # a crash of the machine may cost the data: this is a cluster for tests
            "--unsafe-no-fsync",
            # the only member has nobody to elect: fewer ticks, less idle CPU
            "--heartbeat-interval=1000", "--election-timeout=5000",
            "--log-level=warn",
        ))  # fmt: skip

    def apiserver(self, *more: str) -> Component:
        keys = self.keys
        return Component("kube-apiserver", (
            str(self.programs["kube-apiserver"]),
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--bind-address={self.address}", f"--advertise-address={self.address}", f"--secure-port={self.port}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            f"--tls-cert-file={keys / 'apiserver.crt'}", f"--tls-private-key-file={keys / 'apiserver.key'}", f"--client-ca-file={keys / 'ca.crt'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={keys / 'service-accounts.key'}", f"--service-account-key-file={keys / 'service-accounts.pub'}",
            f"--kubelet-client-certificate={keys / 'apiserver-kubelet-client.crt'}", f"--kubelet-client-key={keys / 'apiserver-kubelet-client.key'}",
            # nobody resolves the node's name
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={keys / 'ca.crt'}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            f"--audit-policy-file={self.folder / 'audit-policy.json'}", f"--audit-log-path={self.audit_log}",
            "--profiling=false",
            *more,
        ))  # fmt: skip

    def controller_manager(self) -> Component:
        return Component("kube-controller-manager", (
            str(self.programs["kube-controller-manager"]),
            f"--kubeconfig={self.folder / 'controller-manager.kubeconfig'}",
            f"--service-account-private-key-file={self.keys / 'service-accounts.key'}", f"--root-ca-file={self.keys / 'ca.crt'}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--secure-port=0",
            "--profiling=false",
        ))  # fmt: skip

    def scheduler(self) -> Component:
        return Component("kube-scheduler", (
            str(self.programs["kube-scheduler"]),
            f"--kubeconfig={self.folder / 'scheduler.kubeconfig'}",
            "--leader-elect=false",
            "--secure-port=0",
            "--profiling=false",
        ))  # fmt: skip

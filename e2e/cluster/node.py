"""Command lines and configuration of what runs pods: containerd, kubelet, kube-proxy, CoreDNS.

Pure: facts in, words out. Intervals are long where nobody waits for them, because an idle cluster should leave the cores to the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.certificates import Subject
from e2e.cluster.controlplane import Component
from e2e.cluster.network import NODE_ADDRESS, POD_NETWORK

NODE_NAME = "refit-local"
DNS_ADDRESS = "10.96.0.10"
DNS_USER = "refit:coredns"
DOMAIN = "cluster.local"


@dataclass(frozen=True, slots=True)
class Node:
    programs: Mapping[str, Path]
    folder: Path
    runc: Path
    pause_image: str
    masquerade_all: bool

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    def subjects(self) -> dict[str, Subject]:
        return {
            "kubelet": Subject(f"system:node:{NODE_NAME}", ("system:nodes",), names=(NODE_NAME,), addresses=(NODE_ADDRESS,)),
            "kube-proxy": Subject("system:kube-proxy"),
            "coredns": Subject(DNS_USER),
        }

    def files(self) -> dict[str, str]:
        """By their path in the folder."""
        return {
            "containerd.toml": self._containerd(),
            "kubelet.json": json.dumps(self._kubelet(), indent=1),
            "cni/10-refit.conflist": json.dumps(self._cni(), indent=1),
            "Corefile": self._corefile(),
        }

    def containerd(self) -> Component:
        return Component("containerd", (str(self.programs["containerd"]), f"--config={self.folder / 'containerd.toml'}"))

    def kubelet(self) -> Component:
        return Component("kubelet", (
            str(self.programs["kubelet"]),
            f"--kubeconfig={self.folder / 'kubelet.kubeconfig'}",
            f"--config={self.folder / 'kubelet.json'}",
            f"--root-dir={self.folder / 'kubelet'}", f"--cert-dir={self.folder / 'kubelet' / 'pki'}",
            f"--node-ip={NODE_ADDRESS}", f"--hostname-override={NODE_NAME}",
        ))  # fmt: skip

    def proxy(self) -> Component:
        return Component("kube-proxy", (
            str(self.programs["kube-proxy"]),
            f"--kubeconfig={self.folder / 'kube-proxy.kubeconfig'}",
            "--proxy-mode=iptables", f"--cluster-cidr={POD_NETWORK}", f"--masquerade-all={str(self.masquerade_all).lower()}",
            # the table of connections belongs to the whole machine
            "--conntrack-max-per-core=0",
            f"--hostname-override={NODE_NAME}", f"--bind-address={NODE_ADDRESS}",
        ))  # fmt: skip

    def dns(self) -> Component:
        return Component("coredns", (str(self.programs["coredns"]), f"-conf={self.folder / 'Corefile'}"))

    def _containerd(self) -> str:
        top = self.folder / "containerd"
        plugins, images, runtime = "io.containerd", "plugins.'io.containerd.cri.v1.images'", "plugins.'io.containerd.cri.v1.runtime'"
        disabled = [f"{plugins}.{name}" for name in ("internal.v1.opt", "nri.v1.nri", "snapshotter.v1.blockfile", "snapshotter.v1.erofs", "differ.v1.erofs")]
        return f"""\
version = 3
root = '{top / "root"}'
state = '{top / "state"}'
disabled_plugins = {json.dumps(disabled)}
[grpc]
address = '{self.socket}'
[debug]
level = 'warn'
[{images}]
snapshotter = 'overlayfs'
stats_collect_period = 60
[{images}.pinned_images]
sandbox = '{self.pause_image}'
[{runtime}]
# without CAP_SYS_RESOURCE nobody may lower a score, and runc would die trying
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[{runtime}.cni]
bin_dirs = ['{self.programs["bridge"].parent}']
conf_dir = '{self.folder / "cni"}'
[{runtime}.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[{runtime}.containerd.runtimes.runc.options]
BinaryName = '{self.runc}'
Root = '{top / "runc"}'
SystemdCgroup = false
"""

    def _kubelet(self) -> dict[str, object]:
        keys = self.folder / "keys"
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "address": NODE_ADDRESS,
            "tlsCertFile": str(keys / "kubelet.crt"),
            "tlsPrivateKeyFile": str(keys / "kubelet.key"),
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": str(keys / "ca.crt")}},
            "authorization": {"mode": "Webhook"},
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": DOMAIN,
            "resolvConf": "",
            # the machine's control groups may be the older kind, and belong to somebody else
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "localStorageCapacityIsolation": False,
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            # images come from no registry: one that is collected is gone
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "podLogsDir": str(self.folder / "pods"),
            "volumePluginDir": str(self.folder / "kubelet" / "volume-plugins"),
            "staticPodPath": "",
            "syncFrequency": "1m",
            "nodeStatusUpdateFrequency": "20s",
            "volumeStatsAggPeriod": "10m",
        }

    def _cni(self) -> dict[str, object]:
        ranges = {"type": "host-local", "dataDir": str(self.folder / "addresses"), "ranges": [[{"subnet": POD_NETWORK}]], "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": ranges}
        return {"cniVersion": "1.0.0", "name": "refit", "plugins": [bridge]}

    def _corefile(self) -> str:
        return f"""\
{DOMAIN} in-addr.arpa {{
  errors
  kubernetes {DOMAIN} in-addr.arpa {{
    kubeconfig {self.folder / "coredns.kubeconfig"} refit
    pods insecure
  }}
  cache 5
}}
"""

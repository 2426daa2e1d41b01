"""The cluster's own network: one namespace with a bridge, and one pair of devices through which the host reaches the API server.

Nothing of the cluster listens on the machine's own addresses. The host sees the control plane's subnet only: pods are reached as in
any cluster, through the API server (`kubectl port-forward`, `exec`) or from another pod.
Every function may be called again: what is there stays, what is missing comes back.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import call

NAMESPACE = "refit"
NAMESPACE_FILE = Path("/run/netns") / NAMESPACE
# `ip netns exec` would remount /sys and hide the cgroups
ENTER = ("nsenter", f"--net={NAMESPACE_FILE}", "--")

NODE_ADDRESS = "10.77.0.1"
HOST_ADDRESS = "10.77.0.254"
PREFIX_LENGTH = 24
POD_NETWORK = "10.77.1.0/24"

BRIDGE = "refit0"
HOST_DEVICE = "refit-host"
PEER_DEVICE = "refit-peer"


def ensure() -> None:
    if not NAMESPACE_FILE.exists():
        _refuse_foreign_routes()
        call(["ip", "netns", "add", NAMESPACE])
    inside = ("-n", NAMESPACE)
    _ip(*inside, "link", "set", "lo", "up")
    if not _has_link(BRIDGE, *inside):
        _ip(*inside, "link", "add", BRIDGE, "type", "bridge")
    _ip(*inside, "address", "replace", f"{NODE_ADDRESS}/{PREFIX_LENGTH}", "dev", BRIDGE)
    _ip(*inside, "link", "set", BRIDGE, "up")
    # components look up the default route to learn the node's address
    _ip(*inside, "route", "replace", "default", "dev", BRIDGE)
    if not _has_link(HOST_DEVICE):
        _ip("link", "add", HOST_DEVICE, "type", "veth", "peer", "name", PEER_DEVICE, "netns", NAMESPACE)
    _ip(*inside, "link", "set", PEER_DEVICE, "master", BRIDGE, "up")
    _ip("address", "replace", f"{HOST_ADDRESS}/{PREFIX_LENGTH}", "dev", HOST_DEVICE)
    _ip("link", "set", HOST_DEVICE, "up")
    call([*ENTER, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])


def bridged_packets_pass_iptables() -> bool:
    """Without it, the answer of a pod to a neighbour on the bridge would bypass the translation of Service addresses."""
    switch = "/proc/sys/net/bridge/bridge-nf-call-iptables"
    return subprocess.run([*ENTER, "sh", "-c", f"echo 1 > {switch}"], capture_output=True, check=False).returncode == 0


def remove() -> None:
    """Devices and rules in the namespace go with it, and with them their peers outside."""
    if NAMESPACE_FILE.exists():
        call(["ip", "netns", "delete", NAMESPACE])
    if _has_link(HOST_DEVICE):
        # the namespace ends when its last process has; the pair must not outlive this call
        _ip("link", "delete", HOST_DEVICE)
    if NAMESPACE_FILE.parent.is_dir() and not any(NAMESPACE_FILE.parent.iterdir()):
        # `ip netns add` has mounted it for all namespaces, and does so again
        subprocess.run(["umount", str(NAMESPACE_FILE.parent)], capture_output=True, check=False)
        NAMESPACE_FILE.parent.rmdir()


def _refuse_foreign_routes() -> None:
    routes = json.loads(call(["ip", "-json", "route", "show", "root", "10.77.0.0/16"]))
    foreign = [f"{route['dst']} on {route['dev']}" for route in routes if route["dev"] != HOST_DEVICE]
    if foreign:
        raise ClusterError(f"this machine routes {', '.join(foreign)}, which the local cluster would hide; use REFIT_CLUSTER=kind or existing here")


def _has_link(name: str, *where: str) -> bool:
    return subprocess.run(["ip", *where, "link", "show", name], capture_output=True, check=False).returncode == 0


def _ip(*words: str) -> None:
    call(["ip", *words])

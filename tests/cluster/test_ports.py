"""Ports for servers that come to listen later: no connection of this machine gets one of them in between."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from e2e.cluster.apiserver import free_ports


def test_ports_differ_are_free_and_below_those_of_connections() -> None:
    ports = free_ports(50)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    assert len(set(ports)) == 50
    assert max(ports) < lowest
    with ExitStack() as held:
        for port in ports:
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        assert set(free_ports(50)).isdisjoint(ports)

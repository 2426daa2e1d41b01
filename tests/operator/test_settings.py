"""Every setting of the operator is listed here: a new one is a decision, not an accident. A misspelt one is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from refit_api.errors import SpecError
from refit_operator.settings import OperatorSettings


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REFIT_OPERATOR_") or name == "POD_NAMESPACE"]:
        monkeypatch.delenv(name)


def test_the_operator_has_these_settings_and_defaults() -> None:
    assert OperatorSettings.load().model_dump() == {
        "namespaces": (),
        "namespace": "refit-system",
        "service": "refit-catalog",
        "ca_secret": "refit-catalog-ca",
        "catalog_host": "0.0.0.0",
        "catalog_port": 7450,
        "metrics_port": 7452,
        "health_port": 8080,
        "kubeconfig": None,
        "resync_seconds": 600.0,
        "kinds_seconds": 45.0,
        "log_level": "INFO",
    }


def test_each_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POD_NAMESPACE": "here", "REFIT_OPERATOR_KUBECONFIG": "/k", "refit_operator_health_port": "1"}.items():
        monkeypatch.setenv(name, value)
    settings = OperatorSettings.load()
    assert (settings.namespace, settings.kubeconfig, settings.health_port) == ("here", Path("/k"), 1)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        pytest.param("REFIT_OPERATOR_BOGUS", "1", "no setting REFIT_OPERATOR_BOGUS", id="a name that nothing reads"),
        pytest.param("REFIT_OPERATOR_NAMESPACE", "x", "no setting REFIT_OPERATOR_NAMESPACE", id="a field that comes from the pod"),
        pytest.param("REFIT_OPERATOR_RESYNC_SECONDS", "never", "resync_seconds: Input should be a valid number", id="a value that is none"),
        pytest.param("REFIT_OPERATOR_CATALOG_PORT", "70000", "catalog_port: Input should be less than", id="a value out of bounds"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError) as caught:
        OperatorSettings.load()
    assert said in caught.value.message


def test_an_old_python_is_told_so() -> None:
    """The distribution installs on 3.10, for the runtime's sake."""
    program = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import refit_operator"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ImportError: refit_operator needs Python 3.11 or newer" in ended.stderr.splitlines()[-1]

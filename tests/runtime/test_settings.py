"""Every setting of a pod is listed here: a new one is a decision, not an accident. Unknown keys and missing files are said plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refit_api.errors import SpecError
from refit_api.mounted import Engine, Mounted
from refit_runtime.settings import RuntimeSettings

LEAST = {"group": {"namespace": "rl", "name": "demo"}, "model": {"name": "tiny"}, "catalog": "refit-catalog.refit-system.svc:7450"}


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, value in {"NAME": "p", "UID": "u", "NAMESPACE": "rl", "IP": "127.0.0.1"}.items():
        monkeypatch.setenv(f"POD_{name}", value)
    for name in ("REFIT_RUN_ID", "TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REFIT_SETTINGS", str(tmp_path / "settings.json"))
    return tmp_path / "settings.json"


def test_the_file_has_these_settings_and_defaults() -> None:
    assert json.loads(Mounted.model_validate(LEAST).model_dump_json(by_alias=True)) == {
        "group": {"namespace": "rl", "name": "demo"},
        "model": {"name": "tiny", "revision": ""},
        "catalog": "refit-catalog.refit-system.svc:7450",
        "trainer": {"snapshot": "Device", "arenas": 1, "onBusy": "Wait", "redundancy": 2},
        "engine": {
            "kind": "vLLM", "commit": "Copy", "staging": "Full", "keepPrevious": False, "relay": None, "kv": "Salt", "pause": "Keep",
            "pauseTimeoutSeconds": 30.0,
        },
        "rollout": {"policy": "Latest", "progressDeadlineSeconds": 600.0},
        "versions": {"publishDeadlineSeconds": 150.0, "leaseSeconds": 30.0, "drainSeconds": 60.0},
        "verification": {"installed": "Async"},
        "transport": {"kind": "NIXL", "backend": "UCX", "devices": [], "rails": None, "tls": [], "chunkBytes": 67108864},
        "workerPort": 7451,
        "metricsPort": 7452,
        "caFile": "/etc/refit/ca.crt",
        "tokenFile": "/var/run/secrets/refit.dev/token",
    }  # fmt: skip


def test_a_pod_reads_its_file_and_who_it_is(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.write_text(json.dumps(LEAST))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("UCX_TLS", "tcp")
    settings = RuntimeSettings.load()
    assert (settings.pod.uid, settings.run.id, settings.run.local_rank) == ("u", "run-3", 1)
    assert settings.ucx["UCX_TLS"] == "tcp"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({**LEAST, "trainr": {}}, "trainr: Extra inputs are not permitted"),
    "unknown key inside": ({**LEAST, "engine": {"kvs": "Salt"}}, "engine.kvs: Extra inputs"),
    "a value that is none": ({**LEAST, "engine": {"kv": "Maybe"}}, "engine.kv: Input should be 'Salt', 'Reset' or 'Keep'"),
    "missing": ({"model": {"name": "m"}}, "group: Field required"),
    "address without port": ({**LEAST, "catalog": "somewhere"}, "catalog: String should match"),
    "chunks that cut a block": ({**LEAST, "transport": {"chunkBytes": 1500000}}, "transport.chunkBytes"),
}


@pytest.mark.parametrize(("content", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named(pod: Path, content: dict[str, Any], said: str) -> None:
    pod.write_text(json.dumps(content))
    with pytest.raises(SpecError) as caught:
        RuntimeSettings.load()
    assert said in caught.value.message
    assert str(pod) in caught.value.message


def test_a_missing_file_or_field_of_the_pod_is_named(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        RuntimeSettings.load()
    pod.write_text(json.dumps(LEAST))
    monkeypatch.delenv("POD_UID")
    with pytest.raises(SpecError, match="uid: Field required"):
        RuntimeSettings.load()


RELAYS = {
    "Copy": (Engine(), True),
    "windows hold nothing": (Engine(staging="Windowed"), False),
    "Remap": (Engine(commit="Remap"), False),
    "asked": (Engine(commit="Remap", relay=True), True),
}


@pytest.mark.parametrize(("engine", "relays"), RELAYS.values(), ids=RELAYS.keys())
def test_relay_follows_commit_unless_it_is_said(engine: Engine, relays: bool) -> None:
    assert engine.relays is relays

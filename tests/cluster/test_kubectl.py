"""A call to an API server that restarts is made again, a few times; whatever else fails is a KubectlError that names the call, at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from e2e import kubectl as kubectl_module
from e2e.kubectl import PAUSES, Kubectl, KubectlError

REFUSED = "The connection to the server 10.77.0.1:6443 was refused - did you specify the right host or port?"
DIALLED = "Unable to connect to the server: dial tcp 10.77.0.1:6443: connect: connection refused"
HANDSHAKE = "Unable to connect to the server: net/http: TLS handshake timeout"
OF_A_POD = "Error from server (ServiceUnavailable): error trying to reach service: dial tcp 10.78.0.9:8000: connect: connection refused"

PROGRAM = """
import pathlib, sys, time
calls, fails, said = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with calls.open("a") as file:
    file.write("x")
if said == "sleep":
    time.sleep(30)
if len(calls.read_text()) <= fails:
    sys.exit(said)
print("answer")
"""


class Stub:
    """A kubectl that fails so many times, and says that."""

    def __init__(self, folder: Path, fails: int, said: str) -> None:
        self.log = folder / "calls"
        self.kubectl = Kubectl((sys.executable, "-c", PROGRAM, str(self.log), str(fails), said), folder / "kubeconfig")

    @property
    def calls(self) -> int:
        return len(self.log.read_text())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl_module, "PAUSES", tuple(0.0 for _ in PAUSES))


@pytest.mark.parametrize("said", [REFUSED, DIALLED, HANDSHAKE], ids=["refused", "dialled", "handshake"])
def test_an_api_server_that_was_not_reached_is_asked_again(tmp_path: Path, said: str) -> None:
    stub = Stub(tmp_path, 1, said)
    assert stub.kubectl("apply", "-f", "-", stdin="") == "answer\n"
    assert stub.calls == 2


def test_not_for_ever(tmp_path: Path) -> None:
    stub = Stub(tmp_path, 1000, REFUSED)
    with pytest.raises(KubectlError, match=r"kubectl get pods: The connection .* was refused"):
        stub.kubectl("get", "pods")
    assert stub.calls == len(PAUSES) + 1


@pytest.mark.parametrize("said", [OF_A_POD, 'Error from server (NotFound): pods "x" not found'], ids=["a pod refuses", "not found"])
def test_an_answer_is_an_answer(tmp_path: Path, said: str) -> None:
    stub = Stub(tmp_path, 1, said)
    with pytest.raises(KubectlError):
        stub.kubectl("get", "pods")
    assert stub.calls == 1


def test_a_call_that_does_not_end_is_named(tmp_path: Path) -> None:
    stub, began = Stub(tmp_path, 0, "sleep"), time.monotonic()
    with pytest.raises(KubectlError, match="kubectl get pods: did not end within 1 s"):
        stub.kubectl("get", "pods", timeout=1)
    assert time.monotonic() - began < 25

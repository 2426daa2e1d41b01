"""The real thing on one machine: processes, NIXL, TLS, tokens, the real catalog; every byte that is served is the trainer's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refit_api import names
from refit_api.mounted import Versions
from refit_api.wire import CoordinateSources, Order, Role, Source
from refit_operator.catalog.holders import source_of
from refit_operator.catalog.local import TERMS, LocalCatalog, local_catalog
from refit_runtime.cli.doctor import command
from typer.testing import CliRunner

from tests.pods import environment, mounted

ROOT = Path(__file__).parents[2]


class Pods:
    """Processes that believe to be pods."""

    def __init__(self, catalog: LocalCatalog, folder: Path, stack: ExitStack) -> None:
        self.catalog, self.folder, self.stack = catalog, folder, stack
        self.ports = iter(range(17451 + os.getpid() % 500 * 20, 65000))

    def environment(self, uid: str, role: Role) -> dict[str, str]:
        versions = Versions(lease_seconds=15, drain_seconds=2, publish_deadline_seconds=60)
        given = mounted(self.catalog, self.folder, uid, role, worker_port=next(self.ports), versions=versions)
        return {**environment(given, self.folder, uid), "UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(self, program: str, uid: str, role: Role) -> subprocess.Popen[str]:
        log = self.stack.enter_context((self.folder / f"{uid}.log").open("w"))
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("processes.py")), program],
            env=self.environment(uid, role), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
        )  # fmt: skip
        self.stack.callback(end, process)
        return process

    def order(self, uid: str, target: int, sources: tuple[Source, ...] = ()) -> None:
        given = (CoordinateSources("tp0", sources),) if sources else ()
        self.catalog.run(self.catalog.store.assign(self.catalog.group, uid, "0", target, Order.COMMIT, given, 30.0))

    def relay(self, uid: str, number: int) -> Source:
        """The generator as the operator would name it."""
        held = self.catalog.store._kept(self.catalog.group).group.held(number, Role.GENERATOR)
        return next(source_of(holder) for holder in held if holder.ref.pod_uid == uid)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def line(process: subprocess.Popen[str], text: str = "") -> list[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    if text:
        process.stdin.write(text + "\n")
        process.stdin.flush()
    while (words := process.stdout.readline().split())[:1] != ["said:"]:
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
    return words[1:]


def ask(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.load(answer)


def until(what: str, holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    terms = replace(TERMS, lease_seconds=15.0, drain_seconds=2.0, publish_deadline_seconds=60.0, model="tiny")
    with local_catalog(terms=terms) as catalog, ExitStack() as stack:
        yield Pods(catalog, tmp_path, stack)


def test_a_trainer_two_generators_and_a_relay_over_nixl(pods: Pods) -> None:
    """The second generator reads from the first; a source that is killed in between is replaced; what leaves, leaves in order."""
    trainer, first = pods.start("trainer", "trainer-0", Role.TRAINER), pods.start("generator", "g-1", Role.GENERATOR)
    port = int(line(first)[0])
    assert ask(port, names.VERSION_PATH) == {"version": 0, "closed": ""}
    number, sha = line(trainer, "publish")
    pods.order("g-1", int(number))
    until("g-1 serves", lambda: ask(port, names.VERSION_PATH)["version"] == int(number))
    assert ask(port, "/checksum") == {"version": int(number), "sha256": sha}

    second = pods.start("generator", "g-2", Role.GENERATOR)
    other = int(line(second)[0])
    pods.order("g-2", int(number), (pods.relay("g-1", int(number)),))
    until("g-2 serves", lambda: ask(other, names.VERSION_PATH)["version"] == int(number))
    assert ask(other, "/checksum")["sha256"] == sha
    ranks = ask(other, names.STATUS_PATH)["ranks"]
    assert [(read["podUid"], read["role"], read["bytes"] > 0) for read in ranks[0]["reads"]] == [("g-1", "generator", True)]

    number, sha = line(trainer, "publish")
    pods.order("g-2", int(number))
    until("g-2 serves the next", lambda: ask(other, names.VERSION_PATH)["version"] == int(number))
    relay = pods.relay("g-2", int(number))
    second.kill()
    pods.order("g-1", int(number), (relay,))
    until("g-1 serves the next, from the trainer", lambda: ask(port, names.VERSION_PATH)["version"] == int(number))
    assert ask(port, "/checksum")["sha256"] == sha
    assert ask(port, names.PRESTOP_PATH)["left"] is False, "its pod stays"
    pods.catalog.pods.deleted.add("g-1")
    assert ask(port, names.PRESTOP_PATH) == {"left": True, "reason": ""}
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 0
    assert trainer.stdin is not None
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.wait(30) == 0


def test_the_doctor_says_what_is_wrong(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in pods.environment("g-1", Role.GENERATOR).items():
        monkeypatch.setenv(name, value)
    well = CliRunner().invoke(command)
    assert well.exit_code == 0, well.output
    assert "0 versions" in well.output
    (pods.folder / "g-1.token").write_text("not a token")
    ill = CliRunner().invoke(command, ["--running"])
    assert ill.exit_code == 1
    assert "nobody serves manifests" in ill.output
    monkeypatch.setenv("REFIT_SETTINGS", "/nowhere")
    broken = CliRunner().invoke(command)
    assert (broken.exit_code, "cannot be read" in broken.output) == (2, True)

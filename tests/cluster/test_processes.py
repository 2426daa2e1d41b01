"""Only our own processes are ended: a pid that belongs to somebody else by now is left alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster.components import Components
from e2e.cluster.controlplane import Component
from e2e.cluster.errors import ClusterError
from e2e.cluster.kernel import mounts_below
from e2e.cluster.processes import Identity, alive, call, identify, stop, wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_process_is_ended(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    assert identity is not None
    stop([identity], grace=5)
    assert not alive(identity)
    assert sleeper.wait() < 0


def test_a_pid_with_another_start_time_is_a_stranger(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    assert identity is not None
    stop([replace(identity, started=identity.started - 1)], grace=0)
    assert sleeper.poll() is None


def test_a_process_that_ignores_the_request_is_killed() -> None:
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        identity = identify(process.pid)
        assert identity is not None
        stop([identity], grace=0.2)
    assert not alive(identity)


def test_a_failing_command_says_what_it_said() -> None:
    with pytest.raises(ClusterError, match=r"exit code 3:\nno such device"):
        call(["sh", "-c", "echo no such device >&2; exit 3"])


@pytest.fixture
def components(tmp_path: Path) -> Iterator[Components]:
    made = Components(tmp_path, (), tmp_path / "procs", tmp_path)
    yield made
    record = made.running("sleeper")
    if record is not None:
        stop([record.identity], grace=1)


def _pid(components: Components) -> Identity:
    record = components.running("sleeper")
    assert record is not None
    return record.identity


def test_a_component_that_runs_as_wanted_is_left_alone(components: Components) -> None:
    assert components.ensure(Component("sleeper", ("sleep", "60")))
    before = _pid(components)
    assert not components.ensure(Component("sleeper", ("sleep", "60")))
    assert _pid(components) == before


@pytest.mark.parametrize(
    ("command", "configuration"),
    [pytest.param(("sleep", "61"), "", id="other words"), pytest.param(("sleep", "60"), "changed", id="another configuration")],
)
def test_a_component_that_should_run_otherwise_is_replaced(components: Components, command: tuple[str, ...], configuration: str) -> None:
    components.ensure(Component("sleeper", ("sleep", "60")))
    before = _pid(components)
    assert components.ensure(Component("sleeper", command), configuration)
    assert not alive(before)
    assert alive(_pid(components))


def test_a_component_that_was_killed_comes_back(components: Components) -> None:
    components.ensure(Component("sleeper", ("sleep", "60")))
    stop([_pid(components)], grace=1)
    assert components.running("sleeper") is None
    assert components.ensure(Component("sleeper", ("sleep", "60")))
    assert alive(_pid(components))


def test_a_component_that_ends_quotes_its_log(components: Components) -> None:
    components.ensure(Component("sleeper", ("sh", "-c", "echo port is taken; sleep 0.5; exit 1")))
    wait_until(lambda: components.running("sleeper") is None, "the end", 10)
    with pytest.raises(ClusterError, match="port is taken"):
        components.require("sleeper")


def test_mounts_are_undone_from_the_inside_out() -> None:
    table = "\n".join(f"1 0 0:1 / {point} rw - tmpfs x rw" for point in ("/", "/state/a", "/state/a/b", "/state-other", "/state/with\\040blank"))
    assert mounts_below(Path("/state"), table) == ["/state/with blank", "/state/a/b", "/state/a"]

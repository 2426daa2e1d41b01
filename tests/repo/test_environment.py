"""`make env` on a bare machine: what it needs is installed where it may be, else the command to type is printed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = "apt-get install --yes --no-install-recommends python3-venv"


class Machine:
    """A PATH of stand-ins for programs of the system; each call is a line in `log`."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.home, self.log = folder / "bin", folder / "home", folder / "log"
        self.programs.mkdir()
        self.home.mkdir()
        self.log.touch()
        self.add("bash", 'exec /bin/bash "$@"')

    def add(self, name: str, script: str) -> None:
        place = self.programs / name
        place.write_text(f'#!/bin/bash\n[ {name} = bash ] || echo "{name} $*" >> {self.log}\n{script}\n')
        place.chmod(0o755)

    def ensure_uv(self) -> subprocess.CompletedProcess[str]:
        command = ["/bin/bash", str(ROOT / "requirements" / "ensure-uv")]
        environment = {"PATH": str(self.programs), "HOME": str(self.home)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """Debian without python3-venv; installing it helps."""
    machine = Machine(tmp_path)
    venv = tmp_path / "made"
    venv.write_text("#!/bin/bash\n/bin/touch ${0%python3}uv; /bin/chmod 755 ${0%python3}uv\n")
    venv.chmod(0o755)
    machine.add("python3", f'case "$*" in *ensurepip*) [ -e {tmp_path}/venv ];; *) /bin/mkdir -p "$4/bin"; /bin/cp {venv} "$4/bin/python3";; esac')
    machine.add("apt-get", f'[ "$1" != install ] || : > {tmp_path}/venv')
    return machine


def test_a_uv_that_is_there_is_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("uv", "exit 1")
    assert machine.ensure_uv().stdout == f"{machine.programs}/uv\n"
    assert machine.log.read_text() == ""


def test_root_gets_it_in_an_environment_of_its_own_once(bare: Machine) -> None:
    """Never into the system's Python, which refuses packages of others."""
    bare.add("id", "echo 0")
    place = bare.home / ".cache" / "refit" / "uv"
    for _ in range(2):
        done = bare.ensure_uv()
        assert (done.returncode, done.stdout) == (0, f"{place}/bin/uv\n")
    calls = bare.log.read_text().splitlines()
    assert [call for call in calls if call.startswith("apt-get")] == ["apt-get update", INSTALL]
    assert calls.count(f"python3 -m venv --clear {place}") == 1


def test_somebody_else_is_told_the_command(bare: Machine) -> None:
    bare.add("id", "echo 1000")
    done = bare.ensure_uv()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"sudo {INSTALL}" in done.stderr
    assert "apt-get" not in bare.log.read_text()


@pytest.mark.soak
def test_with_the_real_python(tmp_path: Path) -> None:
    """It fetches a package."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    place = subprocess.run([str(ROOT / "requirements" / "ensure-uv")], env=environment, capture_output=True, text=True, timeout=300, check=True).stdout.strip()
    assert subprocess.run([place, "--version"], capture_output=True, text=True, check=True).stdout.startswith("uv ")

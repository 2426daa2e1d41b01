"""What is built once per content: a key changes with everything that decides the result, and with nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster import build
from e2e.cluster.build import MODULES, PROGRAMS
from e2e.cluster.errors import ClusterError
from e2e.cluster.pod_packages import folder_key, workloads
from e2e.cluster.settings import ClusterSettings
from e2e.cluster.wheel import source_key


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODULES, tmp_path / "modules"))


@pytest.mark.parametrize("file", ["go.mod", "go.sum", "main.go"])
def test_a_program_is_rebuilt_when_its_module_changes(modules: Path, file: str) -> None:
    before = build.key(PROGRAMS["coredns"], modules)
    (modules / "coredns" / file).write_text((modules / "coredns" / file).read_text() + "\n")
    assert build.key(PROGRAMS["coredns"], modules) != before


def test_flags_are_part_of_the_key() -> None:
    assert build.key(replace(PROGRAMS["etcd"], tags="other")) != build.key(PROGRAMS["etcd"])


def test_other_modules_are_not(modules: Path) -> None:
    before = build.key(PROGRAMS["etcd"], modules)
    (modules / "coredns" / "go.sum").write_text("")
    assert build.key(PROGRAMS["etcd"], modules) == before


def test_every_module_is_used() -> None:
    assert {program.module for program in PROGRAMS.values()} == {folder.name for folder in MODULES.iterdir()}


def test_the_network_plugins_share_a_folder() -> None:
    """containerd looks for all of them in one."""
    assert len({build.location(Path("/cache"), PROGRAMS[name]).parent for name in ("bridge", "loopback", "host-local")}) == 1


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    package = tmp_path / "crds" / "refit_api"
    package.mkdir(parents=True)
    (package / "names.py").write_text("A = 1\n")
    (tmp_path / "pyproject.toml").write_text('[tool.hatch.build.targets.wheel]\npackages = ["crds/refit_api"]\n')
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("")
    return tmp_path


def test_the_wheel_follows_its_sources(repository: Path) -> None:
    before = source_key(repository)
    (repository / "crds" / "refit_api" / "names.py").write_text("A = 2\n")
    assert source_key(repository) != before


def test_the_wheel_does_not_follow_compiled_files_or_tests(repository: Path) -> None:
    before = source_key(repository)
    for place in ("crds/refit_api/__pycache__/names.pyc", "tests/test_names.py"):
        (repository / place).parent.mkdir(exist_ok=True)
        (repository / place).write_text("x")
    assert source_key(repository) == before


def test_mounted_packages_follow_their_pins(tmp_path: Path) -> None:
    pins = tmp_path / "engine.txt"
    pins.write_text("torch==1\n")
    before = folder_key(pins)
    pins.write_text("torch==2\n")
    assert folder_key(pins) != before


def test_the_example_programs_fit_in_a_config_map() -> None:
    document = workloads("demo")
    data = document["data"]
    assert isinstance(data, dict)
    assert "trainer.py" in data
    assert sum(map(len, data.values())) < 1024 * 1024


def test_a_state_folder_too_deep_for_sockets_is_refused() -> None:
    with pytest.raises(ClusterError, match="REFIT_CLUSTER_STATE"):
        _ = ClusterSettings(cluster_state=Path("/tmp") / ("x" * 80)).state

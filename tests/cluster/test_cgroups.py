"""Both kinds of control groups are understood, and every process of the cluster is found in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.cluster import cgroups
from e2e.cluster.errors import ClusterError


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").touch()
    return tmp_path


@pytest.fixture
def per_controller(tmp_path: Path) -> Path:
    for name in ("cpu", "pids", "unified"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    (tmp_path / "cpuacct").symlink_to("cpu")
    return tmp_path


def test_one_hierarchy(unified: Path) -> None:
    assert cgroups.hierarchies(unified) == [unified]
    assert cgroups.tracking(unified) == unified


def test_a_hierarchy_per_controller_with_aliases_once(per_controller: Path) -> None:
    assert [one.name for one in cgroups.hierarchies(per_controller)] == ["cpu", "pids", "unified"]
    assert cgroups.tracking(per_controller).name == "pids"


def test_without_any_the_error_says_what_helps(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="REFIT_CLUSTER=existing"):
        cgroups.tracking(tmp_path)


def test_members_are_found_at_any_depth_and_once(unified: Path) -> None:
    for folder in ("refit", "k8s.io/ours", "k8s.io/ours/inner"):
        (unified / folder).mkdir(parents=True)
        (unified / folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert [member.pid for member in cgroups.members(["ours"], unified)] == [os.getpid()]


def test_containers_of_somebody_else_are_not_members(unified: Path) -> None:
    (unified / "k8s.io" / "theirs").mkdir(parents=True)
    (unified / "k8s.io" / "theirs" / "cgroup.procs").write_text("1\n")
    assert cgroups.members(["ours"], unified) == []


def test_groups_are_removed_in_every_hierarchy_and_others_stay(per_controller: Path) -> None:
    for hierarchy in cgroups.hierarchies(per_controller):
        for folder in ("refit", "k8s.io/ours/inner"):
            (hierarchy / folder).mkdir(parents=True)
    (per_controller / "cpu" / "k8s.io" / "theirs").mkdir()
    cgroups.remove(["ours"], per_controller)
    left = {str(folder.relative_to(per_controller)) for pattern in ("*/k8s.io/*", "*/refit") for folder in per_controller.glob(pattern)}
    assert left == {"cpu/k8s.io/theirs", "cpuacct/k8s.io/theirs"}

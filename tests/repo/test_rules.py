"""The rules of the house, as tests: layout, budgets, names, frozen settings, a small public surface."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
PACKAGES = ("crds/refit_api", "operator/refit_operator", "runtime/refit_runtime")
BANNED = re.compile(r"(^|_)(utils?|helpers?|common|misc|manager)$|_?v?\d+$")
FUNCTION_LINES, FILE_LINES, CLASS_LINES = 60, 500, 250


def tracked(pattern: str = "*") -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def python_files() -> list[Path]:
    return [path for path in tracked("*.py") if "_pb" not in path.parts]


def definitions(path: Path) -> Iterator[tuple[ast.AST, str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node, node.name, (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("folder", ["operator", "crds", "runtime"])
def test_no_module_shadows_the_standard_library(folder: str) -> None:
    """`import operator` must find the standard library from the repository's root."""
    assert [path.name for path in (ROOT / folder).glob("*.py")] == []


def test_files_stay_within_their_budget() -> None:
    long = {str(path.relative_to(ROOT)): n for path in python_files() if (n := len(path.read_text().splitlines())) > FILE_LINES}
    assert long == {}


def test_functions_and_classes_stay_within_their_budget() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{name} has {lines} lines"
        for path in python_files()
        for node, name, lines in definitions(path)
        if lines > (CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES)
    ]
    assert long == []


def test_modules_are_named_after_what_they_hold() -> None:
    allowed = {"v1alpha1"}  # an API version
    bad = [str(path.relative_to(ROOT)) for path in python_files() if BANNED.search(path.stem) and path.stem not in allowed]
    assert bad == []


def test_every_module_says_why_it_exists() -> None:
    silent = [str(path.relative_to(ROOT)) for path in python_files() if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None]
    assert silent == []


def test_requirements_name_no_index() -> None:
    for path in tracked("requirements/*.txt"):
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", path.read_text()), path


def test_the_wheel_needs_no_engine() -> None:
    """torch, vLLM, Megatron and NIXL belong to the host image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(entry for extra in project["optional-dependencies"].values() for entry in extra)]
    assert [entry for entry in wanted if re.match(r"(torch|vllm|megatron|nixl)", entry)] == []


def test_only_settings_read_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in python_files()
        if path.is_relative_to(ROOT / "operator") or path.is_relative_to(ROOT / "runtime") or path.is_relative_to(ROOT / "crds")
        if re.search(r"os\.(environ|getenv)", path.read_text())
    }
    assert {Path(path).name for path in readers} <= {"settings.py"}


def test_public_surface_of_the_runtime() -> None:
    import refit_runtime

    assert sorted(refit_runtime.__all__) == ["ControlClient", "GeneratorClient", "TrainerClient"]


def test_one_file_says_how_many_examples_a_property_gets() -> None:
    """Else `make soak` would not reach it."""
    asked = {str(path.relative_to(ROOT)) for path in tracked("tests/*.py") if re.search(r"max_examples=", path.read_text()) and path != Path(__file__)}
    assert asked == {"tests/examples.py"}


def test_nothing_big_is_tracked() -> None:
    assert {str(path.relative_to(ROOT)): size for path in tracked() if (size := path.stat().st_size) > 300_000} == {}

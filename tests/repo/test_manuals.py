"""What people and programs are told agrees with the code: reasons of the runbook, modules to import, generated files."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from refit_api.errors import BY_NAME
from refit_api.names import Reason

ROOT = Path(__file__).parents[2]
NOT_YET = {reason for reason in Reason if reason.meaning.endswith("*Not yet.*")}


def emitted() -> set[Reason]:
    """Those that the code names: the reference itself does not count."""
    files = [path for folder in ("crds", "operator", "runtime") for path in (ROOT / folder).rglob("*.py") if path.name != "manual.py"]
    return {Reason[name] for path in files for name in re.findall(r"\bReason\.([A-Z_]+)\b", path.read_text())}


def test_every_reason_is_emitted_or_marked_as_not_yet() -> None:
    assert set(Reason) - emitted() == NOT_YET


def test_the_runbook_has_a_word_for_each_reason_and_for_no_other() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    rows = {word for row in re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE) for word in re.findall(r"`([A-Z]\w+)`", row)}
    well = set(re.findall(r"`(\w+)`", text.partition("## All is well\n")[2].partition("\n## ")[0]))
    assert {str(reason) for reason in emitted()} - rows - well == set()
    assert (rows | well) - {str(reason) for reason in emitted()} - BY_NAME.keys() - {"WeightVersion"} == set()


@pytest.mark.parametrize(("program", "rows"), [("trainer", ("trainer", "trainer, Megatron-core")), ("custom_engine", ("custom engine",))])
def test_the_architecture_lists_what_the_examples_import(program: str, rows: tuple[str, ...]) -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## What a program imports")[2].partition("\n## ")[0]
    modules = dict(re.findall(r"^\| ([^|]+) \|([^|]+)\|$", section, re.MULTILINE))
    listed = {module for row in rows for module in re.findall(r"`(refit_runtime[\w.]*)`", modules[row])}
    imports = [node for node in ast.walk(ast.parse((ROOT / f"e2e/workloads/{program}.py").read_text())) if isinstance(node, ast.ImportFrom)]
    found = {str(node.module) for node in imports} | {
        f"refit_runtime.{alias.name}" for node in imports if node.module == "refit_runtime" for alias in node.names
    }
    assert {module for module in found if module.startswith("refit_runtime.")} - {"refit_runtime.TrainerClient"} == listed - {"refit_runtime"}


def test_generated_messages_are_those_of_the_proto(tmp_path: Path) -> None:
    """The generator is pinned: another one would stamp a protobuf runtime that host images do not have."""
    subprocess.run([ROOT / "proto" / "generate", tmp_path], check=True, timeout=300)
    made = {path.name: path.read_text() for path in (tmp_path / "refit_api" / "_pb").iterdir()}
    assert set(made) == {"catalog_pb2.py", "catalog_pb2.pyi"}
    assert made == {name: (ROOT / "crds" / "refit_api" / "_pb" / name).read_text() for name in made}


def test_every_list_of_pins_is_compiled_by_make_gen() -> None:
    recipe = re.sub(r"\$\$extra", "operator runtime", (ROOT / "Makefile").read_text().partition("\ngen:")[2].partition("\n\n")[0])
    for path in (ROOT / "requirements").glob("*.txt"):
        assert re.search(rf"-o requirements/[^;]*\b{path.stem}\b[^;]*\.txt", recipe), path

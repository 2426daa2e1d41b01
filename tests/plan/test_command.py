"""`refit plan` as people and programs use it: exit codes, JSON, tables, pictures. Tables are compared with golden text: REFIT_GOLDEN=write rewrites it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from refit_runtime.cli.plan import command
from refit_runtime.plan import picture
from typer.testing import CliRunner

HERE = Path(__file__).parent
RUNNER = CliRunner()

UNREAD = """
kind: RefitCase
name: unread
trainer:
  ranks:
    - rank: 0
      shards:
        - {tensor: x.weight, dtype: bfloat16, shape: [8, 4], box: [[0, 8], [0, 4]]}
        - {tensor: "\\x1b[31mred", dtype: bfloat16, shape: [4], box: [[0, 4]]}
generator:
  coordinates:
    - id: "tp0\\x1b[0m"
      needs:
        - {tensor: x.weight, box: [[0, 8], [0, 4]], param: x.weight, paramShape: [8, 4], dtype: bfloat16, at: [[0, 8], [0, 4]]}
"""

EXITS = {
    "m01-llama-gqa-tp2-to-tp1": (0, "ok"),
    "c30e-rank-is-a-fraction": (2, "invalid"),
    "c36b-half-published": (3, "refused"),
}


@pytest.mark.parametrize("run", [(), ("--run",)], ids=["planned", "run"])
@pytest.mark.parametrize(("case", "expected"), EXITS.items(), ids=EXITS)
def test_exit_code_and_json(case: str, expected: tuple[int, str], run: tuple[str, ...]) -> None:
    result = RUNNER.invoke(command, [str(HERE / "cases" / f"{case}.yaml"), "--json", *run])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["verdict"]) == expected
    assert ("params" in answer) == ("memory" in answer) == (expected[0] == 0 and bool(run))
    if expected[0] == 0:
        assert set(answer) - {"params", "memory"} == {"verdict", "planKey", "coordinates", "sources", "descriptors"}


@pytest.mark.parametrize(
    "case",
    [
        "m01-llama-gqa-tp2-to-tp1",
        "m11-llama-dp2-tp2-to-tp1",
        "m16-two-classes-tp2-and-tp4",
        "c108a-fsdp4-to-tp2",
        "m08-qwen3-moe-ep8-to-tp2-ep2",
        "m15-subset-of-a-model",
    ],
)
def test_printed_plan(case: str) -> None:
    result = RUNNER.invoke(command, [str(HERE / "cases" / f"{case}.yaml"), "--run"])
    printed = "\n".join(line.rstrip() for line in result.stdout.splitlines()) + "\n"
    golden = HERE / "golden" / f"{case}.txt"
    if os.environ.get("REFIT_GOLDEN") == "write":
        golden.write_text(printed, encoding="utf-8")
    assert printed == golden.read_text(encoding="utf-8")


def test_a_tensor_that_nobody_reads_is_named_and_no_name_steers_the_terminal(tmp_path: Path) -> None:
    case = tmp_path / "case.yaml"
    case.write_text(UNREAD)
    result = RUNNER.invoke(command, [str(case)])
    assert result.exit_code == 0, result.output
    assert "not read by any coordinate: \\x1b[31mred" in result.stdout
    assert "\x1b" not in result.output


def test_a_refusal_says_what_is_missing() -> None:
    result = RUNNER.invoke(command, [str(HERE / "cases" / "c36b-half-published.yaml")])
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "refused: IncompletePlan: tensor x.weight: bytes are missing in [[4, 8], [0, 4]]: publish them\n"


@pytest.mark.parametrize("name", ["nobody.yaml", "."])
def test_a_file_that_cannot_be_read_is_invalid(tmp_path: Path, name: str) -> None:
    result = RUNNER.invoke(command, [str(tmp_path / name), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["error"]["type"]) == (2, "InvalidCase")


def test_picture(tmp_path: Path) -> None:
    drawn = tmp_path / "plan.png"
    result = RUNNER.invoke(command, [str(HERE / "cases" / "m16-two-classes-tp2-and-tp4.yaml"), "--json", "--png", str(drawn)])
    assert result.exit_code == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = RUNNER.invoke(command, [str(HERE / "cases" / "c108a-fsdp4-to-tp2.yaml"), "--json", "--png", str(tmp_path / "none" / "plan.png")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"--png {tmp_path}/none/plan.png: No such file or directory" in result.stderr


def test_a_picture_never_takes_the_place_of_its_case(tmp_path: Path) -> None:
    case = tmp_path / "case.yaml"
    case.write_text(UNREAD)
    result = RUNNER.invoke(command, [str(case), "--json", "--png", str(tmp_path / "." / "case.yaml")])
    assert (result.exit_code, case.read_text()) == (2, UNREAD)
    assert "this is the case file" in result.stderr


def test_a_picture_of_too_many_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MOST_BARS", 1)
    drawn = tmp_path / "plan.png"
    result = RUNNER.invoke(command, [str(HERE / "cases" / "c108a-fsdp4-to-tp2.yaml"), "--json", "--png", str(drawn)])
    assert (result.exit_code, result.stderr.count("\n"), drawn.exists()) == (2, 1, False)
    assert "4 trainer ranks and 2 coordinates: at most 1 of each" in result.stderr


@pytest.mark.parametrize("name", ["[/foo]", "[red]node[bold]", "$\\\\foo$", "a\\nok: 1 runs", "\\x1b[0m"])
def test_a_name_is_shown_as_it_is_in_tables_and_pictures(tmp_path: Path, name: str) -> None:
    case, drawn = tmp_path / "case.yaml", tmp_path / "plan.png"
    case.write_text(UNREAD.replace("tp0\\x1b[0m", name).replace("name: unread", f'name: "{name}"'))
    result = RUNNER.invoke(command, [str(case), "--png", str(drawn)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert name.replace("\\\\", "\\") in result.stdout
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_boxes_that_share_no_edges_in_many_dims_are_refused_by_name(tmp_path: Path) -> None:
    """Each rank holds one element of the diagonal: 20 edges in each of 8 dims."""
    shards = [f"{{rank: {r}, shards: [{{tensor: x, dtype: int8, shape: {[20] * 8}, box: {[[r, r + 1]] * 8}}}]}}" for r in range(20)]
    path = tmp_path / "case.yaml"
    path.write_text(f"kind: RefitCase\ntrainer: {{ranks: [{', '.join(shards)}]}}\ngenerator: {{coordinates: []}}\n")
    result = RUNNER.invoke(command, [str(path), "--json"])
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["type"], error["tensor"]) == (3, "UnsupportedLayout", "x")
    assert "tensor x: the edges of 20 boxes cut it into 25600000000 cells" in error["message"]


def test_chunks_count_as_descriptors(tmp_path: Path) -> None:
    case = (HERE / "cases" / "c108a-fsdp4-to-tp2.yaml").read_text(encoding="utf-8")
    counts = []
    for size in (1 << 30, 100):
        path = tmp_path / f"{size}.yaml"
        path.write_text(case.replace("expect:", f"options: {{chunkBytes: {size}}}\nexpect:"), encoding="utf-8")
        answer = json.loads(RUNNER.invoke(command, [str(path), "--json"]).stdout)
        counts.append(answer["descriptors"])
        assert answer["descriptors"] == sum(-(-run["bytes"] // size) for each in answer["coordinates"].values() for run in each["runs"])
    assert counts[0] < counts[1]


@pytest.mark.parametrize(("size", "chunk", "reason"), [(10**12, 1 << 26, "bytes of memory, the machine has"), (10**8, 1, "100000000 reads of 1 bytes")])
def test_what_is_too_large_to_move_is_planned_and_said(tmp_path: Path, size: int, chunk: int, reason: str) -> None:
    """Real models are larger than the machine that plans them."""
    box = f"[[0, {size}]]"
    need = f"{{tensor: x, box: {box}, param: p, paramShape: [{size}], dtype: uint8, at: {box}}}"
    path = tmp_path / "case.yaml"
    path.write_text(
        f"kind: RefitCase\noptions: {{chunkBytes: {chunk}}}\n"
        f"trainer: {{ranks: [{{rank: 0, shards: [{{tensor: x, dtype: uint8, shape: [{size}], box: {box}}}]}}]}}\n"
        f"generator: {{coordinates: [{{id: a, needs: [{need}]}}]}}\n",
        encoding="utf-8",
    )
    planned, moved = (RUNNER.invoke(command, [str(path), "--json", *run]) for run in ((), ("--run",)))
    assert (planned.exit_code, json.loads(planned.stdout)["descriptors"]) == (0, -(-size // chunk))
    assert moved.exit_code == 2
    assert reason in json.loads(moved.stdout)["error"]["message"]
    printed = RUNNER.invoke(command, [str(path), "--run"])
    assert (printed.exit_code, printed.stdout, printed.stderr.count("\n")) == (2, "", 1)

"""What benches leave: `bench/results/<bench>.json`, and the same as a table beside the last committed figures of the same hardware.

A missed target stays in the file with `met: false`; a ratio stands beside both of its terms. Figures of other hardware are never compared.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import refit_api
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.table import Table
from typing_extensions import Self

FOLDER = Path(__file__).parent / "results"
COMMITS = 20  # how far back figures of the same hardware are looked for


class Metric(BaseModel):
    """`met` says which way the target goes: at most, or at least."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    value: float
    unit: str
    target: float | None = None
    met: bool | None = None

    @model_validator(mode="after")
    def _judged(self) -> Self:
        if (self.target is None) != (self.met is None):
            raise ValueError(f"{self.name}: a target is met or missed, and nothing else is")
        return self

    @property
    def target_text(self) -> str:
        if self.target is None:
            return ""
        return f"{'<=' if (self.value <= self.target) == self.met else '>='} {self.target:g}"


class Result(BaseModel):
    """One run of one bench."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bench: str
    command: str
    date: AwareDatetime
    hardware: Annotated[str, Field(min_length=1)]
    software: dict[str, str]
    metrics: tuple[Metric, ...]

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        names = [metric.name for metric in self.metrics]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"metrics of the same name: {', '.join(twice)}")
        return self


def metric(name: str, value: float, unit: str = "", *, most: float | None = None, least: float | None = None) -> Metric:
    assert most is None or least is None, "a target goes one way"
    met = value <= most if most is not None else value >= least if least is not None else None
    return Metric(name=name, value=round(value, 3), unit=unit, target=most if most is not None else least, met=met)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores"


def record(bench: str, metrics: list[Metric], hardware: str, packages: tuple[str, ...], **software: str) -> None:
    """Prints the table and writes the file; versions of `packages` are looked up."""
    versions = {"python": platform.python_version(), "refit": refit_api.__version__, **{name: version(name) for name in packages}, **software}
    now = datetime.now(timezone.utc).replace(microsecond=0)
    result = Result(bench=bench, command=f"python -m bench {bench}", date=now, hardware=hardware, software=versions, metrics=tuple(metrics))
    before = {each.name: each.value for each in _last_committed(bench, hardware)}
    table = Table(title=f"{bench}, on {hardware}", title_justify="left")
    for name in ("metric", "value", "target", "met", "last"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for each in metrics:
        met = {None: "", True: "yes", False: "NO"}[each.met]
        table.add_row(each.name, f"{each.value:g} {each.unit}", each.target_text, met, f"{before[each.name]:g}" if each.name in before else "")
    Console(width=160).print(table)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{bench}.json").write_text(result.model_dump_json(indent=1) + "\n")


def _last_committed(bench: str, hardware: str) -> tuple[Metric, ...]:
    """None without a repository, or when no commit looked at has figures of this hardware."""
    path = f"./{bench}.json"
    for commit in _git("log", f"-{COMMITS}", "--format=%H", "--", path).split():
        try:
            result = Result.model_validate_json(_git("show", f"{commit}:{path}"))
        except ValidationError:  # the commit removed it, or its format was another one
            continue
        if result.hardware == hardware:
            return result.metrics
    return ()


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=30).stdout
    except OSError:
        return ""

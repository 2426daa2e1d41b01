"""`refit plan CASE.yaml`: proves, plans and prints a case; `--run` moves real bytes through it and checks where they arrive.

Exit codes: 0 ok, 1 wrong (`--run` only: a bug of ours), 2 the file itself is wrong, 3 no correct plan.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from refit_api.errors import InvalidCase, PlanError
from rich.console import Console

from refit_runtime.plan.cases.answer import INVALID, Planned, as_json, descriptors, plan_case, run_case
from refit_runtime.plan.cases.move import Moved
from refit_runtime.plan.picture import png
from refit_runtime.plan.plan import Plan
from refit_runtime.plan.render import printable, size, tables, unread

command = typer.Typer(add_completion=False)


@command.command()
def plan(
    case: Annotated[Path, typer.Argument(help="A case file: a trainer layout, a generator layout and options.")],
    as_json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Also move real bytes through memory, and check them.")] = False,
    picture: Annotated[Path | None, typer.Option("--png", help="Draw the two layouts and the runs between them.")] = None,
) -> None:
    """Proves that every trainer byte that the generator needs arrives once, plans the runs, and prints them.

    Exit codes: 0 ok, 1 wrong bytes with --run, 2 the file itself is wrong, 3 refused.
    """
    planned, moved = _read(case), None
    if run and planned.plan is not None:
        try:
            moved = run_case(planned, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except InvalidCase as error:
            planned = replace(planned, code=INVALID, error=error)
    code, answer = as_json(planned, moved)
    if as_json_:
        print(json.dumps(answer, indent=1))
    else:
        _print(planned, moved, answer["verdict"])
    if picture is not None and planned.plan is not None and planned.error is None:
        _draw(picture, planned.plan, case, _title(planned, case))
    raise typer.Exit(code)


def _read(case: Path) -> Planned:
    try:
        return plan_case(case.read_bytes())
    except OSError as error:
        return Planned(INVALID, error=InvalidCase(f"{case}: {error.strerror}", field="", line=0))


def _draw(picture: Path, drawn: Plan, case: Path, title: str) -> None:
    try:
        if picture.exists() and picture.samefile(case):
            reason = "this is the case file; name another one"
        else:
            picture.write_bytes(png(drawn, title))
            return
    except OSError as error:
        reason = f"{error.strerror}; name a file in a folder that can be written"
    except PlanError as error:
        reason = error.message
    print(printable(f"--png {picture}: {reason}"), file=sys.stderr)
    raise typer.Exit(INVALID)


def _title(planned: Planned, path: Path) -> str:
    return (planned.case.name if planned.case is not None else "") or path.name


def _print(planned: Planned, moved: Moved | None, verdict: str) -> None:
    if planned.error is not None:
        said = printable(f"{verdict}: {type(planned.error).__name__}: {planned.error.message}")
        Console(stderr=True, soft_wrap=True).print(said, markup=False, highlight=False)
        return
    assert planned.plan is not None
    assert planned.case is not None
    console = Console()
    console.print(tables(planned.plan, planned.case.chunk_bytes))
    if left := unread(planned.plan):
        console.print(printable(left), markup=False, highlight=False)
    reads = f"{descriptors(planned.case, planned.plan)} reads of at most {size(planned.case.chunk_bytes)}"
    console.print(f"{verdict}: {len(planned.plan.runs)} runs, {reads}, plan key {planned.key[:12]}", markup=False, highlight=False)
    if moved is not None:
        params = sum(len(found) for found in moved.params.values())
        result = "every byte is where it belongs" if moved.right else "bytes are not where they belong: please report this case"
        console.print(f"moved into {params} parameters of {len(moved.params)} coordinates: {result}", markup=False, highlight=False)

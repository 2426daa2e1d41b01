"""A plan as tables: who reads how much from whom, and what it costs in memory. The same text wherever it is printed, so it can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from refit_runtime.plan.coverage import label
from refit_runtime.plan.plan import Plan
from refit_runtime.plan.windows import HALVES, window_bytes

SHOWN = 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: int) -> str:
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.4g} {_UNITS[unit]}"


def tables(plan: Plan, chunk_bytes: int) -> Group:
    return Group(_links(plan), _sources(plan), _coordinates(plan, chunk_bytes))


def unread(plan: Plan) -> str:
    """Tensors that move nowhere, in a line; empty: there are none. A name that engines spell otherwise would be among them."""
    names = plan.unread
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"not read by any coordinate: {', '.join(names[:SHOWN])}{more}" if names else ""


def printable(text: str) -> str:
    """Names come from files: none of them steers a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _links(plan: Plan) -> Table:
    """Bytes per link, as long as every first owner lives."""
    table = _table("Links", ["source", "coordinate"], ["runs", "atoms", "bytes"])
    links: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for run in plan.runs:
        for class_, id_ in run.needers:
            found = links[run.owners[0], label(class_, id_)]
            for i, value in enumerate((1, run.atoms, run.bytes)):
                found[i] += value
    for (rank, place), (runs, atoms, nbytes) in sorted(links.items()):
        table.add_row(f"rank {rank}", Text(printable(place)), str(runs), str(atoms), size(nbytes))
    return table


def _sources(plan: Plan) -> Table:
    """With what each rank pays for an arena, and its readers for none."""
    table = _table("Trainer ranks", ["rank", "slots"], ["runs", "arena", "strips in place", "shortest"])
    table.caption = "snapshot InPlace: no arena; readers ask strip by strip, and training waits until the version is released"
    table.caption_justify = "left"
    for rank in plan.ranks:
        runs = plan.rank_runs(rank)
        slots = list(dict.fromkeys(plan.runs[run].slot for run in runs))
        many, shortest = plan.strips(rank)
        table.add_row(str(rank), ", ".join(slots), str(len(runs)), size(plan.source_bytes(rank)), str(many), size(shortest))
    return table


def _coordinates(plan: Plan, chunk_bytes: int) -> Table:
    """With what each pays for an arena, and for none."""
    table = _table("Coordinates", ["coordinate"], ["runs", "atoms", "bytes", "arena", "ring", "windows"])
    table.caption = "staging Windowed: the ring instead of the arena; all bytes move in the pause, window by window"
    table.caption_justify = "left"
    for class_, id_ in plan.coordinates:
        runs = [plan.runs[run] for run in plan.coordinate_runs(class_, id_)]
        nbytes, arena = sum(run.bytes for run in runs), plan.coordinate_bytes(class_, id_)
        window = window_bytes(nbytes, chunk_bytes)
        cost = size(arena), size(HALVES * window), str(-(-nbytes // window))
        table.add_row(Text(printable(label(class_, id_))), str(len(runs)), str(sum(run.atoms for run in runs)), size(nbytes), *cost)
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table

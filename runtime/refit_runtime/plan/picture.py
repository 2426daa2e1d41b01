"""A plan as a picture: trainer ranks on the left, coordinates on the right, a ribbon for every run between its first owner and each needer.

Bars are as high as arenas are large. Needs matplotlib, which only people who draw have to install.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from refit_api.errors import UnsupportedLayout

from refit_runtime.plan.coverage import label
from refit_runtime.plan.plan import Plan
from refit_runtime.plan.render import printable, size

_Places = dict[tuple[str, int], tuple[float, float]]  # by bar and run: bottom and top

_LEFT, _RIGHT, _BAR = 0.0, 1.0, 0.08
MOST_BARS = 512  # on a side: pictures may be 65,536 points high
_GAP = 0.02  # between bars, of the height of all


def png(plan: Plan, title: str) -> bytes:
    """Raises UnsupportedLayout if it is too large to be drawn, or matplotlib is missing."""
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise UnsupportedLayout("drawing a plan needs matplotlib: pip install matplotlib") from missing
    places = [(label(*place), plan.coordinate_runs(*place)) for place in plan.coordinates]
    ranks = [(f"rank {rank}", plan.rank_runs(rank)) for rank in plan.ranks]
    if len(ranks) > MOST_BARS or len(places) > MOST_BARS:
        raise UnsupportedLayout(f"a picture of {len(ranks)} trainer ranks and {len(places)} coordinates: at most {MOST_BARS} of each can be drawn")
    figure = Figure(figsize=(9, max(3.0, 0.5 * max(len(ranks), len(places)))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(printable(title), parse_math=False)
    axes.set_axis_off()
    colour = _colours(plan, colormaps["tab20"])
    left = _bars(axes, plan, ranks, _LEFT - _BAR, "right", colour)
    right = _bars(axes, plan, places, _RIGHT, "left", colour)
    for run in plan.runs:
        for class_, id_ in run.needers:
            _ribbon(axes, left[f"rank {run.owners[0]}", run.index], right[label(class_, id_), run.index], colour(run.index))
    written = BytesIO()
    figure.savefig(written, format="png", dpi=150)
    return written.getvalue()


def _colours(plan: Plan, palette: Any) -> Callable[[int], Any]:
    """One for each rank that serves."""
    order = {rank: i for i, rank in enumerate(plan.ranks)}
    return lambda run: palette(order[plan.runs[run].owners[0]] % palette.N)


def _bars(axes: Any, plan: Plan, bars: Sequence[tuple[str, Sequence[int]]], x: float, side: str, colour: Callable[[int], Any]) -> _Places:
    """Draws one bar for each name; returns where each run lies on it."""
    total = sum(plan.runs[run].bytes for _, runs in bars for run in runs) or 1
    found: _Places = {}
    y = 1.0
    for name, runs in bars:
        top = y
        for run in runs:
            height = plan.runs[run].bytes / total
            axes.bar(x, height, width=_BAR, bottom=y - height, align="edge", color=colour(run), edgecolor="white", linewidth=0.5)
            found[name, run] = (y - height, y)
            y -= height
        words = f"{printable(name)}\n{size(sum(plan.runs[run].bytes for run in runs))}"
        axes.text(x - 0.01 if side == "right" else x + _BAR + 0.01, (top + y) / 2, words, ha=side, va="center", fontsize=8, parse_math=False)
        y -= _GAP
    return found


def _ribbon(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: Any) -> None:
    steps = [i / 24 for i in range(25)]
    ease = [step * step * (3 - 2 * step) for step in steps]
    low, high = ([start[side] + (end[side] - start[side]) * step for step in ease] for side in (0, 1))
    axes.fill_between([_LEFT + (_RIGHT - _LEFT) * step for step in steps], low, high, color=colour, alpha=0.35, linewidth=0)

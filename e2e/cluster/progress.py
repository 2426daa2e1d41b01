"""Long steps say what they do, how long it usually takes and how long it took; a silent terminal looks like a hang.

On a terminal a step is one live line; elsewhere (CI) it is a line at its start, one every half minute, and one at its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

CONSOLE = Console(stderr=True, highlight=False)
REMINDER_SECONDS = 30.0


def failed(error: Exception) -> None:
    """What a cluster says may look like markup."""
    CONSOLE.print("[red]✗[/]", end=" ")
    CONSOLE.print(str(error), markup=False, soft_wrap=True)


@contextmanager
def step(what: str, about: float | None = None) -> Iterator[None]:
    """Announces `what`; `about` is its usual time in seconds."""
    expected = f" (about {about:.0f} s)" if about else ""
    started = time.monotonic()
    if CONSOLE.is_terminal:
        with CONSOLE.status(f"{what}{expected}"):
            yield
    else:
        CONSOLE.print(f"  {what}{expected} ...")
        ended = threading.Event()
        reminder = threading.Thread(target=_remind, args=(what, started, ended), daemon=True)
        reminder.start()
        try:
            yield
        finally:
            ended.set()
            reminder.join()
    CONSOLE.print(f"[green]✓[/] {what} [dim]{time.monotonic() - started:.1f} s[/]")


def _remind(what: str, started: float, ended: threading.Event) -> None:
    while not ended.wait(REMINDER_SECONDS):
        CONSOLE.print(f"  {what}: {time.monotonic() - started:.0f} s")

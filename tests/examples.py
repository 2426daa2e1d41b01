"""How many examples a property gets: few in `make test`, so that a file runs in seconds; many in `make soak`, which sets REFIT_SOAK."""

from __future__ import annotations

import os

from hypothesis import settings

SOAK = bool(os.environ.get("REFIT_SOAK"))
FACTOR = 10


def examples(count: int) -> settings:
    """`count` of them. Timings are nobody's business here, so none is too slow."""
    return settings(max_examples=count * FACTOR if SOAK else count, deadline=None)

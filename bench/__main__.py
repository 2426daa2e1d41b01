"""All benches, or those that are named: `python -m bench [NAME...]`. Each prints a table and writes `bench/results/NAME.json`."""

from __future__ import annotations

import importlib
import sys

BENCHES = ("plan", "needs", "refit", "device")


def runnable() -> tuple[str, ...]:
    import torch

    if torch.cuda.is_available():
        return BENCHES
    print("device: left out, there is no CUDA here")
    return tuple(name for name in BENCHES if name != "device")


def main() -> None:
    named = sys.argv[1:]
    if unknown := [name for name in named if name not in BENCHES]:
        sys.exit(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    for name in named or runnable():
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()

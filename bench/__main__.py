"""Benches: each prints a table and writes `bench/results/NAME.json`.

python -m bench              # all that this machine can run, but soak, which takes an hour
python -m bench NAME...      # plan, needs, engine, refit, device, engine_gpu, soak; docs/performance.md says what each needs
"""

from __future__ import annotations

import importlib
import sys

ON_CUDA = ("device", "engine_gpu")
UNASKED = ("plan", "needs", "engine", "refit", *ON_CUDA)
BENCHES = (*UNASKED, "soak")


def runnable() -> tuple[str, ...]:
    import torch

    if torch.cuda.is_available():
        return UNASKED
    print(f"{', '.join(ON_CUDA)}: left out, there is no CUDA here")
    return tuple(name for name in UNASKED if name not in ON_CUDA)


def main() -> None:
    named = sys.argv[1:]
    if {"-h", "--help"} & set(named):
        print(__doc__)
        return
    if unknown := [name for name in named if name not in BENCHES]:
        sys.exit(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    for name in named or runnable():
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()

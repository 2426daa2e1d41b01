"""The data plane of Refit: three clients, and nothing else is public.

    TrainerClient(settings, rank, world)       bind, publish, release, close
    GeneratorClient(settings, coordinate)      bind, stage, install, discard, release, held, close
    ControlClient(settings)                    create, wait_ready, wait_converged, retire, abort, list, watch

What a trainer or a custom engine imports beside them is listed in docs/architecture.md.
They are found when they are asked for: planning on a laptop needs neither gRPC nor an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refit_runtime.wiring import ControlClient, GeneratorClient, TrainerClient

__all__ = ["ControlClient", "GeneratorClient", "TrainerClient"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from refit_runtime import wiring

    return getattr(wiring, name)

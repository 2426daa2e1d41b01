"""What the example trainers do around a publish, whatever their framework is: wait until they may, ask again while nobody is there, leave in order."""

from __future__ import annotations

import random
import signal
import time
from types import FrameType

import structlog
from refit_api.errors import PeerError
from refit_api.wire import Version
from refit_runtime import TrainerClient

from e2e.workloads.settings import TrainerProgram

log = structlog.get_logger(__name__)


def publish(client: TrainerClient, step: int, patience: float) -> Version | None:
    """Asks again while no engine is there yet or the catalog is away. The same step is the same version, whoever asked first."""
    deadline = time.monotonic() + patience
    while True:
        left = deadline - time.monotonic()
        try:
            return client.publish(step)
        except PeerError as error:
            if error.retry_after is None or error.retry_after > left:
                raise
            log.info("cannot publish yet", step=step, why=error.message)
            time.sleep(error.retry_after * random.uniform(1.0, 1.3))


def wait_until_allowed(program: TrainerProgram, count: int) -> None:
    """Whoever wants to look at every version writes into a file how many may be published."""
    while program.allowed is not None and not (program.allowed.exists() and int(program.allowed.read_text() or 0) > count):
        time.sleep(0.2)


def leave(*_: int | FrameType | None) -> None:
    """On SIGTERM, once: what is open is closed on the way out, and readers find a closed holder instead of a vanished one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)

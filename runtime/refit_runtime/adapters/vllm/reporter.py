"""What a rank is doing, said beside the engine: into a file of the pod whenever it moves.

The agent looks once a second, and far more often while something moves. Each look through the engine's RPC would wait for its step, hold up the next
one, and keep a worker that is idle spinning for another second; a file costs the engine nothing.
"""

from __future__ import annotations

import threading
import time

from refit_runtime.adapters.vllm.messages import pack_report
from refit_runtime.adapters.vllm.pod import Pod
from refit_runtime.rank import GeneratorRank

MOVING_SECONDS, IDLE_SECONDS = 0.05, 1.0


class Reporter:
    """`news` is set by whoever changed something; `start` once the rank is bound."""

    def __init__(self, rank: GeneratorRank, number: int, pod: Pod, news: threading.Event) -> None:
        self._rank, self._number, self._pod, self._news = rank, number, pod, news
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="refit-reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def now(self) -> bytes:
        """One at a time: a later report is made, and stamped, after an earlier one."""
        with self._lock:
            return pack_report(time.monotonic_ns(), self._rank.report())

    def _write(self) -> None:
        said = None
        while not self._closing.is_set():
            report = self._rank.report()
            moved = report != said
            if moved:
                self._pod.write_report(self._number, self.now())
                said = report
            self._news.wait(MOVING_SECONDS if moved else IDLE_SECONDS)
            self._news.clear()

    def close(self) -> None:
        self._closing.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(5)

"""The engine outside of Refit, as a process: what a checkpoint must generate, by vLLM's own loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from e2e.cluster.settings import REPOSITORY
from e2e.workloads.tiny_llama import TinyLlama

READY_SECONDS, ANSWER_SECONDS = 400.0, 120.0


class Reference:
    """Starts when made; the first answer waits for the engine."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log, self._ready = process, log, False

    def generate(self, checkpoint: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations."""
        return self.generate_across([(checkpoint, tokens)], prompts)

    def generate_across(self, legs: Sequence[tuple[Path, int]], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """So many tokens by each checkpoint, with the cache of the one before: what a request says that runs across commits."""
        if not self._ready:
            assert self._answer(READY_SECONDS) == {"ready": True}
            self._ready = True
        assert self._process.stdin is not None
        asked = {"legs": [(str(checkpoint), tokens) for checkpoint, tokens in legs], "prompts": [list(prompt) for prompt in prompts]}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: list[list[int]] = self._answer(ANSWER_SECONDS)["tokens"]
        return found

    def _answer(self, seconds: float) -> dict[str, Any]:
        line: list[str] = []
        assert self._process.stdout is not None
        reader = threading.Thread(target=_read_line, args=(self._process.stdout, line), daemon=True)
        reader.start()
        reader.join(seconds)
        if not line or not line[0]:
            raise RuntimeError(f"the reference engine did not answer within {seconds:.0f} s:\n{self._log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line[0])
        return answer


def _read_line(stream: IO[str], line: list[str]) -> None:
    line.append(stream.readline())


@contextmanager
def reference(folder: Path) -> Iterator[Reference]:
    """`folder` gets the model's configuration and the engine's log."""
    model, log = folder / "model", folder / "reference.log"
    TinyLlama().write_config(model)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            ["nice", sys.executable, "-m", "e2e.workloads.reference", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=folder,
        )
        with process:  # closes the pipes
            try:
                yield Reference(process, log)
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()

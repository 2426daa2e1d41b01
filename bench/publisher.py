"""A catalog and a trainer of a Llama in a process of their own, beside an engine under measurement; commands come through a pipe.

Weights are made from a seed, so a version can come back. The trained module is also the reference: it says whether an engine's tokens are its own choices.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from refit_api.mounted import Engine, Mounted, Rollout, Trainer, Verification, Versions
from refit_api.wire import Role
from refit_operator.catalog.local import local_catalog
from refit_runtime import TrainerClient
from refit_runtime.settings import RuntimeSettings

from bench.probe import fingerprint
from tests import pods

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
TRAINER, GENERATOR = "trainer-0", "generator-0"
PORTS = {TRAINER: 27491, GENERATOR: 27495}
ROUNDING = 0.5  # of logits in bfloat16 whose spread is above 1: two right engines differ by less, other weights by far more
ANSWER_SECONDS = 300.0


class Published:
    """What the commands do."""

    def __init__(self, client: TrainerClient, model: Any) -> None:
        self._client, self._model = client, model
        self._step = 0

    def publish(self, seed: int) -> dict[str, Any]:
        """`live`: fingerprints of what an engine's parameters must be; `milliseconds`: how long training stood still for it."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
        live = self._live()
        start = time.perf_counter()
        version = self._client.publish(self._step)
        taken = time.perf_counter() - start
        self._step += 1
        assert version is not None, "onBusy is Wait"
        return {"number": version.number, "live": live, "milliseconds": 1e3 * taken}

    def _live(self) -> dict[str, int]:
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name, parameter in self._model.named_parameters():
            parts[".".join(FUSED.get(part, part) for part in name.split("."))].append(parameter)
        return {name: fingerprint(each) for name, each in parts.items()}

    def chosen(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> bool:
        """Whether each token is one that the trained module would choose at its place, but for rounding."""
        asked = len(prompts[0])
        tokens = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)], device=self._model.device)
        with torch.no_grad():
            logits = self._model(tokens).logits[:, asked - 1 : -1].float()
        taken = logits.gather(-1, tokens[:, asked:, None])[..., 0]
        return bool((taken >= logits.amax(-1) - ROUNDING).all())


def _serve(pipe: Connection, folder: Path, model_folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with local_catalog() as catalog:
        given = {role: pods.mounted(catalog, folder, uid, role, **_more(uid)) for uid, role in ((TRAINER, Role.TRAINER), (GENERATOR, Role.GENERATOR))}
        os.environ.update(pods.environment(given[Role.TRAINER], folder, TRAINER))
        client = TrainerClient(RuntimeSettings.load(), 0, 1, run_id="run-1")
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.bfloat16).eval()
        client.bind(model)
        published = Published(client, model)
        pipe.send(given[Role.GENERATOR])
        for name, arguments in iter(pipe.recv, None):
            pipe.send(getattr(published, name)(*arguments))
        client.close()


def _more(uid: str) -> dict[str, Any]:
    """Settings of this group: a framework drives it, and nothing is kept of what was cached."""
    return {
        "worker_port": PORTS[uid],
        "trainer": Trainer(redundancy=1),
        "engine": Engine(kv="Keep"),
        "rollout": Rollout(policy="Manual"),
        "versions": Versions(lease_seconds=30, drain_seconds=2),
        "verification": Verification(installed="Async"),
    }


class Publisher:
    """The other end of the pipe."""

    def __init__(self, pipe: Connection, process: BaseProcess) -> None:
        self._pipe, self._process = pipe, process
        self.generator: Mounted = self._answer()

    def require(self) -> None:
        """Libraries of transports may end the process that they are in when a connection breaks."""
        if not self._process.is_alive():
            raise RuntimeError(f"the publisher ended with status {self._process.exitcode}: its last words are above")

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_SECONDS):
            raise TimeoutError(f"the publisher said nothing for {ANSWER_SECONDS:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(5)
            self.require()
            raise

    def ask(self, name: str, *arguments: object) -> Any:
        self._pipe.send((name, arguments))
        return self._answer()


@contextmanager
def publisher(folder: Path, model_folder: Path) -> Iterator[Publisher]:
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(there, folder, model_folder), daemon=True)
    process.start()
    there.close()
    try:
        made = Publisher(here, process)
        yield made
        here.send(None)
        process.join(30)
    finally:
        if process.is_alive():
            process.kill()

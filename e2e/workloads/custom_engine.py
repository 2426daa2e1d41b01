"""A `Custom` engine to copy from: the parameters of the tiny Llama in a plain torch module, refitted by the pod agent in the same process.

    rank = GeneratorRank(...); rank.bind(TorchTarget(module))        what it needs, and where it goes
    gate.request()                                                   around each answer: one whole version, never a half-installed one
    Agent(...).run()                                                 follows the operator

`/refit/version`, `/refit/status` and `/refit/prestop` as every generator has them; `/checksum` is the answer of this engine: SHA-256 over its live
parameters, with the version that they are; `/counters` is what its rank counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import structlog
import torch
from refit_api import names
from refit_api.errors import RefitError
from refit_runtime import last_words
from refit_runtime.adapters.local_engine import Gate, LocalEngine
from refit_runtime.adapters.torch_module import TorchTarget
from refit_runtime.agent import Agent
from refit_runtime.rank import GeneratorRank
from refit_runtime.settings import RuntimeSettings
from refit_runtime.status import document
from refit_runtime.wiring import seams_of

from e2e.workloads.settings import EngineProgram, read
from e2e.workloads.tiny_llama import TinyLlama

log = structlog.get_logger(__name__)

Stacks = dict[str, tuple[tuple[str, int], ...]]


def shapes(model: TinyLlama) -> dict[str, tuple[int, ...]]:
    """The tensors of its checkpoints."""
    query, kv = model.query_heads * model.head, model.kv_heads * model.head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.words, model.hidden)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{name}_proj.weight": (rows, model.hidden) for name, rows in (("q", query), ("k", kv), ("v", kv))}
        found |= {f"{at}.self_attn.o_proj.weight": (model.hidden, query), f"{at}.mlp.down_proj.weight": (model.hidden, model.ffn)}
        found |= {f"{at}.mlp.{name}_proj.weight": (model.ffn, model.hidden) for name in ("gate", "up")}
        found |= {f"{at}.{name}_layernorm.weight": (model.hidden,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (model.hidden,), "lm_head.weight": (model.words, model.hidden)}


def stacked(model: TinyLlama) -> Stacks:
    """Fused parameter -> the tensors below each other in it."""
    tensors = shapes(model)
    found: Stacks = {}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        for parts, name in ((("self_attn.q", "self_attn.k", "self_attn.v"), "self_attn.qkv"), (("mlp.gate", "mlp.up"), "mlp.gate_up")):
            each = [f"{at}.{part}_proj.weight" for part in parts]
            found[f"{at}.{name}_proj.weight"] = tuple((tensor, tensors[tensor][0]) for tensor in each)
    return found


def engine(model: TinyLlama, fused: bool) -> tuple[torch.nn.Module, Stacks]:
    """Its module, filled with what no trainer ever publishes."""
    wanted, stacks = shapes(model), stacked(model) if fused else {}
    for name, parts in stacks.items():
        wanted[name] = (sum(rows for _, rows in parts), *wanted[parts[0][0]][1:])
        for tensor, _ in parts:
            del wanted[tensor]
    root = torch.nn.Module()
    for name, shape in wanted.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in dict(module.named_children()):
                module.add_module(step, torch.nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(leaf, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=torch.bfloat16), requires_grad=False))
    return root, stacks


def checksum(module: torch.nn.Module) -> str:
    whole = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        whole.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


class Routes:
    """What the engine answers, by path; `ask` runs a coroutine on the agent's loop."""

    def __init__(self, module: torch.nn.Module, rank: GeneratorRank, gate: Gate, agent: Agent, loop: asyncio.AbstractEventLoop) -> None:
        self._module, self._gate, self._agent, self._loop = module, gate, agent, loop
        self.paths: dict[str, Callable[[], dict[str, Any]]] = {
            names.VERSION_PATH: self.version,
            names.STATUS_PATH: lambda: document(self._agent.view()),
            names.PRESTOP_PATH: self.prestop,
            "/checksum": self.checksum,
            "/counters": rank.counters,
        }

    def version(self) -> dict[str, Any]:
        view = self._agent.view()
        return {"version": view.version, "closed": view.fenced}

    def checksum(self) -> dict[str, Any]:
        with self._gate.request() as version:
            return {"version": version, "sha256": checksum(self._module)}

    def prestop(self) -> dict[str, Any]:
        """Answers when the readers of this pod are gone, or when waiting longer is no use."""
        try:
            self.ask(self._agent.leave())
        except RefitError as error:
            return {"left": False, "reason": error.message}
        return {"left": True, "reason": ""}

    def ask(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Handler(BaseHTTPRequestHandler):
    """JSON over GET."""

    def __init__(self, routes: Routes, *arguments: Any) -> None:
        self.routes = routes
        super().__init__(*arguments)

    def do_GET(self) -> None:
        answer = self.routes.paths.get(self.path)
        try:
            status, body = (200, answer()) if answer is not None else (404, {"error": f"no {self.path}", "paths": sorted(self.routes.paths)})
        except RefitError as error:
            status, body = 503, {"error": error.message}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """The kubelet asks often."""


def end(reason: str) -> None:
    """The process only, and at once: its ranks may hang."""
    log.error("the engine ends", reason=reason)
    last_words.say(reason)
    os._exit(1)


async def serve(program: EngineProgram, settings: RuntimeSettings, announce: Callable[[int], None] = lambda port: None) -> None:
    """Until SIGTERM or SIGINT. `announce` is told the port."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)
    module, stacks = engine(TinyLlama().scaled(program.scale), program.fused)
    seams, gate = seams_of(settings, 0), Gate()
    rank = GeneratorRank(settings, seams, "tp0")
    await asyncio.to_thread(rank.bind, TorchTarget(module, "tp0", stacks))
    agent = Agent(settings, seams.catalog, LocalEngine([rank], gate, end), seams.clock, Random())
    server = ThreadingHTTPServer((program.host, program.port), partial(Handler, Routes(module, rank, gate, agent, loop)))
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    announce(server.server_port)
    work, stop = asyncio.create_task(agent.run()), asyncio.create_task(stopped.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    server.shutdown()
    if work.done():
        await work  # a bug: the pod must not look healthy without its agent
    work.cancel()
    await asyncio.to_thread(rank.close)
    seams.catalog.close()


def main() -> None:
    torch.set_num_threads(1)
    with last_words.fatal():
        asyncio.run(serve(read(EngineProgram), RuntimeSettings.load()))


if __name__ == "__main__":
    main()

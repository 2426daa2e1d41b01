"""One raw NIXL read between two pods: the yardstick of what a Refit stage costs over the wire. A container of it runs in both; there is no Refit in it, except
that its agent sleeps between events as ours do: one that polls would take a core from whatever is measured beside it.

    GET /memory          what this end offers
    GET /read?from=IP    reads all of what that end offers in one transfer, into our own memory: {"bytes", "seconds", "cpuSeconds"}

Connections and transfer handles are made with the first read from an end, and kept.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import torch
from nixl import _api as nixl
from refit_runtime.adapters.nixl import waiting_for_events

from e2e.workloads.settings import RawProgram, read

POLL_SECONDS = 0.0005
WRITTEN = 7
FETCH_SECONDS, READ_SECONDS = 10.0, 60.0


class End:
    """Memory that is offered, and filled by reads."""

    def __init__(self, program: RawProgram) -> None:
        self._port = program.port
        self._memory = torch.full((program.bytes,), WRITTEN, dtype=torch.uint8)
        with waiting_for_events(nixl):
            self._agent: Any = nixl.nixl_agent(f"raw-{uuid4()}", nixl.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([self._memory])
        self._handles: dict[str, Any] = {}
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.memory = {"metadata": metadata, "address": self._memory.data_ptr(), "bytes": self._memory.numel()}

    def read(self, address: str) -> dict[str, Any]:
        handle = self._handles.get(address) or self._handles.setdefault(address, self._connect(address))
        self._memory[-1] = 0
        began, cpu = time.monotonic(), time.process_time()
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < began + READ_SECONDS:
            time.sleep(POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        seconds = time.monotonic() - began
        if state != "DONE" or self._memory[-1] != WRITTEN:
            raise RuntimeError(f"the raw read from {address} ended as {state} after {seconds:.1f} s")
        return {"bytes": self._memory.numel(), "seconds": seconds, "cpuSeconds": time.process_time() - cpu}

    def _connect(self, address: str) -> Any:
        with urllib.request.urlopen(f"http://{address}:{self._port}/memory", timeout=FETCH_SECONDS) as answer:
            there = json.load(answer)
        peer = self._agent.add_remote_agent(base64.b64decode(there["metadata"])).decode()
        self._agent.make_connection(peer)
        ours = self._agent.get_xfer_descs([(self._memory.data_ptr(), self._memory.numel(), 0)], "DRAM")
        theirs = self._agent.get_xfer_descs([(there["address"], there["bytes"], 0)], "DRAM")
        return self._agent.initialize_xfer("READ", ours, theirs, peer)


class Handler(BaseHTTPRequestHandler):
    """JSON over GET."""

    def __init__(self, end: End, *arguments: Any) -> None:
        self._end = end
        super().__init__(*arguments)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        try:
            found = self._end.memory if asked.path == "/memory" else self._end.read(parse_qs(asked.query)["from"][0])
            status, body = 200, found
        except (KeyError, OSError, RuntimeError) as error:
            status, body = 503, {"error": repr(error)}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


def main() -> None:
    torch.set_num_threads(1)
    program = read(RawProgram)
    ThreadingHTTPServer((program.host, program.port), partial(Handler, End(program))).serve_forever()


if __name__ == "__main__":
    main()

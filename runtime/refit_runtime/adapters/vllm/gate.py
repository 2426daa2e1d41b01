"""Every answer carries the version it was begun with; while nothing whole is installed, or the engine is fenced, inference is refused.

Fail closed: what is not known to be harmless counts as inference.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from refit_api import names

from refit_runtime.adapters.vllm.pod import Pod

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HARMLESS = ("/health", "/ping", "/load", "/metrics", "/version", "/v1/models", "/docs", "/redoc", "/openapi.json", "/server_info")
PREFIX = "/refit/"
TRY_AGAIN = 1013  # of WebSocket


class Gate:
    """Middleware of the API server."""

    def __init__(self, app: App, pod: Pod) -> None:
        self._app, self._pod = app, pod

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path, state = scope["path"], self._pod.read()
        harmless = path in HARMLESS or path.startswith((PREFIX, *(f"{known}/" for known in HARMLESS)))
        if harmless or not state.closed:
            await self._app(scope, receive, _labelled(send, state.version))
        elif scope["type"] == "http":
            await _refuse(send, state.closed)
        else:
            await send({"type": "websocket.close", "code": TRY_AGAIN, "reason": state.closed[:100]})


def _labelled(send: Send, version: int) -> Send:
    async def label(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (names.VERSION_HEADER.encode(), str(version).encode())]
        await send(message)

    return label


async def _refuse(send: Send, reason: str) -> None:
    body = json.dumps({"error": {"message": f"this generator serves nothing: {reason}", "type": "ServiceUnavailableError", "code": 503}}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})

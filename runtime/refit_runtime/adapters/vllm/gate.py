"""Every answer names the version that made it; while nothing whole is installed, or the engine is fenced, inference is refused.

Fail closed: what is not known to be harmless counts as inference. A whole answer names every version that made tokens of it, in order (two, when a
commit came in between: `3, 4`), as the engine noted them; a streamed one begins before that is known, and names the version that served then.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
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
_made_by: ContextVar[dict[str, None]] = ContextVar("made_by")


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
            _made_by.set({})
            await self._app(scope, receive, self._labelled(send))
        elif scope["type"] == "http":
            await _refuse(send, state.closed)
        else:
            await send({"type": "websocket.close", "code": TRY_AGAIN, "reason": state.closed[:100]})

    def _labelled(self, send: Send) -> Send:
        made_by = _made_by.get()

        async def label(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                version = ", ".join(made_by) or str(self._pod.read().version)
                message["headers"] = [*message.get("headers", ()), (names.VERSION_HEADER.encode(), version.encode())]
            await send(message)

        return label


def noting(generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """The engine's `generate`, with the versions of what it finishes noted for the answer that it belongs to."""

    async def generate_and_note(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                spans = [span for completion in output.outputs for span in completion.weight_versions or ()]
                _made_by.get({}).update(dict.fromkeys(span.version for span in spans))
                yield output

    return generate_and_note


async def _refuse(send: Send, reason: str) -> None:
    body = json.dumps({"error": {"message": f"this generator serves nothing: {reason}", "type": "ServiceUnavailableError", "code": 503}}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})

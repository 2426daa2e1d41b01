"""Every answer names the versions that made it, token by token; while nothing whole is installed, or the engine is fenced, inference is refused.

- Fail closed: what is not known to be harmless counts as inference.
- `x-refit-version` lists the versions that made tokens of an answer, in order: two, when a commit came in between. `x-refit-spans` says which made which
  tokens of each of its choices: `3:0-17 4:17-40; 4:0-40`, ends excluded. Both are as the engine noted them.
- A stream begins before that is known. Its header names the version that served then, and it ends with both as comments, which clients of server-sent
  events skip.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
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
EVENTS = b"text/event-stream"
TRY_AGAIN = 1013  # of WebSocket
SPANS_BYTES = 4096  # of a header, which a client or a proxy refuses when it is longer than it likes


class Made:
    """Which version made which tokens of one answer: choices in the order in which it has them, prompt by prompt."""

    def __init__(self) -> None:
        self._prompts = 0
        self._choices: dict[tuple[int, int], Sequence[Any]] = {}

    def prompt(self) -> int:
        self._prompts += 1
        return self._prompts

    def note(self, prompt: int, completion: Any) -> None:
        if completion.weight_versions is not None:
            self._choices[prompt, completion.index] = completion.weight_versions

    def labels(self) -> dict[str, str]:
        """By header; none if no tokens were made."""
        choices = [self._choices[key] for key in sorted(self._choices)]
        versions = dict.fromkeys(span.version for spans in choices for span in spans)
        said = "; ".join(" ".join(f"{span.version}:{span.start}-{span.end}" for span in spans) for spans in choices)
        return {names.VERSION_HEADER: ", ".join(versions), names.SPANS_HEADER: said} if versions else {}


_made: ContextVar[Made] = ContextVar("made")


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
            made = Made()
            _made.set(made)
            await self._app(scope, receive, self._labelled(send, made))
        elif scope["type"] == "http":
            await _refuse(send, state.closed)
        else:
            await send({"type": "websocket.close", "code": TRY_AGAIN, "reason": state.closed[:100]})

    def _labelled(self, send: Send, made: Made) -> Send:
        streamed = False

        async def label(message: MutableMapping[str, Any]) -> None:
            nonlocal streamed
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                streamed = any(name.lower() == b"content-type" and value.startswith(EVENTS) for name, value in headers)
                serving = {names.VERSION_HEADER: str(self._pod.read().version)}
                labels = serving if streamed else {**serving, **made.labels()}
                headers += [(name.encode(), value.encode()) for name, value in labels.items() if len(value) <= SPANS_BYTES]
                message["headers"] = headers
            elif streamed and message["type"] == "http.response.body" and not message.get("more_body"):
                comments = "".join(f": {name} {value}\n" for name, value in made.labels().items())
                message["body"] = message.get("body", b"") + (f"{comments}\n".encode() if comments else b"")
            await send(message)

        return label


def noting(generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """The engine's `generate`, called once for each prompt, with the versions of what it finishes noted for the answer that it belongs to."""

    def generate_and_note(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        made = _made.get(Made())
        return _noted(generate(*args, **kwargs), made, made.prompt())

    return generate_and_note


async def _noted(outputs: AsyncGenerator[Any, None], made: Made, prompt: int) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            for completion in output.outputs:
                made.note(prompt, completion)
            yield output


async def _refuse(send: Send, reason: str) -> None:
    body = json.dumps({"error": {"message": f"this generator serves nothing: {reason}", "type": "ServiceUnavailableError", "code": 503}}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""What an API server answers while nothing whole is installed, and what its answers say afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from refit_runtime.adapters.vllm.gate import Gate, noting
from refit_runtime.adapters.vllm.pod import Pod, State

from tests.adapters.vllm.traffic import Span


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod("uid", tmp_path)


async def answer(pod: Pod, path: str) -> httpx.Response:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, pod=pod)

    @app.get("/{anything:path}")
    def answered() -> dict[str, str]:
        return {}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://generator") as client:
        return await client.get(path)


INFERENCE = ["/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings", "/something/new", "/v1/models-and-more"]
HARMLESS = ["/health", "/metrics", "/metrics/", "/v1/models", "/refit/version"]


@pytest.mark.parametrize("path", INFERENCE)
async def test_inference_is_refused_until_a_version_is_whole(pod: Pod, path: str) -> None:
    """No state, the first state, fenced: all refuse; open: answered, with the version."""
    assert (await answer(pod, path)).status_code == 503
    assert pod.lead()
    assert (await answer(pod, path)).status_code == 503
    pod.write(State(7, closed="fenced: ranks differ"))
    refused = await answer(pod, path)
    assert refused.status_code == 503
    assert "ranks differ" in refused.json()["error"]["message"]
    pod.write(State(8, closed=""))
    answered = await answer(pod, path)
    assert (answered.status_code, answered.headers["x-refit-version"]) == (200, "8")


def completion(index: int, text: str) -> SimpleNamespace:
    """Of the engine; unfinished without spans."""
    spans = [Span.of(word) for word in text.split()] if text else None
    return SimpleNamespace(index=index, weight_versions=spans)


async def generate(*finished: str):
    """One prompt: its choices finish one after another."""
    yield SimpleNamespace(outputs=[completion(0, "")])
    for index, text in enumerate(finished):
        yield SimpleNamespace(outputs=[completion(index, text)])


def generator(pod: Pod, prompts: Sequence[Sequence[str]]) -> FastAPI:
    """A commit comes before each answer is sent. Later prompts are done first."""
    app = FastAPI()
    app.add_middleware(Gate, pod=pod)

    async def finish() -> None:
        for outputs in reversed([noting(generate)(*prompt) for prompt in prompts]):
            async for _ in outputs:
                pass
        pod.write(State(5, closed=""))

    @app.get("/v1/completions")
    async def whole() -> None:
        await finish()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def events():
            yield "data: 1\n\n"
            await finish()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


@pytest.mark.parametrize(
    ("prompts", "versions", "spans"),
    [
        ([["3:0-40"]], "3", "3:0-40"),
        ([["3:0-17 4:17-40"]], "3, 4", "3:0-17 4:17-40"),
        ([["3:0-17 4:17-40", "4:0-2"], ["4:0-40"]], "3, 4", "3:0-17 4:17-40; 4:0-2; 4:0-40"),
        ([], "5", None),
        ([["3:0-17"]] * 600, "3", None),
    ],
    ids=["one version", "a commit in between", "prompts and choices", "no tokens", "too long for a header"],
)
async def test_an_answer_says_which_version_made_which_tokens(pod: Pod, prompts: Sequence[Sequence[str]], versions: str, spans: str | None) -> None:
    """Choices in their order, whoever finishes first; the next answer knows nothing of this one."""
    pod.write(State(3, closed=""))
    app = generator(pod, prompts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://generator") as client:
        for _ in range(2):
            headers = (await client.get("/v1/completions")).headers
            assert (headers["x-refit-version"], headers.get("x-refit-spans")) == (versions, spans)


async def test_a_stream_says_it_at_its_end(pod: Pod) -> None:
    """As comments, which clients skip; its header names what served when it began. Without tokens it says nothing more."""
    for prompts, end in [([["3:0-17 4:17-40"]], ": x-refit-version 3, 4\n: x-refit-spans 3:0-17 4:17-40\n\n"), ([], "")]:
        pod.write(State(3, closed=""))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(generator(pod, prompts)), base_url="http://generator") as client:
            answered = await client.get("/stream")
        assert (answered.headers["x-refit-version"], answered.headers.get("x-refit-spans")) == ("3", None)
        assert answered.text == "data: 1\n\ndata: [DONE]\n\n" + end


@pytest.mark.parametrize("path", HARMLESS)
async def test_health_and_state_are_answered_always(pod: Pod, path: str) -> None:
    assert (await answer(pod, path)).status_code == 200


async def test_a_websocket_is_refused_too(pod: Pod) -> None:
    sent = []

    async def send(message) -> None:
        sent.append(message)

    async def never(*_) -> None:
        raise AssertionError("not let through")

    await Gate(never, pod)({"type": "websocket", "path": "/v1/realtime"}, never, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_one_server_of_a_pod_leads_and_starts_closed(tmp_path: Path) -> None:
    first, second = Pod("uid", tmp_path), Pod("uid", tmp_path)
    first.write(State(3, closed=""))
    first.ask_to_leave()
    assert (first.lead(), second.lead()) == (True, False)
    assert (second.read(), second.asked_to_leave) == (State(), False), "what was left behind is void"
    second.ask_to_leave()
    assert first.asked_to_leave
    first.say_left("the pod stays")
    assert (second.left(), first.asked_to_leave) == ("the pod stays", False)
    second.ask_to_leave()
    assert (second.left(), first.asked_to_leave) == (None, True), "the next one gets an answer of its own"
    first.say_left("")
    assert second.left() == ""


def test_a_state_that_cannot_be_read_is_closed(tmp_path: Path) -> None:
    pod = Pod("uid", tmp_path)
    (tmp_path / "refit-uid" / "state.json").write_text('{"version": 1, "open": true}')
    assert pod.read() == State()

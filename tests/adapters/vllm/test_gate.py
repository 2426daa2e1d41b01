"""What an API server answers while nothing whole is installed, and what its answers say afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from refit_runtime.adapters.vllm.gate import Gate, noting
from refit_runtime.adapters.vllm.pod import Pod, State


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


async def test_an_answer_names_the_versions_that_made_it(pod: Pod) -> None:
    """A commit comes while it is made, another before it is sent; the next answer knows nothing of it."""
    pod.write(State(3, closed=""))
    app = FastAPI()
    app.add_middleware(Gate, pod=pod)

    async def generate(versions):
        spans = [SimpleNamespace(version=version) for version in versions]
        yield SimpleNamespace(outputs=[SimpleNamespace(weight_versions=None)])
        yield SimpleNamespace(outputs=[SimpleNamespace(weight_versions=spans)])

    @app.get("/v1/completions")
    async def complete(versions: str) -> int:
        seen = [output async for output in noting(generate)(versions.split())]
        pod.write(State(5, closed=""))
        return len(seen)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://generator") as client:
        answers = [await client.get("/v1/completions", params={"versions": versions}) for versions in ("3 4", "5", "")]
    assert [answer.headers["x-refit-version"] for answer in answers] == ["3, 4", "5", "5"]


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

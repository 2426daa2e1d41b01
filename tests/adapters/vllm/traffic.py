"""Clients that keep a generator busy, and what is wrong with the answers that they got.

Lengths and prompts are mixed, and the same prompts come again: caches are hit, before and after a commit.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from typing_extensions import Self

from tests.adapters.vllm.served import Server

PROMPTS = ((1, 2, 3, 4, 5), (100, 7, 300), tuple(range(40, 80)), (511,))
LENGTHS = (1, 5, 20, 60)
LONGEST = max(LENGTHS)
CLIENTS = 4
ANSWER_SECONDS = 120.0
FAILED = 0  # instead of a status: there was no whole answer


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of an answer."""

    version: str
    start: int
    end: int

    @classmethod
    def of(cls, text: str) -> Self:
        version, _, tokens = text.partition(":")
        start, end = tokens.split("-")
        return cls(version, int(start), int(end))


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one prompt with one choice. `versions` and `spans` as the answer names them; `reason`: why it ends, or what the client met."""

    prompt: tuple[int, ...]
    asked: int
    streamed: bool
    status: int
    reason: str
    tokens: tuple[int, ...] = ()
    versions: str = ""
    spans: tuple[Span, ...] = ()
    times: tuple[float, ...] = ()
    """When each piece of a stream came."""

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.reason == "length" and len(self.tokens) == self.asked


class Traffic:
    """Runs while it is entered; `answers` grows. The first `streams` of the clients stream."""

    def __init__(self, server: Server, clients: int = CLIENTS, lengths: Sequence[int] = LENGTHS, streams: int = CLIENTS // 2) -> None:
        self._server, self._lengths, self._streams = server, lengths, streams
        self._ended = threading.Event()
        self._clients = [threading.Thread(target=self._run, args=(number,), name=f"client-{number}") for number in range(clients)]
        self.answers: list[Answer] = []

    def __enter__(self) -> Self:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for client in self._clients:
            client.join(ANSWER_SECONDS)
        assert not any(client.is_alive() for client in self._clients), "a request has no answer"

    def _run(self, number: int) -> None:
        random = Random(number)
        while not self._ended.is_set():
            answer = ask(self._server, random.choice(PROMPTS), random.choice(self._lengths), number < self._streams)
            self.answers.append(answer)
            if answer.status != 200:
                self._ended.wait(0.2)


def ask(server: Server, prompt: Sequence[int], tokens: int, streamed: bool) -> Answer:
    """Whatever happens is an answer."""
    body: dict[str, Any] = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": streamed}), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return Answer(tuple(prompt), tokens, streamed, response.status, response.read().decode())
        return Answer(tuple(prompt), tokens, streamed, 200, **(_stream(response) if streamed else _body(response)))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(tuple(prompt), tokens, streamed, FAILED, repr(error))
    finally:
        connection.close()


def _body(response: http.client.HTTPResponse) -> dict[str, Any]:
    choice = json.loads(response.read())["choices"][0]
    return {"reason": choice["finish_reason"], "tokens": tuple(choice["token_ids"]), **_labels(response.headers)}


def _stream(response: http.client.HTTPResponse) -> dict[str, Any]:
    """Comments are its labels; it is whole if it says so."""
    tokens: list[int] = []
    times: list[float] = []
    reason, done, labels = "", False, {}
    for line in response:
        kind, _, text = line.decode().strip().partition(": ")
        if kind == "":
            name, _, value = text.partition(" ")
            labels[name] = value
        elif text == "[DONE]":
            done = True
        elif kind == "data":
            event = json.loads(text)
            for choice in event.get("choices", ()):
                tokens += choice["token_ids"] or ()
                times += [time.monotonic()] if choice["token_ids"] else []
                reason = choice["finish_reason"] or reason
            reason = json.dumps(event["error"]) if "error" in event else reason
    return {"reason": reason if done else f"a stream that ends in {reason!r}", "tokens": tuple(tokens), "times": tuple(times), **_labels(labels)}


def _labels(found: Mapping[str, str]) -> dict[str, Any]:
    return {"versions": found.get("x-refit-version", ""), "spans": tuple(Span.of(word) for word in found.get("x-refit-spans", "").split())}


def mislabelled(answers: Sequence[Answer]) -> list[Answer]:
    """Those of which the spans are not one row of rising versions that covers every token, the versions that the answer names."""
    return [
        answer
        for answer in answers
        if [edge for span in answer.spans for edge in (span.start, span.end)] != _edges(answer)
        or answer.versions != ", ".join(span.version for span in answer.spans)
        or any(int(before.version) >= int(after.version) for before, after in pairwise(answer.spans))
    ]


def _edges(answer: Answer) -> list[int]:
    inner = [span.start for span in answer.spans[1:]]
    return sorted([0, *inner, *inner, len(answer.tokens)])


def untrue(answers: Sequence[Answer], truth: Mapping[str, Mapping[tuple[int, ...], Sequence[int]]]) -> list[Answer]:
    """Those of which the first span is not what its version says. What follows a commit has the cache of the version before: `Training.continued`."""
    return [
        answer for answer in answers for first in answer.spans[:1] if list(answer.tokens[: first.end]) != list(truth[first.version][answer.prompt][: first.end])
    ]


def across(answers: Sequence[Answer]) -> Iterator[Answer]:
    """Those of more than one version."""
    return (answer for answer in answers if len(answer.spans) > 1)


def pieces(answer: Answer) -> list[tuple[str, int]]:
    """Version and number of tokens."""
    return [(span.version, span.end - span.start) for span in answer.spans]

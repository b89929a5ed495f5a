"""The names that an agent reports of its machine's Ollama."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from llama_stack_provider_trl_remote.nodes.ollama import ollama_models
from llama_stack_provider_trl_remote.wire import MOST_OLLAMA_MODELS


class Answer(io.BytesIO):
    status = 200


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    """What an Ollama answers; the requests are not sent."""
    given = Answer()
    requested: list[tuple[str, int, str]] = []

    def request(self: Any, method: str, path: str, **_: Any) -> None:
        requested.append((self.host, self.port, path))

    monkeypatch.setattr(http.client.HTTPConnection, "request", request)
    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", lambda _: given)
    yield given
    assert requested == [("127.0.0.1", 11434, "/api/tags")]


def send(answer: Answer, value: Any) -> None:
    answer.write(value if isinstance(value, bytes) else json.dumps(value).encode())
    answer.seek(0)


def test_the_names_of_its_models_are_read(answer: Answer) -> None:
    send(answer, {"models": [{"name": "qwen3:4b"}, {"name": "llama3.2:1b"}, {"name": "qwen3:4b"}]})
    assert ollama_models() == ("llama3.2:1b", "qwen3:4b")


@pytest.mark.parametrize("value", [b"", b"<html>", b"[]", b"{}", {"models": None}, {"models": [1, {"name": 2}]}])
def test_what_is_no_ollama_has_no_models(answer: Answer, value: Any) -> None:
    send(answer, value)
    assert ollama_models() == ()


def test_an_error_has_no_models(answer: Answer) -> None:
    answer.status = 500
    send(answer, {"models": [{"name": "a"}]})
    assert ollama_models() == ()


def test_names_are_bounded_and_of_one_line(answer: Answer) -> None:
    send(answer, {"models": [{"name": f"{number:04}\n\x1b[31m"} for number in range(500)]})
    found = ollama_models()
    assert len(found) == MOST_OLLAMA_MODELS
    assert found[0] == "0000 [31m"


def test_a_long_or_a_slow_answer_is_none(answer: Answer) -> None:
    times = iter(range(0, 1000, 3))
    send(answer, {"models": [{"name": "a" * 100} for _ in range(1000)]})
    assert ollama_models(clock=lambda: float(next(times))) == ()


def test_a_large_answer_is_none(answer: Answer) -> None:
    send(answer, {"models": [{"name": "a", "details": "x" * (2 << 20)}]})
    assert ollama_models() == ()


def test_nothing_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPConnection, "request", refuse)
    assert ollama_models() == ()

"""`trl-remote chat` as a user types it: names that are wrong, answers without text, and Ctrl-C at its prompt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import termios
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, ServiceRefusal
from llama_stack_provider_trl_remote.cli.chat import chat
from llama_stack_provider_trl_remote.client import ServerEvent
from tests.contract.stack import poll

URL = "http://127.0.0.1:8322"


class Answering:
    """A client of a service with a job, whose result answers with some parts."""

    url = URL

    def __init__(self, *parts: str, error: Exception | None = None) -> None:
        self.parts, self.error = parts, error
        self.asked: list[Any] = []

    async def get(self, path: str, **query: Any) -> Any:
        assert path == "/v1/post-training/queue"
        return {"data": [{"job_uuid": "tuned"}]}

    async def stream_answer(self, path: str, body: Any) -> AsyncGenerator[ServerEvent]:
        self.asked.append(body["messages"])
        if self.error is not None:
            raise self.error
        for reason, part in (*((None, part) for part in self.parts), ("stop", "")):
            choice = {"delta": {"content": part}, "finish_reason": reason}
            yield ServerEvent("", "message", json.dumps({"choices": [choice]}))
        yield ServerEvent("", "message", "[DONE]")


def answered(client: Answering, model: str = "tuned", **changes: Any) -> int:
    given = dict.fromkeys(("against", "temperature", "top_p", "seed", "max_tokens", "system"))
    options = Namespace(**{**given, "model": model, "message": "What is two?", "json": False, **changes})
    return asyncio.run(chat(client, options))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["tuend", "ft:tuend", "job:tuend/checkpoint-2"])
def test_a_model_that_does_not_exist_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    missing = ServiceRefusal(URL, 404, str(JobNotFound("tuend")))
    assert answered(Answering(error=missing), model) == 1
    expected = "job 'tuend' not found: trl-remote jobs list shows them; was tuned meant?"
    assert expected in capsys.readouterr().err
    assert answered(Answering(error=missing), model, json=True) == 1
    assert json.loads(capsys.readouterr().out)["error"] == expected


@pytest.mark.parametrize(
    ("model", "meant"), [("tuned/checkpoint-2", "; was job:tuned/checkpoint-2 meant?"), ("org/name", "")]
)
def test_a_checkpoint_that_is_named_without_job_is_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], model: str, meant: str
) -> None:
    missing = f"model {model!r}: its config.json cannot be read"
    assert answered(Answering(error=ServiceRefusal(URL, 400, missing)), model) == 1
    assert capsys.readouterr().err == f"trl-remote: {missing}{meant}\n"


def test_a_training_that_has_the_device_is_named_with_the_command_that_shows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    busy = ServiceRefusal(URL, 503, "job 'other' has cpu. Send this again; GET /v1/post-training/queue shows it")
    assert answered(Answering(error=busy)) == 1
    error = capsys.readouterr().err
    assert f"{URL} refuses this: job 'other' has cpu. Send this again; trl-remote jobs list shows it\n" in error


def test_an_answer_without_text_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(Answering("", "\n")) == 0
    assert "\n[an answer without text: it is left out" in capsys.readouterr().out
    assert answered(Answering("Four", ".")) == 0
    assert capsys.readouterr().out == "Four.\n"


@pytest.mark.parametrize("message", ["", " \n"])
def test_a_blank_message_is_refused_by_its_option(message: str) -> None:
    client = Answering("Four.")
    with pytest.raises(InvalidRequest, match=r"^--message='.*' is not supported: it is blank, expected what to ask"):
        answered(client, message=message)
    assert not client.asked


def test_ctrl_c_at_the_prompt_ends_a_chat_and_leaves_the_terminal_as_it_was() -> None:
    ours, theirs = os.openpty()
    with closing(os.fdopen(ours, "rb", buffering=0)) as screen, closing(os.fdopen(theirs, "rb", buffering=0)) as keys:
        before = termios.tcgetattr(keys)
        command = [sys.executable, "-m", "llama_stack_provider_trl_remote", "chat", "tuned", "--url", URL]
        with subprocess.Popen(command, stdin=keys, stdout=keys, stderr=keys, start_new_session=True) as process:
            text = b""
            while not text.endswith(b"> "):
                text += screen.read(4096)
            state = psutil.Process(process.pid).status
            poll(lambda: state() == psutil.STATUS_SLEEPING, "it waits for a line", timeout=20, pause=0.01)
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(60) == 130
            finally:
                process.kill()
        assert termios.tcgetattr(keys) == before
        assert screen.read(4096).endswith(b"trl-remote: stopped.\r\n")

"""Processes that answer chats: what one sends is bounded, and one caller's chats leave others their turn."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from llama_stack_provider_trl.errors import NotServed
from llama_stack_provider_trl.launch.base import Observation, TaskSpec, TaskState
from llama_stack_provider_trl.specs.chat_templates import CHATML, UNENDED
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.serving import (
    LEASE,
    SOCKET,
    Answer,
    AnswerBegun,
    AnswerEnd,
    AnswerPart,
    ChosenToken,
    ServeRequest,
)
from llama_stack_provider_trl.system.cpu_timer import ENDED_BY
from llama_stack_provider_trl.system.offload import CostlyWork, serving
from llama_stack_provider_trl.system.process import tasks_below
from llama_stack_provider_trl_remote.service.serving.chats import Chats
from llama_stack_provider_trl_remote.service.serving.served import Served
from llama_stack_provider_trl_remote.service.serving.serving import Serving
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.service import running_service
from tests.contract.stack import SFT, poll
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]
MODEL = Served("model", ModelSource(model="/models/one"), None, None)
BEGUN = AnswerBegun(prompt_tokens=1)
ENOUGH = 300 << 20
"""Bytes after which a test ends an answer itself: it has no bound."""


class PlayedLauncher:
    """Plays a process that serves: `answer` writes what it sends to a request."""

    def __init__(self, answer: Callable[[socket.socket, ServeRequest], None]) -> None:
        self._answer, self._ended = answer, threading.Event()
        self.exit_code: int | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: list[socket.socket] = []

    def start(self, task: TaskSpec) -> None:
        directory = os.open(task.run_dir, os.O_RDONLY)  # the whole path may be too long for a socket
        self._listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        os.close(directory)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            line = lines.readline()
            if line == LEASE:
                self._ended.wait()
            else:
                self._answer(connection, ServeRequest.model_validate_json(line))

    def poll(self, task: TaskSpec) -> Observation:
        return Observation(TaskState.exited if self._ended.is_set() else TaskState.running, self.exit_code)

    def cancel(self, task: TaskSpec | None = None) -> None:
        self._ended.set()
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def serving_of(root: Path, launcher: PlayedLauncher, **settings: Any) -> Serving:
    played: Any = launcher
    nothing: Any = None
    store: Any = type("Store", (), {"holders": lambda _: {}})()
    found = Serving(ServiceSettings(data_dir=root, **settings), nothing, played, store, ["cpu"], nothing)
    (root / "serving").mkdir()
    return found


def sent(connection: socket.socket, *messages: Answer) -> None:
    for message in messages:
        connection.sendall(message.model_dump_json().encode() + b"\n")


def endless(part: AnswerPart) -> Callable[[socket.socket, ServeRequest], None]:
    def answer(connection: socket.socket, _: ServeRequest) -> None:
        sent(connection, BEGUN)
        while True:
            sent(connection, part)

    return answer


def token(count: int) -> ChosenToken:
    chosen = ChosenToken(token="a", bytes=(97,), logprob=-1.0, top=())
    return chosen.model_copy(update={"top": (chosen,) * count})


@pytest.mark.parametrize(
    ("part", "request_fields", "reason"),
    [
        (AnswerPart(text="A" * 900_000), {}, "more messages, or more bytes"),
        (AnswerPart(text=""), {"max_tokens": 8}, "more messages, or more bytes"),
        (AnswerPart(text="", tokens=(token(0),)), {}, "more log-probabilities than were requested"),
        (AnswerPart(text="", tokens=(token(3),)), {"logprobs": 2}, "more log-probabilities than were requested"),
        (AnswerPart(text="", tokens=(token(2),) * 2), {"logprobs": 2}, "more log-probabilities than were requested"),
    ],
    ids=["text", "messages", "logprobs", "most likely ones", "tokens of a message"],
)
def test_a_process_that_sends_more_than_an_answer_has_is_ended(
    tmp_path: Path, part: AnswerPart, request_fields: dict[str, Any], reason: str
) -> None:
    found = serving_of(tmp_path, PlayedLauncher(endless(part)))

    async def ask() -> int:
        received = 0
        async with aclosing(found.answer(MODEL, ServeRequest(prompt="a", seed="1", **request_fields))) as messages:
            async for message in messages:
                received += len(message.model_dump_json())
                assert received < ENOUGH, "the answer has no bound"
        return received

    with pytest.raises(Exception, match=reason):
        asyncio.run(ask())


def test_an_answer_within_the_bounds_is_whole(tmp_path: Path) -> None:
    def answer(connection: socket.socket, request: ServeRequest) -> None:
        parts = [AnswerPart(text="b", tokens=(token(2),))] * (request.max_tokens or 0)
        sent(connection, BEGUN, *parts, AnswerPart(text="rest"), AnswerEnd(reason="length", tokens=8))

    found = serving_of(tmp_path, PlayedLauncher(answer))

    async def ask() -> list[Answer]:
        request = ServeRequest(prompt="a", seed="1", max_tokens=8, logprobs=2)
        try:
            return [message async for message in found.answer(MODEL, request)]
        finally:
            await found.close()

    assert len(asyncio.run(ask())) == 11


def test_messages_of_several_answers_wait_in_the_process_and_not_in_the_service(tmp_path: Path) -> None:
    yielded = []

    class Endless:
        async def answer(self, served: Served, request: ServeRequest) -> AsyncGenerator[Answer]:
            for number in range(100_000):
                await asyncio.sleep(0)
                yielded.append(number)
                yield AnswerPart(text="A" * 1000)

    endless: Any = Endless()
    nothing: Any = None
    chats = Chats(ServiceSettings(data_dir=tmp_path), endless, nothing)
    requests = [ServeRequest(prompt="a", seed=str(number)) for number in range(3)]

    async def ask() -> int:
        async with chats._answers(MODEL, requests) as messages:
            await anext(messages)
            seen = -1
            while len(yielded) > seen:  # until no reader advances any more
                seen = len(yielded)
                for _ in range(100):
                    await asyncio.sleep(0)
            return seen

    assert asyncio.run(ask()) < 100


class Gated:
    """A process whose answers end when the test lets them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.goes_on = threading.Event()
        self.changed = threading.Condition()

    def answer(self, connection: socket.socket, request: ServeRequest) -> None:
        with self.changed:
            self.begun.append(str(request.prompt))
            self.changed.notify_all()
        sent(connection, BEGUN)
        self.goes_on.wait()
        sent(connection, AnswerEnd(reason="length", tokens=1))

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.begun) >= count, 20)


@pytest.fixture
def gated() -> Iterator[Gated]:
    gated = Gated()
    yield gated
    gated.goes_on.set()


TOKENS = {"tokens": [{"name": name, "role": "submit", "token": name * 20} for name in ("first", "other")]}


@pytest.mark.parametrize(
    ("tokens", "begun"),
    [(TOKENS, ["first", "first", "other"]), ({}, ["first", "first", "first", "first"])],
    ids=["tokens", "no tokens"],
)
def test_chats_of_one_token_leave_another_its_turn(
    tmp_path: Path, gated: Gated, tokens: dict[str, Any], begun: list[str]
) -> None:
    found, work = serving_of(tmp_path, PlayedLauncher(gated.answer), **tokens), CostlyWork()

    async def ask(caller: str) -> None:
        with serving(work, caller):
            async for _ in found.answer(MODEL, ServeRequest(prompt=caller, seed="1")):
                pass

    async def run() -> list[str]:
        tasks = [asyncio.create_task(ask("first")) for _ in range(20)]
        assert await asyncio.to_thread(gated.wait_for, 2)
        tasks.append(asyncio.create_task(ask("other")))
        assert await asyncio.to_thread(gated.wait_for, len(begun))
        seen = sorted(gated.begun)
        gated.goes_on.set()
        await asyncio.gather(*tasks)
        await found.close()
        return seen

    assert asyncio.run(run()) == begun


class PlayedLaunchers:
    """Plays a process for each task."""

    def __init__(self, answer: Callable[[socket.socket, ServeRequest], None]) -> None:
        self._answer = answer
        self._of: dict[Path, PlayedLauncher] = {}

    def start(self, task: TaskSpec) -> None:
        self._of[task.run_dir] = PlayedLauncher(self._answer)
        self._of[task.run_dir].start(task)

    def poll(self, task: TaskSpec) -> Observation:
        return self._of[task.run_dir].poll(task)

    def cancel(self, task: TaskSpec) -> None:
        self._of[task.run_dir].cancel(task)

    @property
    def started(self) -> int:
        return len(self._of)

    def end_newest(self, exit_code: int) -> None:
        newest = [*self._of.values()][-1]
        newest.exit_code = exit_code
        newest.cancel()


def test_models_of_one_token_leave_a_place_to_that_of_another(tmp_path: Path, gated: Gated) -> None:
    launcher: Any = PlayedLaunchers(gated.answer)
    found, work = serving_of(tmp_path, launcher, **TOKENS), CostlyWork()

    async def ask(caller: str, model: str) -> None:
        served = Served(model, ModelSource(model=f"/models/{model}"), None, None)
        with serving(work, caller):
            async for _ in found.answer(served, ServeRequest(prompt=caller, seed="1")):
                pass

    async def run() -> list[BaseException | None]:
        tasks = [asyncio.create_task(ask("first", model)) for model in ("one", "two")]
        assert await asyncio.to_thread(gated.wait_for, 2)
        with pytest.raises(NotServed, match="2 other models are answering"):
            await ask("first", "three")
        shared = asyncio.create_task(ask("third", "one"))
        assert await asyncio.to_thread(gated.wait_for, 3)
        with pytest.raises(NotServed, match="2 other models are answering"):
            await ask("other", "three")
        shared.cancel()
        await asyncio.wait([shared])
        tasks.append(asyncio.create_task(ask("other", "three")))
        assert await asyncio.to_thread(gated.wait_for, 4)
        with pytest.raises(NotServed, match="2 other models are answering"):
            await ask("third", "four")
        gated.goes_on.set()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await found.close()
        return ends

    ended, *others = sorted(asyncio.run(run()), key=lambda one: one is None)
    assert isinstance(ended, NotServed)
    assert "another caller's model needs its place" in str(ended)
    assert others == [None, None]


@pytest.mark.parametrize(("at_once", "outcome"), [(1, "refused"), (2, "not served")], ids=["alone", "one of two"])
def test_a_prompt_that_was_alone_when_its_process_ended_is_refused_from_then_on_and_a_chat_is_not(
    tmp_path: Path, at_once: int, outcome: str
) -> None:
    """Alone it has ended the process, even where that has not reported that it reads the prompt."""
    begun = threading.Barrier(at_once)

    def answer(connection: socket.socket, request: ServeRequest) -> None:
        sent(connection, BEGUN)
        if request.prompt is None:
            sent(connection, AnswerEnd(reason="length", tokens=1))
        elif begun.wait(20) == 0:
            launchers.end_newest(-ENDED_BY)

    launchers: Any = PlayedLaunchers(answer)
    found = serving_of(tmp_path, launchers)

    async def ask(**request: Any) -> str:
        """How the answer ends."""
        try:
            async with aclosing(found.answer(MODEL, ServeRequest(seed="1", **request))) as messages:
                return [message.kind async for message in messages][-1]
        except NotServed:
            return "not served"

    async def run() -> list[str]:
        ends = [await asyncio.gather(*(ask(prompt="a") for _ in range(at_once))) for _ in range(2)]
        chat = await ask(messages=[{"role": "user", "content": "a"}])
        await found.close()
        return [*ends[0], *ends[1], chat]

    assert asyncio.run(run()) == [outcome] * 2 * at_once + ["ended"]
    assert launchers.started == (2 if outcome == "refused" else 3)


UNBROKEN = "{{ 1.5 | round(1000000000 * (messages | length), 'floor') }}"
BOOM = f"{{% if messages[0]['content'] == 'boom' %}}{UNBROKEN}{{% endif %}}{CHATML}"


@pytest.mark.skipif(sys.platform != "linux", reason="a timer of a thread's CPU time ends it")
@pytest.mark.timeout(240)
def test_a_chat_template_that_does_not_end_stops_its_own_jobs_and_chats_only(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        service.register("rows", QUESTIONS)
        for name, template in (("harmless", BOOM), ("harmful", UNBROKEN)):
            service.submit(SFT, sft(name, "rows", algorithm_config=LORA), options={"chat_template": template})
        service.wait_state("harmless", "completed", timeout=120)
        job = service.wait_state("harmful", "failed", timeout=120)
        assert [one["reason"] for one in job["resources_allocated"]["attempts"]] == ["invalid_model"]
        assert UNENDED in str(job)

        def chat(model: str, text: str) -> requests.Response:
            body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
            return service.post("/chat/completions", body, prefix="/openai/v1")

        def spent() -> float:
            """CPU seconds of the processes that answer chats."""
            left = tasks_below(service.data_dir / "serving").values()
            return sum(sum(psutil.Process(one.pid).cpu_times()[:2]) for each in left for one in each)

        assert chat("ft:harmless", "fine").status_code == 200
        before = spent()
        with ThreadPoolExecutor() as pool:
            boom = pool.submit(chat, "ft:harmless", "boom")
            # One that is being answered when the process ends gets a 503.
            poll(lambda: spent() > before + 1, "the template is computed", timeout=60)
            others = [pool.submit(chat, str(tiny_model()), "fine") for _ in range(2)]
            assert (boom.result().status_code, boom.result().json()["error"]["message"]) == (400, UNENDED)
            assert {other.result().status_code for other in others} == {200}
        assert chat(str(tiny_model()), "fine").status_code == 200
        (run_dir,) = (service.data_dir / "serving").iterdir()
        assert chat("ft:harmless", "boom").json()["error"]["message"] == UNENDED
        assert [*(service.data_dir / "serving").iterdir()] == [run_dir], "the template has ended another process"

"""Turns chats and completions into requests of `specs.serving`, and their answers into OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, NotServed, TrlError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.grading.asking import THINK, Reply
from llama_stack_provider_trl.specs.methods import METHODS
from llama_stack_provider_trl.specs.rows import Message, PromptExample, parse_row
from llama_stack_provider_trl.specs.serving import (
    ADAPTERS,
    MOST_SCHEMA,
    Answer,
    AnswerBegun,
    AnswerEnd,
    AnswerPart,
    AnswerRefused,
    ServeRequest,
)
from llama_stack_provider_trl.specs.work import WORKS
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.texts import counted

from ..http.chat_bodies import ChatBody, CompletionBody, ResponseFormat, refuse_unknown_keys
from ..http.errors import openai_error
from ..settings import ServiceSettings
from .openai import Json, Kind, Written, model_row, usage_event_of, whole_of
from .served import Served
from .serving import Serving
from .tool_texts import CallReader

_ANY_OBJECT = '{"type": "object"}'
"""The schema of `response_format` json_object."""
_COMPLETION_TOKENS = 16
"""As OpenAI's API has it."""
_QUEUED = 64
"""Messages of several answers to a request that may wait for its reader."""
_BASE = "base"
"""The owner of models that were not made here."""
_MOST_MODELS = 1000
"""Results of jobs in a list of models, the newest ones."""
_REWARDS = (name for name, made in METHODS.items() if made.trains_reward)
_WITHOUT_MODEL = frozenset({*(name for name, kind in WORKS.items() if not kind.leaves_model), *_REWARDS})
"""What jobs do that leave no model that writes text."""


class ChatRefused(TrlError, ValueError):
    """Raised when the process that serves a model refuses a request, or fails."""

    def __init__(self, message: str, status_code: int) -> None:
        self.status_code = status_code
        super().__init__(message)


class Chats:
    """Answers the calls of OpenAI's API."""

    def __init__(self, settings: ServiceSettings, serving: Serving, store: Store) -> None:
        self._settings, self._serving, self._store = settings, serving, store

    async def begin(self, body: ChatBody | CompletionBody, caller: str, *, reads_calls: bool = True) -> BegunAnswer:
        """Begin an answer: its prompt was read when this returns. Raises InvalidRequest, JobNotFound, ChatRefused: the
        request cannot be honoured; LimitReached, NotServed: it can, later; OSError: no process can be started.

        Args:
            reads_calls: whether calls of tools are separated from the answer's content.
        """
        request = _chat_request(body) if isinstance(body, ChatBody) else _completion_request(body)
        most = self._settings.max_chats
        if (body.n or 1) > most:  # sending it again would not help
            hint = f"each answer counts as a chat, and max_chats of the service is {most}: send at most {most}"
            raise InvalidRequest("n", body.n, hint)
        served = await self._serving.find(body.model)
        kind: Kind = "chat" if isinstance(body, ChatBody) else "completion"
        requests = _several(request, body.n or 1)
        written = [Written(kind, body.model, request.logprobs is not None, index=n) for n in range(len(requests))]
        async with AsyncExitStack() as stack:
            for _ in requests:
                await stack.enter_async_context(self._serving.counted(caller))
            messages = await stack.enter_async_context(self._answers(served, requests))
            _, first = await anext(messages, (0, None))
            if isinstance(first, AnswerRefused):
                raise _refused(first, served)
            if not isinstance(first, AnswerBegun):
                raise ChatRefused("the process that serves the model did not answer: this is a bug", 500)
            has_calls = isinstance(body, ChatBody) and bool(body.described_tools) and first.has_call_tags
            for answer in written:
                answer.id, answer.created = written[0].id, written[0].created
                answer.prompt_tokens = first.prompt_tokens
                if reads_calls and has_calls:
                    answer.calls = CallReader()
            has_usage = body.stream_options is not None and body.stream_options.include_usage
            return BegunAnswer(written, served, messages, stack.pop_all(), has_usage=has_usage)

    @asynccontextmanager
    async def _answers(
        self, served: Served, requests: Sequence[ServeRequest]
    ) -> AsyncIterator[AsyncGenerator[tuple[int, Answer]]]:
        """The parts of the answers to some requests, each with the number of its request, as they come.

        Several are read beside each other, into one queue: none waits for one that has no turn yet.
        """
        if len(requests) == 1:
            async with (
                aclosing(self._serving.answer(served, requests[0])) as messages,
                aclosing(_first(messages)) as one,
            ):
                yield one
            return
        queue: asyncio.Queue[tuple[int, Answer | Exception | None]] = asyncio.Queue(_QUEUED)

        async def read(number: int, request: ServeRequest) -> None:
            try:
                async with aclosing(self._serving.answer(served, request)) as messages:
                    async for message in messages:
                        await queue.put((number, message))
                await queue.put((number, None))
            except Exception as error:
                await queue.put((number, error))

        tasks = [asyncio.create_task(read(number, request)) for number, request in enumerate(requests)]
        try:
            async with aclosing(_taken(queue, len(requests))) as several:
                yield several
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def check_model(self, name: str) -> None:
        """Return if a name stands for a model that can answer. Raises InvalidRequest, JobNotFound."""
        await self._serving.find(name)

    async def reply(self, name: str, request: ServeRequest, caller: str) -> tuple[Reply, int]:
        """The whole answer of a model, and the tokens of its prompt and of it. It counts as a chat. Raises
        InvalidRequest, JobNotFound, ChatRefused, LimitReached, NotServed, OSError: as `begin`."""
        served = await self._serving.find(name)
        text, tokens, reason = "", 0, ""
        async with (
            self._serving.counted(caller),
            self._answers(served, [request]) as messages,
        ):
            async for _, message in messages:
                match message:
                    case AnswerRefused():
                        raise _refused(message, served)
                    case AnswerBegun():
                        tokens += message.prompt_tokens
                        text = THINK if message.opens_thought else ""
                    case AnswerPart():
                        text += message.text
                    case AnswerEnd():
                        tokens, reason = tokens + message.tokens, message.reason
        return Reply(text, reason == "stop"), tokens

    def busy(self) -> Mapping[str, str]:
        """See `Serving.busy`."""
        return self._serving.busy()

    def models(self) -> list[Json]:
        """The results of jobs, newest first, and the models that jobs here were trained from."""
        jobs, _ = self._store.queue_page(JobState.completed, None, _MOST_MODELS)
        kept = self._store.with_result(job.job_uuid for job in jobs)
        results, bases = [], {}
        made = self._made()
        for job in jobs:
            created = (job.completed_at or job.scheduled_at).timestamp()
            # A search has its result in a trial.
            has_result = job.job_uuid in kept or self._store.searches.names_of_trials(job.job_uuid)
            if has_result and job.algorithm is not None and job.algorithm not in _WITHOUT_MODEL:
                results.append(model_row(f"ft:{job.job_uuid}", created, job.created_by or "trl"))
            if job.model is not None and not job.model.startswith(made):
                bases[job.model] = model_row(job.model, job.scheduled_at.timestamp(), _BASE)
        return [*results, *bases.values()]

    def base_model(self, name: str) -> Json | None:
        """As in the list, a model that completed jobs here were trained from; None: there is no such job."""
        submitted_at = None if name.startswith(self._made()) else self._store.first_trained_from(name)
        return None if submitted_at is None else model_row(name, submitted_at.timestamp(), _BASE)

    def _made(self) -> str:
        """The directory of what jobs make, which is no base model."""
        return str(DataDir(self._settings.data_dir).checkpoints.resolve())


async def unless_left[Found](work: Coroutine[Any, Any, Found], left: Coroutine[Any, Any, None]) -> Found | None:
    """What a request orders; None: its client is gone, and the work is cancelled. `left` returns when the client is
    gone."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(left)
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])


async def _first(messages: AsyncGenerator[Answer]) -> AsyncGenerator[tuple[int, Answer]]:
    """The parts of the only answer to a request."""
    async for message in messages:
        yield 0, message


async def _taken(
    queue: asyncio.Queue[tuple[int, Answer | Exception | None]], count: int
) -> AsyncGenerator[tuple[int, Answer]]:
    """What comes until so many answers have ended. Raises what the first one that fails has raised."""
    while count:
        number, message = await queue.get()
        if isinstance(message, Exception):
            raise message
        if message is None:
            count -= 1
        else:
            yield number, message


class BegunAnswer:
    """The answers to a request whose prompt was read. `whole` closes it; a stream has to be closed."""

    def __init__(
        self,
        written: Sequence[Written],
        served: Served,
        messages: AsyncGenerator[tuple[int, Answer]],
        stack: AsyncExitStack,
        *,
        has_usage: bool,
    ) -> None:
        self._written, self._served, self._messages = written, served, messages
        self._stack, self._has_usage = stack, has_usage

    async def close(self) -> None:
        await self._stack.aclose()

    async def whole(self, left: Coroutine[Any, Any, None]) -> Json | None:
        """The answer in one piece; None: its client is gone. Raises ChatRefused, NotServed. `left` returns when the
        client is gone."""
        try:
            return await unless_left(self._collected(), left)
        finally:
            await self.close()

    async def _collected(self) -> Json:
        async for _ in self._events():
            pass
        return whole_of(self._written)

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, the last of which is `[DONE]`, or an error."""
        for answer in self._written:
            if (first := answer.first()) is not None:
                yield _sent(first)
        try:
            async for event in self._events():
                yield _sent(event)
        except (ChatRefused, NotServed) as error:
            yield _sent(openai_error(getattr(error, "status_code", 503), str(error)))
            return
        for answer in self._written:
            yield _sent(answer.last())
        if self._has_usage:
            yield _sent(usage_event_of(self._written))
        yield b"data: [DONE]\n\n"

    async def _events(self) -> AsyncGenerator[Json]:
        """The parts of the answers."""
        async for number, message in self._messages:
            answer = self._written[number]
            if isinstance(message, AnswerPart):
                if event := answer.add(message.text, message.tokens):
                    yield event
            elif isinstance(message, AnswerEnd):
                if event := answer.rest():
                    yield event
                answer.end(message.reason, message.tokens)
            elif isinstance(message, AnswerRefused):
                raise _refused(message, self._served)


def _several(request: ServeRequest, count: int) -> list[ServeRequest]:
    """The request with random numbers of its own for each of several answers; the first has those of the request."""
    more = (request.model_copy(update={"seed": f"{request.seed}/{number}"}) for number in range(1, count))
    return [request, *more]


def _refused(message: AnswerRefused, served: Served) -> ChatRefused:
    text = message.message
    if served.adapter is not None:  # the process has a copy of it
        copy = f"{ADAPTERS}/{served.adapter.digest}"
        parts = re.split(r"([\s'])", text)
        text = "".join(served.name + part.rpartition(copy)[2] if copy in part else part for part in parts)
    return ChatRefused(text, 400 if message.is_request else 500)


def _sent(event: Json) -> bytes:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def _chat_request(body: ChatBody) -> ServeRequest:
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        hint = "max_completion_tokens has another value: send one of them"
        raise InvalidRequest("max_tokens", body.max_tokens, hint)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "it needs logprobs true: send that, or leave it out")
    messages = _messages(body.messages, body.described_tools)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_tokens or body.max_completion_tokens
    wanted = body.response_format
    if body.described_tools and wanted is not None and wanted.type != "text":
        hint = "a call of a tool is no answer within a schema: send tool_choice none, or leave it out"
        raise InvalidRequest("response_format", wanted.type, hint)
    return _request(body, messages=messages, max_tokens=most, logprobs=logprobs)


def _schema(wanted: ResponseFormat | None) -> str | None:
    """The JSON schema of an answer; None: nothing constrains it. Raises InvalidRequest."""
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        if wanted.json_schema is not None:
            raise InvalidRequest("response_format.json_schema", "...", "it needs type json_schema: send that")
        return _ANY_OBJECT if wanted.type == "json_object" else None
    if wanted.json_schema is None:
        raise InvalidRequest("response_format.json_schema", None, "type json_schema needs it: {name, schema}")
    try:
        text = json.dumps(wanted.json_schema.schema_)
    except RecursionError as error:
        raise InvalidRequest("response_format.json_schema.schema", "...", "it is nested too deeply") from error
    if len(text) > MOST_SCHEMA:
        hint = f"it has {len(text)} bytes, at most {MOST_SCHEMA} are read: send a smaller one"
        raise InvalidRequest("response_format.json_schema.schema", "...", hint)
    return text


def _completion_request(body: CompletionBody) -> ServeRequest:
    return _request(body, prompt=body.prompt, max_tokens=body.max_tokens or _COMPLETION_TOKENS, logprobs=body.logprobs)


def _request(body: ChatBody | CompletionBody, **more: Any) -> ServeRequest:
    for text in (*body.stops, more.get("prompt") or ""):
        text.encode()  # half of a surrogate pair is refused
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options", body.stream_options.model_dump(), "it needs stream true: send that, or leave it out"
        )
    return ServeRequest(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=secrets.token_hex(8) if body.seed is None else str(body.seed),
        stop=body.stops,
        json_schema=_schema(body.response_format),
        **more,
    )


def _messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The turns as the rows of a dataset are read. Raises InvalidRequest: names the message."""
    refuse_unknown_keys(messages)
    row = {"prompt": [dict(message) for message in messages], "tools": [*tools] if tools else None}
    try:
        example = parse_row(row, 0, "prompts")
    except InvalidRows as error:
        text = error.hint.removeprefix("row 0: ").replace("column prompt", "messages", 1)
        raise InvalidRequest("messages", counted(len(messages), "message"), text) from error
    assert isinstance(example, PromptExample)
    return example.messages

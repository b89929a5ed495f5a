"""`trl-remote chat`: asks a model, or two of them the same, and prints the answers while they are computed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, ServiceRefusal, ServiceUnreachable, TrlError
from llama_stack_provider_trl.system.console import complain, show_json, show_lines, show_part

from ..client import CHAT, ServiceClient
from .refusals import error_with_the_name_meant, in_a_shell, names_of_jobs

_PROMPT = "> "
_EMPTY = "[an answer without text: it is left out of the conversation, and so is its question]"


def model_name(text: str) -> str:
    """The model that a word of the command line means: a name without a slash or a colon is that of a job."""
    return text if "/" in text or ":" in text else f"ft:{text}"


@dataclass
class Talk:
    """A conversation with one model."""

    client: ServiceClient
    model: str
    sampling: dict[str, Any]
    turns: list[dict[str, str]] = field(default_factory=list)
    reason: str | None = None
    """Why the last answer ended: stop, or length."""

    async def ask(self, text: str) -> AsyncIterator[str]:
        """The parts of the answer to the next turn. A turn without a whole answer is forgotten. Raises ServiceRefusal,
        ServiceUnreachable."""
        turns, found = [*self.turns, {"role": "user", "content": text}], ""
        body = {"model": self.model, "messages": turns, "stream": True, **self.sampling}
        async with aclosing(self.client.stream_answer(CHAT, body)) as events:
            async for event in events:
                if event.data == "[DONE]":
                    break
                answer = json.loads(event.data)
                if "error" in answer:
                    raise ServiceRefusal(self.client.url, answer["error"]["code"], answer["error"]["message"])
                for choice in answer["choices"]:
                    self.reason = choice["finish_reason"]
                    if part := choice["delta"].get("content"):
                        found += part
                        yield part
            else:
                raise ServiceUnreachable(self.client.url, "broke off an answer", "send the message again")
        # A template may refuse an empty turn.
        self.turns = [*turns, {"role": "assistant", "content": found}] if found.strip() else self.turns


async def chat(client: ServiceClient, options: Namespace) -> int:
    """Answer `--message`, or each line of standard input until its end."""
    names = [options.model, *([options.against] if options.against else [])]
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "seed", "max_tokens")}
    sampling = {name: value for name, value in given.items() if value is not None}
    system = [{"role": "system", "content": options.system}] if options.system else []
    talks = [Talk(client, model_name(name), sampling, list(system)) for name in names]
    if options.message is not None:
        if not options.message.strip():
            raise InvalidRequest("--message", options.message, "it is blank, expected what to ask the model.")
        return await _ask(talks, options.message, options)
    status = 0
    while (text := _typed_line() if sys.stdin.isatty() else await asyncio.to_thread(_read_line)) is not None:
        if text.strip():
            status = await _ask(talks, text, options)
    return status


def _read_line() -> str | None:
    """The next line of what is no terminal; None: there is none."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _typed_line() -> str | None:
    """The next line that is typed; None: there is none.

    Nothing else runs meanwhile. In a thread, Ctrl-C would wait until a line is typed; and asyncio's handler would
    cancel the command without ending the wait.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys and history)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(_PROMPT)
    except EOFError:
        show_lines("")
        return None
    finally:
        signal.signal(signal.SIGINT, before)


async def _ask(talks: list[Talk], text: str, options: Namespace) -> int:
    """Ask all at the same time, and print their answers below each other. Returns the exit status."""
    as_json = options.json
    parts: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in talks]
    asking = [asyncio.create_task(_collect(talk, text, queue)) for talk, queue in zip(talks, parts, strict=True)]
    status = 0
    try:
        for talk, queue, task in zip(talks, parts, asking, strict=True):
            if len(talks) > 1 and not as_json:
                show_lines(f"--- {talk.model}", flush=True)
            answer = ""
            while (part := await queue.get()) is not None:
                answer += part
                if not as_json:
                    show_part(part)
            error = await task
            found = "" if error is None else await _sentence(talk, options, error)
            if as_json:
                failed = {} if error is None else {"error": found}
                show_json({"model": talk.model, "text": answer, "finish_reason": talk.reason, **failed}, flush=True)
            elif error is None:
                note = " [cut at the limit of tokens]" if talk.reason == "length" else ""
                show_lines(note if answer.strip() else f"{note} {_EMPTY}".lstrip(), flush=True)
            elif answer:
                show_lines("", flush=True)
            if error is not None:
                status = 1
                complain(found)
    finally:
        for task in asking:
            task.cancel()
    return status


async def _sentence(talk: Talk, options: Namespace, error: TrlError) -> str:
    """An error in the words of a shell, with the model that was meant where the service knows one."""
    text = in_a_shell(str(await error_with_the_name_meant(talk.client, options, error)))
    job, slash, _ = talk.model.partition("/")
    if slash and isinstance(error, ServiceRefusal) and error.status == 400 and repr(talk.model) in text:
        with suppress(ServiceRefusal, ServiceUnreachable):
            if job in await names_of_jobs(talk.client):
                return f"{text.removesuffix('.')}; was job:{talk.model} meant?"
    return text


async def _collect(talk: Talk, text: str, parts: asyncio.Queue[str | None]) -> TrlError | None:
    """Put the parts of an answer into a queue, and None at its end. Returns the error that ended it."""
    try:
        async for part in talk.ask(text):
            parts.put_nowait(part)
    except TrlError as error:
        return error
    finally:
        parts.put_nowait(None)
    return None

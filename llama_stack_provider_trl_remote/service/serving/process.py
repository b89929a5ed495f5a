"""A process that answers chats with one base model, seen from the service: its start, its requests, its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.launch.base import Launcher, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.specs.chat_templates import UNENDED
from llama_stack_provider_trl.specs.serving import (
    ANSWER,
    LEASE,
    MOST_LINE,
    RUN,
    SOCKET,
    Answer,
    AnswerPart,
    ServeRequest,
    ServeSpec,
)
from llama_stack_provider_trl.system.cpu_timer import ENDED_BY
from llama_stack_provider_trl.system.files import RunDir, atomic_write, tail
from llama_stack_provider_trl.system.offload import FairSlots, caller_name

from ..space import Space
from .served import Files, copy_adapter

_CONNECT_PAUSE, _POLL_PAUSE = 0.02, 0.1
_ENDING_SECONDS = 10.0
"""Seconds within which a process and its runner end; both are killed long before."""
_LONGEST_PATH = 100
"""Bytes of a socket's path that every system takes."""
_MOST_TOKENS = 1 << 20
"""Of an answer that a request does not bound: its process bounds it by the positions of the model."""
_BESIDE_TOKENS = 4
"""Messages beside one for each token: the first two, the last, and text that waited for a character's end."""
_MOST_ANSWER, _MOST_WITH_LOGPROBS = 16 << 20, 128 << 20
"""Bytes. A message takes 60, and with 20 log-probabilities 2,000."""


class ProcessEnded(Exception):
    """Raised when a process has ended before it had answered a request."""

    def __init__(self, reason: str, *, gave_way: bool, unanswered: bool, by_tokenizer: bool) -> None:
        self.reason, self.gave_way = reason, gave_way
        self.unanswered = unanswered
        """Whether the request had no part of an answer yet: another process may answer it."""
        self.by_tokenizer = by_tokenizer
        """Whether the chat template, or the tokenizer, of this request has ended it."""
        super().__init__(reason)


class ServingProcess:
    """One process. Created and used in the event loop.

    Args:
        directory: a new one, for its run directory and its adapters, which is removed at the end.
        device: that it shares, such as `cpu` or `cuda:0`.
        slots: of requests that it answers at a time, token by token in turns; further ones wait here.
        python: interpreter that runs it; None: the launcher's own.
    """

    def __init__(
        self,
        launcher: Launcher,
        directory: Path,
        spec: ServeSpec,
        device: str,
        space: Space,
        slots: FairSlots,
        python: str | None = None,
    ) -> None:
        self._slots = slots
        self._launcher, self._directory, self._spec, self._space = launcher, directory, spec, space
        self.device = device
        self.task = TaskSpec(
            f"serving-{directory.name}", directory / RUN, (device,), python, serves=True, beside=spec.beside
        )
        self.memory = 0
        """Bytes that it needs once it has loaded its model, beside a training; 0: it has a device."""
        self.callers: Counter[str] = Counter()
        """Requests that are being answered, by caller."""
        self.used_at = time.monotonic()
        self._copying = asyncio.Lock()
        self._reason, self._gave_way, self._by_tokenizer = "", False, False
        self._is_alone = False
        """Whether it was answering a single request at its end."""
        self._ends = asyncio.Event()
        self._life = asyncio.create_task(self._live(), name=f"serving {directory.name}")
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_beside(self) -> bool:
        """Whether it computes beside a training, on the CPU."""
        return self._spec.beside

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded its model."""
        return self._ready.done()

    @property
    def has_ended(self) -> bool:
        """Whether it answers nothing any more."""
        return self._life.done() or self._ends.is_set()

    async def ended(self) -> None:
        """Return when no process of it is left, and its files are removed."""
        await asyncio.wait([self._life])

    def end(self, reason: str) -> None:
        """Have it end now. Returns at once."""
        self._reason = self._reason or reason
        self._ends.set()

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Keep the process from being ended for another model while the block lasts."""
        caller = caller_name()
        self.callers[caller] += 1
        try:
            yield
        finally:
            self.callers[caller] -= 1
            self.callers += Counter()  # without those that have none any more
            self.used_at = time.monotonic()

    async def answer(self, request: ServeRequest, adapter: Files | None) -> AsyncGenerator[Answer]:
        """The parts of the answer to a request, as they come, when it is its caller's turn. Raises ProcessEnded;
        InvalidRequest, OSError: the adapter cannot be copied."""
        begun = reads = False
        await asyncio.wait([self._ready, self._life], return_when=asyncio.FIRST_COMPLETED)
        async with self._slots.taken():
            if self._ready.done() and not self.has_ended:
                if adapter is not None:
                    async with self._copying:
                        copy = self._spec.adapters / adapter.digest
                        await asyncio.to_thread(copy_adapter, adapter, copy, self._space)
                    request = request.model_copy(update={"adapter": adapter.digest})
                async with aclosing(self._exchange(request)) as messages:
                    async for message in messages:
                        if reads := message.kind == "reading":
                            continue
                        begun = True
                        yield message
                        if message.kind in ("ended", "refused"):
                            return
        await self.ended()
        raise ProcessEnded(
            self._reason or "it was idle",
            gave_way=self._gave_way,
            unanswered=not begun,
            by_tokenizer=self._by_tokenizer and (reads or self._is_alone),
        )

    async def _exchange(self, request: ServeRequest) -> AsyncGenerator[Answer]:
        """The messages until the process closes the connection."""
        sent = request.model_dump_json().encode() + b"\n"
        try:
            reader, writer = await self._connect()
        except OSError:
            return
        bounds = _Bounds(request)
        try:
            writer.write(sent)
            while line := await reader.readline():
                yield bounds.checked(line)
        except OSError:
            return
        except ValueError as error:  # no message, a line that is too long, or more than an answer has
            self.end(f"it sent an answer that cannot be read: {str(error)[:200]}")
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        run_dir = self.task.run_dir
        path = run_dir / SOCKET
        if not stat.S_ISSOCK(path.lstat().st_mode):  # the process may have made a link to another one
            raise OSError(f"{path} is no socket")
        if len(os.fsencode(path)) <= _LONGEST_PATH:
            return await asyncio.open_unix_connection(path, limit=MOST_LINE)
        directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{SOCKET}", limit=MOST_LINE)
        finally:
            os.close(directory)

    async def _live(self) -> None:
        """Start the process, hold its lease until it ends, and remove what is left of it."""
        starting = asyncio.create_task(asyncio.to_thread(self._start))
        try:
            await asyncio.wait([starting])
            starting.result()
            reader, writer = await self._take_lease()
            self._ready.set_result(None)
            lease = asyncio.ensure_future(reader.read(1))
            await _first(lease, asyncio.ensure_future(self._ends.wait()))
            writer.close()
        except _Exited:
            pass
        except OSError as error:
            self._reason = f"the process cannot be started: {error}"
        finally:
            await self._clean_up()

    async def _take_lease(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises _Exited: the process has ended."""
        polled_at = time.monotonic()
        while not self._ends.is_set():
            try:
                reader, writer = await self._connect()
            except OSError:
                if time.monotonic() - polled_at > _POLL_PAUSE:
                    polled_at = time.monotonic()
                    if (await asyncio.to_thread(self._launcher.poll, self.task)).state is TaskState.exited:
                        raise _Exited from None
                await asyncio.sleep(_CONNECT_PAUSE)
            else:
                writer.write(LEASE)
                return reader, writer
        raise _Exited

    def _start(self) -> None:
        self._directory.mkdir(mode=0o700)
        self.task.run_dir.mkdir()
        self._spec.adapters.mkdir()
        atomic_write(RunDir(self.task.run_dir).spec, self._spec.model_dump_json().encode())
        self._launcher.start(self.task)

    async def _clean_up(self) -> None:
        seen = await asyncio.to_thread(self._end)
        self._gave_way = seen.detail.startswith(("gave way to ", "waiting for device "))
        self._by_tokenizer, self._is_alone = seen.exit_code == -ENDED_BY, self.callers.total() == 1
        self._reason = self._reason or await asyncio.to_thread(self._reason_of, seen)
        await asyncio.to_thread(shutil.rmtree, self._directory, True)

    def _end(self) -> Observation:
        """End all processes, and return what was observed of them last."""
        deadline = time.monotonic() + _ENDING_SECONDS
        seen = Observation(TaskState.unknown)
        with suppress(OSError):
            # One that has just ended is given a moment, so that its runner reports how.
            grace = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                seen = self._launcher.poll(self.task)
                if seen.state in (TaskState.exited, TaskState.unknown):
                    break
                if self._reason or time.monotonic() > grace:
                    self._launcher.cancel(self.task)
                time.sleep(_CONNECT_PAUSE)
        return seen

    def _reason_of(self, seen: Observation) -> str:
        if seen.exit_code == 0:
            return "it was idle"
        if seen.exit_code == -ENDED_BY:
            return UNENDED
        return seen.launch_error or seen.detail or f"it ended with {seen.exit_code}: {self._log() or 'no output'}"

    def _log(self) -> str:
        return tail(RunDir(self.task.run_dir).log, 1)


class _Bounds:
    """What the answer to a request has at most: a model may have code of its own, which sends what it likes. Within
    them an answer takes the memory of an honest one with long texts."""

    def __init__(self, request: ServeRequest) -> None:
        self._logprobs = request.logprobs
        self._messages = (request.max_tokens or _MOST_TOKENS) + _BESIDE_TOKENS
        self._bytes = _MOST_ANSWER if request.logprobs is None else _MOST_WITH_LOGPROBS

    def checked(self, line: bytes) -> Answer:
        """The next message. Raises ValueError: it is none, or one too many."""
        self._messages -= 1
        self._bytes -= len(line)
        if self._messages < 0 or self._bytes < 0:
            raise ValueError("it has more messages, or more bytes, than the tokens of the request can have")
        message = ANSWER.validate_json(line)
        if isinstance(message, AnswerPart):
            most = 0 if self._logprobs is None else 1
            if len(message.tokens) > most or any(len(one.top) > (self._logprobs or 0) for one in message.tokens):
                raise ValueError("it has more log-probabilities than were requested")
        return message


class _Exited(Exception):
    """Raised when a process has ended, or is to end, before its lease was taken."""


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of these is done, and cancel the others."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()

"""Uploads the answers of a task: what the service lacks of each of its files, whole batches only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Protocol

from llama_stack_provider_trl.errors import is_exhausted
from llama_stack_provider_trl.specs.answer_files import NONE
from llama_stack_provider_trl.system.files import open_in

from .localize import PathMap

_PIECE = 1 << 19
"""Bytes of one call."""


class AnswerCalls(Protocol):
    """The part of `calls.NodeClient` that uploads answers."""

    async def put_answers(self, task_id: str, file: str, offset: int, data: bytes) -> int: ...


class Unreadable(OSError):
    """Raised when the training has put something else in the place of its file of answers. That does not change."""


class AnswerUpload:
    """The upload of one task's answers.

    The service's file is the beginning of this node's, which began with it (`inputs`), and its size is the progress. A
    batch that is half written stays here: the next attempt, wherever it is, writes it again.
    """

    def __init__(self, paths: PathMap, calls: AnswerCalls) -> None:
        self._paths, self._calls = paths, calls
        self._whole = NONE
        self._sent: dict[str, int] = {}
        """File -> bytes that the service has."""

    async def ship(self, *, is_finished: bool) -> None:
        """Send what the service lacks.

        Args:
            is_finished: the training has written all of its files.

        Raises:
            Unreadable.
        """
        grows, *at_the_end = self._paths.answer_files
        await self._send(grows, await asyncio.to_thread(self._ready, grows, is_finished))
        for name in at_the_end if is_finished else ():
            await self._send(name, await asyncio.to_thread(self._ready, name, is_finished))

    def _ready(self, name: str, is_finished: bool) -> int:
        """Bytes of a file that may be sent."""
        with self._opened(name) as file:
            if file is None:
                return 0
            if is_finished:
                return os.fstat(file.fileno()).st_size
            self._whole = self._paths.whole_answers(file, self._whole)
            return self._whole.size

    async def _send(self, name: str, end: int) -> None:
        task_id = self._paths.order.task_id
        if name not in self._sent:
            self._sent[name] = await self._calls.put_answers(task_id, name, 0, b"")
        while self._sent[name] < end:
            data = await asyncio.to_thread(self._part, name, end)
            if not data:
                return  # the training has cut its own file: the service compares the digest at the end
            self._sent[name] = await self._calls.put_answers(task_id, name, self._sent[name], data)

    def _part(self, name: str, end: int) -> bytes:
        with self._opened(name) as file:
            if file is None:
                return b""
            file.seek(self._sent[name])
            return file.read(min(_PIECE, end - self._sent[name]))

    @contextmanager
    def _opened(self, name: str) -> Iterator[BufferedReader | None]:
        """A file of the training; None: it is missing."""
        try:
            with open_in(self._paths.checkpoint_dir, Path(name)) as file:
                yield file
        except FileNotFoundError:
            yield None
        except OSError as error:
            if is_exhausted(error):
                raise
            raise Unreadable(error.errno, f"{name} of the training cannot be read: {error.strerror}") from error

"""A process that tokenizes shards of a dataset for another one.

    python -m llama_stack_provider_trl.recipes.data.shard_worker PARENT FD

is a program of its own and no fork: a training may have a device open, and threads that a fork would stop. It gets the
dataset and then shards over the socket FD, and ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe, connection
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...system.process import die_with_parent

if TYPE_CHECKING:
    from .prepare import RowRange

_DONE = "done"
_GRACE = 2.0
"""Seconds that a worker without work has to end."""


class Sharded(Protocol):
    """A dataset that is tokenized in shards. It is pickled."""

    def write(self, number: int, rows: RowRange, show: Callable[[int], None]) -> None:
        """Tokenize and store one shard; `show` is called with the rows of it that are done."""


class Lost(NamedTuple):
    """What is received of a worker that has ended."""

    status: int | None


class Worker:
    """A process that tokenizes one shard at a time, seen from the one that has started it."""

    def __init__(self, rows: Sharded) -> None:
        self._ours, theirs = Pipe()
        # One core each: the library's own threads would be as many as cores, in each worker.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        arguments = [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno())]
        self._process = Popen(arguments, stdin=DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.shard: tuple[int, RowRange] | None = None
        """That it tokenizes."""
        self._send(rows)

    @property
    def number(self) -> int | None:
        return self.shard and self.shard[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, number: int, rows: RowRange) -> None:
        self.shard = (number, rows)
        self._send(self.shard)

    def receive(self) -> int | Exception | Lost | None:
        """What it has to say of its shard, when it is `ready`: the rows that are done, or why it failed; None: the
        shard is written."""
        try:
            answer = self._ours.recv()
        except (EOFError, OSError):
            self.shard = None
            with suppress(TimeoutExpired):
                self._process.wait(_GRACE)
            return Lost(self._process.returncode)
        if isinstance(answer, int):
            return answer
        self.shard = None
        return answer if isinstance(answer, Exception) else None

    def end(self) -> None:
        if self.shard is not None:
            self._process.kill()
        self._ours.close()
        try:
            self._process.wait(_GRACE)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def ready(workers: Sequence[Worker]) -> list[Worker]:
        """Wait until some of them have something to say: these."""
        found = connection.wait([worker._ours for worker in workers])
        return [worker for worker in workers if worker._ours in found]

    def _send(self, value: Any) -> None:
        with suppress(OSError):  # it has ended: `receive` finds that
            self._ours.send(value)


def main(arguments: list[str]) -> None:
    parent, descriptor = map(int, arguments)
    die_with_parent(parent)
    ours = connection.Connection(descriptor)
    with suppress(EOFError, OSError):  # the parent has ended, or has no more work
        rows: Sharded = ours.recv()
        while True:
            number, part = ours.recv()
            try:
                rows.write(number, part, ours.send)
            except Exception as error:
                ours.send(_sendable(error))
            else:
                ours.send(_DONE)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(sys.argv[1:])

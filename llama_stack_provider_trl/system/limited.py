"""Calls functions in forks of this process, within limits of time and memory: for what a request may make large.

A fork takes 2 ms, a process that starts Python and imports a library 200. It has this thread alone, so the function
may neither wait for other threads nor import a module for the first time. Linux limits its memory, macOS only its time.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from mmap import mmap
from typing import Any, NamedTuple

from ..errors import LimitReached
from . import fork
from .process import allocated_memory, die_with_parent, limit_memory

_CHUNK = 1 << 16
_COUNT = struct.Struct("=Q")
"""Of the values so far, in memory that a fork shares: a message for each would double the time of a row."""
_AT_ONCE = 2
_WAIT_S = 0.5
"""Seconds that a call waits for a place. It waits in a thread that other requests may need."""
_WALL = 3
"""Wall-clock seconds for each CPU second that is allowed: the machine may have other work."""
_LEAST_WALL_S = 30.0
_BLOCKED_S = 10.0
"""Seconds asleep, without any CPU time, after which a fork counts as blocked: it waits for a lock that another thread
held when it was forked, and that no thread of it releases. A fork drops what is local to the other threads, and a
library in this process (Llama Stack has many) may free it with such a lock. `jobs.database` did so."""
_TRIES = 3
_WAS_LIMITED = 0.5
"""Share of the CPU time that is allowed, from which on the kernel has killed a process for its limit, which it compares
with its own estimate (0.90 to 1.01 s at 1 s), and not for want of memory."""
_forking = threading.Lock()
"""Filters of warnings are those of the whole process."""


class LimitExceeded(Exception):
    """Raised when a function has reached a limit, or its process crashed.

    Args:
        found: what it yielded before.
    """

    def __init__(self, found: list[Any]) -> None:
        self.found = found
        super().__init__("it needs too much time or memory")


class TooLate(LimitReached):
    """Raised when a function has not ended in time, though it has not used the CPU time that it may: it waits for
    something, or the machine has other work."""


class _BlockedError(Exception):
    """Raised when a fork waits for what never comes."""


class Limited:
    """Calls functions, a few at a time.

    Args:
        seconds: of CPU time that a call may take.
        memory: bytes that it may allocate.
    """

    def __init__(self, seconds: int, memory: int) -> None:
        self.seconds, self.memory = seconds, memory
        self._places = threading.BoundedSemaphore(_AT_ONCE)

    @property
    def wall_seconds(self) -> float:
        """Seconds after which a call is ended."""
        return max(_LEAST_WALL_S, _WALL * self.seconds)

    def call(self, function: Callable[[], Iterable[Any]]) -> list[Any]:
        """What `function` yields: JSON values, each known here before the next one is computed. Null costs no message.

        Raises:
            LimitExceeded: it takes more than the limits allow.
            LimitReached: too many other calls run, or the machine is too busy or short of memory for this one; where
                it has not ended in time, a TooLate.
            OSError: there can be no further process.
            RuntimeError: it raised an exception.
        """
        if not self._places.acquire(timeout=_WAIT_S):
            raise LimitReached("too many requests are being checked: send it again later")
        try:
            for _ in range(_TRIES - 1):
                with suppress(_BlockedError):
                    return self._call(function, _BLOCKED_S)
            return self._call(function, self.wall_seconds)
        finally:
            self._places.release()

    def _call(self, function: Callable[[], Iterable[Any]], patience: float) -> list[Any]:
        """As `call`. Raises _BlockedError where the fork sleeps for `patience` seconds."""
        reader, writer = os.pipe()
        count = mmap(-1, _COUNT.size)
        try:
            try:
                pid = self._fork(function, writer, count)
            finally:
                os.close(writer)
            try:
                deadline = time.monotonic() + self.wall_seconds
                lines = _lines(reader, deadline, _Sleep(pid, patience))
                is_late = time.monotonic() >= deadline
            finally:
                ending = _end(pid)
        finally:
            os.close(reader)
        written = [json.loads(line) for line in lines]
        found: list[Any] = [None] * _COUNT.unpack_from(count)[0]
        for number, value in (line for line in written if isinstance(line, list)):
            found[number : number + 1] = [value]  # the last one may not be counted yet
        if not written or isinstance(written[-1], list):  # what comes last is missing
            if is_late or (ending.is_killed and ending.cpu_seconds < _WAS_LIMITED * self.seconds):
                kind = TooLate if is_late else LimitReached
                raise kind("the machine is too busy, or short of memory, to check this: send it again later")
            raise LimitExceeded(found)
        if (problem := written[-1]) is not None:
            raise RuntimeError(problem)
        return found

    def _fork(self, function: Callable[[], Iterable[Any]], writer: int, count: mmap) -> int:
        parent = os.getpid()
        try:
            with _forking, warnings.catch_warnings():
                # The fork waits for no lock of another thread: see above.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid:
                return pid
            die_with_parent(parent)
            fork.close_files((writer,))
            self._limit()
            _write(function, writer, count)
            os._exit(0)
        finally:
            if os.getpid() != parent:
                os._exit(1)

    def _limit(self) -> None:
        """Set the limits of this process, which has no handlers of signals from now on."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        seconds = self.seconds if most == resource.RLIM_INFINITY else min(self.seconds, most)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        limit_memory(allocated_memory() + self.memory)
        with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
            file.write(b"1000")  # where memory runs out, this process ends, and not the server


def _write(function: Callable[[], Iterable[Any]], writer: int, count: mmap) -> None:
    """Count the values in shared memory. Write each but null as a line, [number, value], and at the end null, or a text
    if the function raised."""
    try:
        for number, value in enumerate(function()):
            if value is not None:
                _send(writer, [number, value])
            _COUNT.pack_into(count, 0, number + 1)
    except MemoryError:
        raise
    except Exception as error:
        _send(writer, f"{type(error).__name__}: {error}")
        return
    _send(writer, None)


def _send(writer: int, value: Any) -> None:
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


class _Sleep:
    """How long a process has been asleep.

    Args:
        patience: seconds after which that is too long.
    """

    def __init__(self, pid: int, patience: float) -> None:
        self._file, self._patience = f"/proc/{pid}/stat", patience
        self._used, self._since = b"", time.monotonic()

    def check(self) -> None:
        """Compare its CPU time with that at the call before. Raises _BlockedError."""
        try:
            with open(self._file, "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # there is no such file but on Linux
            return
        state, used = fields[0], b" ".join(fields[11:13])
        if state != b"S" or used != self._used:
            self._used, self._since = used, time.monotonic()
        elif time.monotonic() - self._since > self._patience:
            raise _BlockedError


def _lines(reader: int, deadline: float, sleep: _Sleep) -> list[bytes]:
    """What is written until the end, or the deadline; whole lines only. Raises _BlockedError."""
    data = bytearray()
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if waiting.poll(min(left, 1.0) * 1000):
            chunk = os.read(reader, _CHUNK)
            if not chunk:
                break
            data += chunk
        else:
            sleep.check()
    return bytes(data).split(b"\n")[:-1]


class _Ending(NamedTuple):
    """How a process ended."""

    is_killed: bool
    """By SIGKILL: ours, or the kernel's at a limit or where memory ran out."""
    cpu_seconds: float


def _end(pid: int) -> _Ending:
    """Have a process ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # one that has closed its end of the pipe has ended by now, or does so
    try:
        _, status, usage = os.wait4(pid, 0)
    except ChildProcessError:  # where SIGCHLD is ignored
        return _Ending(False, 0.0)
    return _Ending(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, usage.ru_utime + usage.ru_stime)

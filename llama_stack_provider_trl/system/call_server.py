"""The process in which `limited` has functions called. It has one thread, and forks for each call.

A fork of a process with several threads has the forking one alone, and every lock as it was: it drops what is local to
the other threads, and a library that frees this with a lock held by one of them waits forever. Llama Stack's process
and the training service have many threads, so they never fork themselves.

Each call has two processes. The function's has the limits. The keeper waits for its end, and ends it where the caller
has hung up, as it has when it was killed.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from . import fork
from .process import allocated_memory, die_with_parent, hide_from_other_processes, limit_memory

IDLE_S = 60.0
"""Seconds without a call after which this process ends."""
LARGEST_ORDER = 128 << 10
RECEIVED = b"\n"
"""What a call's socket has first: this process has its order."""
SIZE = struct.Struct("=Q")
"""Before a request; and the number of values so far, in memory that a fork shares: a message for each would double the
time of a row."""


class CallOrder(NamedTuple):
    """What this process does itself before it forks, so that it is done once for all calls."""

    path: tuple[str, ...]
    """The caller's `sys.path`."""
    module: str
    """The function's module, which is imported."""
    before: Callable[[], object] | None
    """Imports what the function needs; in the keeper where this process began with another path. What it raises is left
    to the function."""


class LimitedCall(NamedTuple):
    function: Callable[[], Iterable[Any]]
    seconds: int
    """Of CPU time."""
    memory: int
    """Bytes beyond those that are allocated when it starts."""


class CallEnding(NamedTuple):
    is_killed: bool
    """By SIGKILL: the kernel's, at a limit or where memory ran out, or the keeper's."""
    cpu_seconds: float
    values: int
    """How many it had yielded."""


def program(number: int) -> list[str]:
    """The command that serves on a socket with this file descriptor, with this process's `sys.path`."""
    start = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    start += f"from {__name__} import serve; serve(int(sys.argv[2]))"
    return [sys.executable, "-P", "-c", start, json.dumps([*map(str, sys.path)]), str(number)]


def serve(number: int) -> None:
    """Serve calls until there are none for a while, or the other end is closed.

    Args:
        number: file descriptor of a socket that keeps the bounds of messages. Each is a pickled CallOrder with the
            socket of its call, on which a pickled LimitedCall comes.
    """
    path = tuple(sys.path)
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")  # where memory runs out, this process and its forks end, and not the caller
    hide_from_other_processes()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers
    with socket.socket(fileno=number) as orders:
        orders.set_inheritable(False)
        orders.settimeout(IDLE_S)
        while True:
            try:
                message, files, *_ = socket.recv_fds(orders, LARGEST_ORDER, 1)
            except TimeoutError:
                if _has_keepers():
                    continue
                return
            if not message or not files:
                return
            with socket.socket(fileno=files[0]) as call:
                call.set_inheritable(False)
                with suppress(OSError):
                    call.sendall(RECEIVED)
                try:
                    order: CallOrder = pickle.loads(message)
                except Exception as error:  # of a module that is not there
                    _report_error(call, error)
                    continue
                with suppress(Exception):
                    importlib.import_module(order.module)
                if order.path == path:
                    _prepare(order)
                _start_keeper(order, path, orders, call)


def _has_keepers() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _prepare(order: CallOrder) -> None:
    if order.before is not None:
        with suppress(Exception):
            order.before()


def _start_keeper(order: CallOrder, path: tuple[str, ...], orders: socket.socket, call: socket.socket) -> None:
    try:
        if os.fork():
            return
    except OSError as error:
        _report_no_process(call, error)
        return
    try:
        orders.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if order.path != path:
            sys.path[:] = order.path
            importlib.invalidate_caches()
            _prepare(order)
        _keep(call)
    finally:
        os._exit(0)


def _report_no_process(call: socket.socket, error: OSError) -> None:
    with suppress(OSError):
        _send(call, {"no_process": [error.errno, str(error)]})


def _report_error(call: socket.socket, error: Exception) -> None:
    with suppress(OSError):
        _send(call, f"{type(error).__name__}: {error}")
        _send(call, CallEnding(False, 0.0, 0)._asdict())


def _keep(call: socket.socket) -> None:
    """Start the function's process, wait until it has ended or the caller has hung up, and report how it ended."""
    try:
        request: LimitedCall = pickle.loads(_received(call))
    except EOFError:
        return
    except Exception as error:  # the function, or an argument, is not there
        _report_error(call, error)
        return
    count = mmap.mmap(-1, SIZE.size)
    alive, held = os.pipe()
    keeper = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _report_no_process(call, error)
        return
    if not pid:
        _run(request, call, count, keeper, held)
    os.close(held)
    waiting = select.poll()
    waiting.register(alive, select.POLLIN)  # its other end is closed at the end of the function's process
    waiting.register(call, select.POLLIN)  # the caller has hung up
    waiting.poll()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    ending = CallEnding(is_killed, usage.ru_utime + usage.ru_stime, SIZE.unpack_from(count)[0])
    with suppress(OSError):
        call.sendall(b"\n")  # behind what the process may have written of a line
        _send(call, ending._asdict())


def _received(call: socket.socket) -> bytes:
    """A message behind its size. Raises EOFError."""

    def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (part := call.recv(min(size - len(data), 1 << 20))):
                raise EOFError
            data += part
        return bytes(data)

    return exactly(SIZE.unpack(exactly(SIZE.size))[0])


def _run(request: LimitedCall, call: socket.socket, count: mmap.mmap, keeper: int, held: int) -> NoReturn:
    try:
        die_with_parent(keeper)
        fork.close_files((call.fileno(), held))
        _limit(request)
        _write(request.function, call, count)
        os._exit(0)
    finally:
        os._exit(1)


def _limit(request: LimitedCall) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = request.seconds if most == resource.RLIM_INFINITY else min(request.seconds, most)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    limit_memory(allocated_memory() + request.memory)


def _write(function: Callable[[], Iterable[Any]], call: socket.socket, count: mmap.mmap) -> None:
    """Count the values. Write each but null as a line, [number, value], and at the end null, or a text if the function
    raised."""
    try:
        for number, value in enumerate(function()):
            if value is not None:
                _send(call, [number, value])
            SIZE.pack_into(count, 0, number + 1)
    except MemoryError:
        raise
    except Exception as error:
        _send(call, f"{type(error).__name__}: {error}")
        return
    _send(call, None)


def _send(call: socket.socket, value: Any) -> None:
    call.sendall(json.dumps(value).encode() + b"\n")

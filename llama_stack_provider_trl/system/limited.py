"""Calls functions in other processes, within limits of time and memory: for what a request may make large.

`call_server` has them called. It starts with the first call (0.3 s), and forks for each: 5 ms. Linux limits memory,
macOS only time. How many calls run at once, and whose CPU time they use, is decided by `offload`.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import LimitReached
from .call_server import LARGEST_ORDER, RECEIVED, SIZE, CallEnding, CallOrder, LimitedCall, program
from .offload import Account, charged_account
from .process import computing_environment

_CHUNK = 1 << 16
_MOST_FOUND = 32 << 20
"""Bytes of what a function yields: this process holds them."""
_MOST_VALUES = 1 << 24
"""Values of a call, null included: a row takes more than a microsecond, so no honest call has more."""
_WALL = 3
"""Wall-clock seconds for each CPU second that is allowed: the machine may have other work."""
_LEAST_WALL_S = 30.0
_TRIES = 3
_RECEIVED_S = 20.0
"""Seconds after which a server that has not taken an order is replaced. It starts in 0.3 s."""
_SEND_S = 30.0
"""Seconds that a server may import what calls before need."""
_END_S = 5.0
"""Seconds that a process which is ended may take for it."""
_WAS_LIMITED = 0.5
"""Share of the CPU time that is allowed, from which on the kernel has killed a process for its limit, which it compares
with its own estimate (0.90 to 1.01 s at 1 s), and not for want of memory."""
_TOO_BUSY = "the machine is too busy, or short of memory, to check this: send it again later"


class LimitExceeded(Exception):
    """Raised when a function has reached a limit, or its process crashed."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found
        super().__init__("it needs too much time or memory")


class TooLate(LimitReached):
    """Raised when a function has not ended in time, though it has not used the CPU time that it may: it waits for
    something, or the machine has other work."""


class Limited:
    """Calls functions.

    Args:
        seconds: of CPU time that a call may take.
        memory: bytes that it may allocate.
        values: that it may yield. Their count comes from the function's process, which may have written it.
    """

    def __init__(self, seconds: int, memory: int, values: int = _MOST_VALUES) -> None:
        self.seconds, self.memory, self.values = seconds, memory, values

    @property
    def wall_seconds(self) -> float:
        """Seconds after which a call is ended."""
        return max(_LEAST_WALL_S, _WALL * self.seconds)

    def call(
        self,
        function: Callable[..., Iterable[Any]],
        *arguments: Any,
        before: Callable[[], object] | None = None,
        within: float | None = None,
    ) -> list[Any]:
        """What `function(*arguments)` yields: JSON values, each known here before the next one is computed. Null costs
        no message.

        Args:
            function: of a module, as pickle finds it by name; its process has none of this one's other objects.
            before: called in that process, without limits, by the first call that has it: imports what is needed.
            within: seconds after which it is ended; None: `wall_seconds`.

        Raises:
            LimitExceeded: it takes more than the limits allow, or yields more than 32 MiB or than `values`.
            LimitReached: the caller whose request orders it has used its CPU time, or the machine is too busy or short
                of memory; where it has not ended in time, a TooLate.
            OSError: there can be no further process.
            RuntimeError: it raised an exception, or a request orders it outside of `offload.in_work_thread`.
        """
        if (account := charged_account()) is not None:
            account.require()
        order = pickle.dumps(CallOrder(tuple(map(str, sys.path)), function.__module__, before))
        if len(order) > LARGEST_ORDER:
            raise ValueError(f"an order has {len(order)} bytes, at most {LARGEST_ORDER} are expected")
        request = pickle.dumps(LimitedCall(partial(function, *arguments), self.seconds, self.memory))
        began = time.monotonic()
        lines, is_late = self._called(order, request, began + (self.wall_seconds if within is None else within))
        if is_late and account is not None:  # it has kept a thread for so long, whatever it has computed
            account.charge(max(0.0, time.monotonic() - began - self.seconds))
        return self._found(lines, is_late, account)

    def _called(self, order: bytes, request: bytes, deadline: float) -> tuple[list[bytes], bool]:
        """What comes back, and whether it took too long. A server may have ended, as it does without calls, or be
        stuck: the next try has another one."""
        status = 0
        for _ in range(_TRIES):
            try:
                return _exchange(order, request, deadline)
            except _NoAnswerError as error:
                status = error.server.end()
        if status > 0:  # an error of its own, and no signal
            raise LimitReached(
                f"this cannot be checked: the process for it ended with status {status}. The log has the reason; "
                "restart this server if a package was upgraded meanwhile"
            )
        raise LimitReached(_TOO_BUSY)

    def _found(self, lines: list[bytes], is_late: bool, account: Account | None) -> list[Any]:
        if is_late:
            if account is not None:
                account.charge(self.seconds)  # not known: the most that it may have used
            raise TooLate(_TOO_BUSY)
        written = []
        for line in lines:
            with suppress(ValueError):  # of a process that was killed while it wrote
                written.append(json.loads(line))
        reported = written.pop() if written and isinstance(written[-1], dict) else {}
        if (problem := reported.get("no_process")) is not None:
            raise OSError(problem[0], f"no process can be started: {problem[1]}")
        if not reported:
            raise LimitReached(_TOO_BUSY)  # the server or the keeper was killed
        ending = CallEnding(**reported)
        if account is not None:
            account.charge(ending.cpu_seconds)
        if ending.values > self.values:  # before a list of that length is made
            raise LimitExceeded([])
        found: list[Any] = [None] * ending.values
        for number, value in (line for line in written if isinstance(line, list)):
            found[number : number + 1] = [value]  # the last one may not be counted yet
        if not written or isinstance(written[-1], list):  # what comes last is missing
            if ending.is_killed and ending.cpu_seconds < _WAS_LIMITED * self.seconds:
                raise LimitReached(_TOO_BUSY)
            raise LimitExceeded(found)
        if (raised := written[-1]) is not None:
            raise RuntimeError(raised)
        return found


def _exchange(order: bytes, request: bytes, deadline: float) -> tuple[list[bytes], bool]:
    """The lines that answer a call, and whether it was ended at its deadline. Raises _NoAnswerError: the server has not
    taken the order; OSError: no server can be started."""
    here, there = socket.socketpair()
    with here:
        with there:
            there.setblocking(True)  # whatever the default timeout of this process is
            server = _the_server()
            if not server.send(order, there):
                raise _NoAnswerError(server)
        data = bytearray()
        # Whatever the deadline is: a server that others need is not ended for a short one.
        _read(here, data, time.monotonic() + _RECEIVED_S, len(RECEIVED))
        if not data:
            raise _NoAnswerError(server)
        here.settimeout(max(0.001, deadline - time.monotonic()))
        with suppress(OSError):  # what is wrong shows below
            here.sendall(SIZE.pack(len(request)) + request)
        if not _read(here, data, deadline):
            with suppress(OSError):
                here.shutdown(socket.SHUT_WR)
            _read(here, data, time.monotonic() + _END_S)
            return [], True
        if len(data) > _MOST_FOUND:
            return [json.dumps(CallEnding(False, 0.0, 0)._asdict()).encode()], False
        return bytes(data).split(b"\n"), False


def _read(connection: socket.socket, data: bytearray, deadline: float, enough: int | None = None) -> bool:
    """Read until the other end is closed, or `enough` bytes are there. Returns False at the deadline."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if waiting.poll(left * 1000):
            try:
                part = connection.recv(_CHUNK)
            except OSError:
                return True
            if not part:
                return True
            data += part
            if len(data) > _MOST_FOUND or (enough is not None and len(data) >= enough):
                return True
    return False


class _NoAnswerError(Exception):
    """Raised when a server has not taken an order."""

    def __init__(self, server: _CallServer) -> None:
        self.server = server
        super().__init__()


class _CallServer:
    """A running `call_server`. It ends by itself once this object is gone."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, _KEEPS_BOUNDS)
        self._orders.settimeout(_SEND_S)
        self._close = weakref.finalize(self, self._orders.close)
        with theirs:
            self._process = subprocess.Popen(
                program(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=computing_environment(os.environ),
                start_new_session=True,  # Ctrl-C is for this process
            )
        threading.Thread(target=self._process.wait, daemon=True).start()  # it may end at any time

    def end(self) -> int:
        """Have another one started for the next call, and this one ended: it imports what never ends, or is stopped.
        Calls that it has forked for do not need it. Returns its exit status; negative: minus the signal."""
        global _server
        with _lock:
            if _server is self:
                _server = None
        self._close()
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def send(self, order: bytes, call: socket.socket) -> bool:
        """Returns False where it has ended, or takes no orders."""
        try:
            socket.send_fds(self._orders, [order], [call.fileno()])
        except OSError:
            return False
        return True


_KEEPS_BOUNDS = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
_server: _CallServer | None = None
_lock = threading.Lock()


def _the_server() -> _CallServer:
    """Raises OSError: it cannot be started."""
    global _server
    with _lock:
        if _server is None:
            _server = _CallServer()
        return _server


def _after_fork() -> None:
    """The server is the parent's."""
    global _server, _lock
    _server, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

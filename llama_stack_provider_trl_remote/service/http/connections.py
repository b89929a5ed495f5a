"""Bounds the number of connections and the time that each may take without progress.

Without bounds, any client of the port can use up the process's file descriptors without a token, and a service
without descriptors can neither answer nor start a training.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

MOST_DESCRIPTORS = 65_536
"""Highest soft limit that is set. More serves nothing here, and slows down programs that close every possible
descriptor."""
_RESERVE = 256
"""Descriptors for the job store, logs, children and connections that are being accepted."""
_MOST_CONNECTIONS = 4096
"""Connections by default. An idle one takes 15 KiB, one that sends a body up to 320 KiB."""
_BATCH = 64
"""Connections that are accepted before the event loop does something else."""
_BACKLOG = 2048
_LEAST_AGE = 0.2
"""Seconds after which a new connection without a request may be replaced."""
_PAUSE = 1.0
"""Seconds without accepting after a lack of descriptors."""
_SWEEP = 1.0
"""Seconds between two checks of all connections."""
_SPARE = 64 << 20
"""Bytes of a body that are dropped after its answer, for a sender that reads only after sending everything."""

DRAINING = "trl_draining"
"""Key of an ASGI scope: true while the rest of a refused body is dropped before its answer is sent."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds."""

    head: float = 10.0
    """From the accept to the complete head of the first request; for a later one, from its first byte."""
    body: float = 60.0
    """Without a byte of a body that is being read."""
    reader: float = 60.0
    """Without a byte taken of an answer that waits."""
    close: float = 10.0
    """From the decision to close a connection to its end."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS: the hard limit may be more than the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def default_connections(descriptors: int) -> int:
    """How many connections fit in a limit of open files, every third with a file that it sends or receives."""
    return max(8, min(_MOST_CONNECTIONS, (descriptors - min(_RESERVE, descriptors // 2)) * 3 // 4))


class Connection(H11Protocol):
    """uvicorn's protocol, with the time since its peer last made progress."""

    deadlines = Deadlines()
    on_close: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        now = self.loop.time()
        self._awaiting_head: float | None = now
        """Time since which a request's head is awaited; None: no byte of one has come yet, or one is being answered."""
        self._received = self.accepted = now
        self._unsent, self._unsent_since = 0, now
        self._closing_since: float | None = None
        self._dropped = 0
        self.has_served = False
        """Whether any request has come."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_draining(self) -> bool:
        """Whether its request was refused, and only the rest of the body is dropped."""
        return self.cycle is not None and bool(self.cycle.scope.get(DRAINING))

    def data_received(self, data: bytes) -> None:
        self._received = self.loop.time()
        if self.is_draining:
            self._drop(data)
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self.is_idle:
            self._awaiting_head, self._dropped, self.has_served = None, 0, True
        elif self.conn.their_state is h11.SEND_BODY:  # of a request that has its answer
            self._dropped += len(data)
            if self._dropped > _SPARE:
                self.transport.abort()
        elif self._awaiting_head is None and self.conn.trailing_data[0]:
            self._awaiting_head = self._received

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, once. h11 raises at a second answer, which would be logged with a traceback: where a
        request has its answer and its body is damaged afterwards, and where its handler still runs."""
        if not self.is_idle:
            self.cycle.disconnected = True  # the handler's answer is dropped
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # A complete answer may still be on its way; one that has begun cannot be completed.
            (self.transport.close if self.is_idle else self.transport.abort)()

    def _drop(self, data: bytes) -> None:
        """Drop a part of a refused body here.

        Through the request's task each part takes four times as long, which was a third of the event loop in a flood of
        bodies of 31 MiB."""
        self._dropped += len(data)
        if self._dropped > _SPARE:
            return self.transport.abort()
        self.conn.receive_data(data)
        try:
            while isinstance(event := self.conn.next_event(), h11.Data):
                pass
        except h11.RemoteProtocolError:
            return self.transport.abort()
        if isinstance(event, h11.EndOfMessage):
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_close()

    def end(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def sweep(self, now: float) -> None:
        """End the connection if its peer has exceeded a deadline."""
        if self.transport is None:
            return  # a TLS handshake, which has a deadline of its own
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            if now - self._closing_since > self.deadlines.close:
                self.transport.abort()
        elif self._keeps_waiting(now):
            self.transport.abort()

    def _keeps_waiting(self, now: float) -> bool:
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        if now - self._unsent_since > self.deadlines.reader:
            return True
        if self.is_idle and self._awaiting_head is not None:
            return now - self._awaiting_head > self.deadlines.head
        if self.conn.their_state is not h11.SEND_BODY:
            return False
        # The peer waits for us: we are not reading, or have not requested the body yet (Expect: 100-continue).
        waits_for_us = not self.is_idle and (self.flow.read_paused or self.cycle.waiting_for_100_continue)
        if waits_for_us:
            self._received = now
        return now - self._received > self.deadlines.body


class Acceptor:
    """Accepts connections in place of asyncio's server.

    That one has no bound and fails 2,048 times in a row once a descriptor is lacking. At the cap a new connection
    replaces an idle one.

    Args:
        listener: bound, not yet listening.
        make: a new connection's protocol.
        most: connections at a time.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Connection],
        most: int,
        tls: ssl.SSLContext | None = None,
        handshake: float = Deadlines.head,
    ) -> None:
        self._listener, self._make, self._most, self._tls, self._handshake = listener, make, most, tls, handshake
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, asyncio.Task[None]] = {}
        """The oldest first, each with the task that has set it up."""
        self._silent: dict[Connection, None] = {}
        """Connections without a request at their last check, the oldest first. The next to close is found without a
        pass over all, which took 38 % of the event loop in a flood of 2,000."""
        self._accepts = False
        self._closed = False
        self._notified = False

    @property
    def count(self) -> int:
        """Open connections."""
        return len(self._open)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._sweeper = self._loop.call_later(_SWEEP, self._sweep)
        self._resume()

    def close(self) -> None:
        """Accept no more connections. Existing ones stay."""
        if not self._closed:
            self._pause()
        self._closed = True

    async def wait_closed(self) -> None:
        """Part of uvicorn's interface of a server: it has waited for the connections by now."""
        self._sweeper.cancel()

    def _resume(self) -> None:
        if not self._accepts and not self._closed:
            self._accepts = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self) -> None:
        if self._accepts:
            self._accepts = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if len(self._open) >= self._most and not self._make_room():
                self._pause()  # until one closes, or is old enough to be closed
                self._loop.call_later(_LEAST_AGE / 4, self._resume)
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._notified:
                    log.error("connections cannot be accepted: %s; trying again every %.0f s", error, _PAUSE)
                self._notified = True
                self._pause()
                self._loop.call_later(_PAUSE, self._resume)
                return
            self._notified = False
            accepted.setblocking(False)
            connection = self._make()
            task = self._loop.create_task(self._set_up(connection, accepted))
            self._open[connection] = task
            self._silent[connection] = None
            connection.on_close = lambda connection=connection: self._forget(connection)  # type: ignore[misc]

    async def _set_up(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake if self._tls else None,
            )
        except (OSError, asyncio.CancelledError):  # no TLS, or not in time, or its place was needed
            accepted.close()
            self._forget(connection)

    def _make_room(self) -> bool:
        """End the oldest connection without a request, else the oldest whose request was refused.

        Returns whether there was one. Of connections without a request, one that never had any is ended first."""
        oldest = self._next_to_go(self._loop.time() - _LEAST_AGE)
        if oldest is None:
            return False
        task = self._open[oldest]
        self._forget(oldest)
        task.cancel()
        oldest.end()
        return True

    def _next_to_go(self, young: float) -> Connection | None:
        while self._silent:
            silent = next(iter(self._silent))
            if not silent.has_served:
                if silent.accepted < young:
                    return silent
                break
            del self._silent[silent]
        old = [connection for connection in self._open if connection.accepted < young]
        idle = (connection for connection in old if connection.is_idle)
        return next(idle, None) or next((connection for connection in old if connection.is_draining), None)

    def _forget(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._silent.pop(connection, None)
        if not self._notified:
            self._resume()

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self._open):
            connection.sweep(now)
        self._sweeper = self._loop.call_later(_SWEEP, self._sweep)

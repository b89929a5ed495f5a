"""One connection: whom it serves, and the time that its peer may take.

Without bounds, any client of the port can use up the process's file descriptors without a token, and a service
without descriptors can neither answer nor start a training. `acceptor` bounds the number of connections.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import weakref
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, get_args

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

type Kind = Literal["unknown", "user", "node", "admin"]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
"""Of callers; unknown: without a token that this service knows."""

_READ = 32 << 10
"""Bytes that are read from a socket at once. asyncio reads 256 KiB into a new block each time, also of a request of 200
bytes, and all who pass a piece of a body on hold it."""
_SPARE = 64 << 20
"""Bytes of a body that are dropped after its answer, for a sender that reads only after sending everything."""

DRAINING = "trl_draining"
"""Key of an ASGI scope: true while the rest of a refused body is dropped before its answer is sent."""
_CONNECTION = "trl_connection"
"""Key of an ASGI scope's `state`: a weak reference to the connection, since a strong one would be a cycle."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds, and bytes per second."""

    head: float = 10.0
    """From the accept to the complete head of the first request; for a later one, from its first byte."""
    body: float = 30.0
    """By which a body may be behind `rate`, from the end of its head on."""
    unknown_body: float = 10.0
    """The same for a caller without a known token, whose bodies have 64 KiB at most."""
    reader: float = 60.0
    """By which the reader of an answer may be behind `rate`, while bytes wait for it."""
    rate: float = 4096.0
    """Least bytes per second of a body, and of an answer that waits: a sixteenth of a slow link (64 KiB/s), which may
    carry several at once."""
    close: float = 10.0
    """From the last byte of a connection that is being closed to its end."""


class Sender(NamedTuple):
    """The caller for whom a connection is counted."""

    kind: Kind
    name: str
    """Of its token or node; of an unknown caller, its network."""


def network_of(address: str) -> str:
    """The key of an address: an IPv6 host has a whole /64 to call from."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def identify(scope: Mapping[str, Any], kind: Kind, name: str) -> None:
    """Count the connection of a request for its caller, once that is known."""
    reference = (scope.get("state") or {}).get(_CONNECTION)
    connection: Connection | None = reference() if reference is not None else None
    if connection is not None:
        connection.identify(Sender(kind, name))


class _Arrears:
    """Seconds by which a peer is behind a least rate. Bytes beyond that rate repay, and earn nothing in advance."""

    def __init__(self, now: float, moved: int) -> None:
        self._seconds, self._at, self._moved = 0.0, now, moved

    def seconds(self, now: float, moved: int, rate: float, *, owes: bool) -> float:
        """What the peer is behind now.

        Args:
            moved: bytes since the beginning of the connection.
            owes: whether it is the peer that has to move bytes, since the last call.
        """
        passed = now - self._at if owes else 0.0
        self._seconds = max(0.0, self._seconds + passed - (moved - self._moved) / rate)
        self._at, self._moved = now, moved
        return self._seconds


class _Counted:
    """A transport that counts what is written to it, and reads in the context in which the connection was made."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._context = copy_context()
        self.written = 0

    def resume_reading(self) -> None:
        """Read again. asyncio keeps the context of this call for all that is read later: that of the handler that takes
        a body, whose audit lines, caller and threads the next request of the connection would have."""
        self._context.run(self._transport.resume_reading)

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's protocol, with its caller and the time by which its peer is behind."""

    deadlines = Deadlines()
    _buffer = memoryview(bytearray(_READ))
    """Of all connections: what is read is copied out of it before the event loop, which is one, does anything else."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {_CONNECTION: weakref.ref(self)}  # uvicorn copies it into the scope of each request
        now = self.loop.time()
        self.on_change: Callable[[Connection], None] = lambda connection: None
        """Called when the caller of a request is known, or will not be, and when it has its answer."""
        self.on_backlog: Callable[[Connection, int], None] = lambda connection, size: None
        """Called with the bytes of an answer that wait for their reader, when they become many, and with 0 when they
        are few again."""
        self.on_close: Callable[[Connection], None] = lambda connection: None
        self.network = ""
        """Of its address."""
        self.sender: Sender | None = None
        """The known caller of its last request; None: there is none."""
        self.since = now
        """Time at which it began to wait for a request, or at which the head of its request was complete."""
        self._awaiting_head: float | None = now
        """Time since which a request's head is awaited; None: no byte of one has come yet, or one is being answered."""
        self._request: Any = None
        self._was_idle, self._is_identified = True, False
        self._received = self._moved_before = self._dropped = 0
        self._body = self._reader = _Arrears(now, 0)
        self._closing_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_draining(self) -> bool:
        """Whether its request was refused, and only the rest of the body is dropped."""
        return self.cycle is not None and bool(self.cycle.scope.get(DRAINING))

    @property
    def caller(self) -> str:
        """The caller of its last request, with the kind; where it is not known, the network."""
        return self.network if self.sender is None else f"{self.sender.kind} {self.sender.name}"

    def cost(self, now: float) -> float:
        """Seconds per KiB that its request has moved: what it takes from others of the same caller.

        A request on which the service works costs nothing: its sender owes nothing."""
        if self.is_draining:
            return float("inf")
        if self.conn.their_state is not h11.SEND_BODY and not self.cycle.response_started:
            return 0.0
        return (now - self.since) / (1.0 + (self._received + self._taken - self._moved_before) / 1024)

    def identify(self, sender: Sender) -> None:
        """Set the caller of the request under way."""
        self.sender, self._is_identified = None if sender.kind == "unknown" else sender, True
        if not self.is_idle:
            self.on_change(self)

    def _count_unidentified(self) -> None:
        if not self._is_identified and not self.is_idle:
            self.on_change(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Counted(transport))  # type: ignore[arg-type]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self.is_draining:
            self._drop(data)
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        # Its handler has not taken it yet. Behind the last piece nothing more is taken, and the end is to be noticed.
        if not self.is_idle and self.cycle.body and self.cycle.more_body:
            self.flow.pause_reading()
        self._note_change()
        if not self.is_idle:
            self._awaiting_head, self._dropped = None, 0
        elif self.conn.their_state is h11.SEND_BODY:  # of a request that has its answer
            self._dropped += len(data)
            if self._dropped > _SPARE:
                self.transport.abort()
        elif self._awaiting_head is None and self.conn.trailing_data[0]:
            self._awaiting_head = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.on_backlog(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.on_backlog(self, 0)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._note_change()
        if self.is_idle and self.conn.trailing_data[0]:  # of the next request
            self._awaiting_head = self.loop.time()

    def _note_change(self) -> None:
        if self.cycle is self._request and self.is_idle == self._was_idle:
            return
        self._was_idle, self.since = self.is_idle, self.loop.time()
        if self.cycle is not self._request:
            self._request, self.sender, self._is_identified = self.cycle, None, False
            self._body = _Arrears(self.since, self._received)
            self._moved_before = self._received + self._taken
            # After the first step of its task, which authenticates it: of many that come at once none counts as unknown
            # before its token was seen.
            self.loop.call_soon(self._count_unidentified)
        if self.is_idle:
            self.on_change(self)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, once. h11 raises at a second answer, which would be logged with a traceback: where a
        request has its answer and its body is damaged afterwards, and where its handler still runs."""
        self._drop_handlers_answer()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # A complete answer may still be on its way; one that has begun cannot be completed.
            (self.transport.close if self.is_idle else self.transport.abort)()

    def _drop_handlers_answer(self) -> None:
        if not self.is_idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

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
        self.on_close(self)

    def shutdown(self) -> None:
        """End the connection with the answer to its request; without a request at once."""
        if self.transport.is_closing():
            return
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # of a peer that sent what is not HTTP: no answer can be added
            self.transport.abort()

    def end(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def refuse(self, status: int, detail: str, **headers: str) -> None:
        """End the request under way, with this answer unless one has begun."""
        self._drop_handlers_answer()
        body = json.dumps({"detail": detail}).encode()
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            parts = (
                h11.Response(status_code=status, headers=list(fields.items()), reason=HTTPStatus(status).phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            answer = b"".join(self.conn.send(part) or b"" for part in parts)
        except h11.LocalProtocolError:
            self.transport.abort()
            return
        self.transport.write(answer)
        self.transport.close()

    @property
    def _taken(self) -> int:
        """Bytes of answers that the peer, or the kernel for it, has taken."""
        written: int = self.transport.written  # type: ignore[attr-defined]
        return written - self.transport.get_write_buffer_size()

    def sweep(self, now: float) -> None:
        """End the connection if its peer is behind by more than a deadline."""
        if self.transport is None:
            return  # a TLS handshake, which has a deadline of its own
        limit, unsent = self.deadlines, self.transport.get_write_buffer_size()
        if not unsent:
            self._reader = _Arrears(now, self._taken)
        if self._reader.seconds(now, self._taken, limit.rate, owes=bool(unsent)) > limit.reader:
            self.transport.abort()
        elif self.transport.is_closing():
            self._closing_since = now if unsent or self._closing_since is None else self._closing_since
            if now - self._closing_since > limit.close:
                self.transport.abort()
        elif self.is_idle and self._awaiting_head is not None:
            if now - self._awaiting_head > limit.head:
                self._end_slow_head()
        elif self.conn.their_state is h11.SEND_BODY:
            self._sweep_body(now)

    def _sweep_body(self, now: float) -> None:
        """A body has a least rate from its head on, whatever route it is for, and whether it is refused or not."""
        # The peer waits for us: we are not reading, or have not requested the body yet (Expect: 100-continue).
        waits_for_us = not self.is_idle and (self.flow.read_paused or self.cycle.waiting_for_100_continue)
        limit = self.deadlines
        most = limit.unknown_body if self.sender is None else limit.body
        if self._body.seconds(now, self._received, limit.rate, owes=not waits_for_us) > most:
            self.refuse(
                408,
                f"the body came too slowly: expected {limit.rate / 1024:g} KiB per second after {most:g} s; send it "
                "again over a faster connection, or a smaller one",
            )

    def _end_slow_head(self) -> None:
        if self.conn.trailing_data[0]:
            self.refuse(408, f"the head of the request was not complete in {self.deadlines.head:g} s: send it again")
        else:
            self.transport.abort()

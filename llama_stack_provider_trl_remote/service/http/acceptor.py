"""Accepts connections, and decides which ones end when they are short.

A connection waits for a request, or has one. At the cap a new connection takes the place of a waiting one, and those
with a request leave a part for it. Their own part is divided between kinds of callers, and then between callers: what
ends is the costliest of the caller with the most. Nothing ends while there are enough.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice

from .connections import KINDS, Connection, Deadlines, Kind, network_of

log = logging.getLogger(__name__)

MOST_DESCRIPTORS = 65_536
"""Highest soft limit that is set. More serves nothing here, and slows down programs that close every possible
descriptor."""
_RESERVE = 256
"""Descriptors for the job store, logs, children and connections that are being accepted."""
_MOST_CONNECTIONS = 4096
"""Connections by default. An idle one takes 15 KiB, one that sends a body up to 64 KiB more."""
_WAITING = 4
"""Part of the connections that requests leave to those which have sent none: through these every caller comes."""
_PARTS: dict[Kind, int] = {"unknown": 1, "user": 4, "node": 4, "admin": 2}
"""How requests are divided between kinds of callers when connections are short. A kind takes what others leave."""
_COMPARED = 64
"""Oldest requests of a caller of which the costliest ends. A pass over all was 38 % of the event loop in a flood."""
_MOST_UNSENT = 128 << 20
"""Bytes of all answers that may wait for their readers. One log has up to 8 MiB."""
_BATCH = 64
"""Connections that are accepted before the event loop does something else."""
_BACKLOG = 2048
_LEAST_AGE = 0.2
"""Seconds after which a waiting connection may be replaced."""
_PAUSE = 1.0
"""Seconds without accepting after a lack of descriptors."""
_SWEEP = 1.0
"""Seconds between two checks of all connections."""
_LOGGED = 60.0
"""Seconds between two log lines about a shortage."""


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


class _Groups:
    """Connections by their caller, each caller's oldest first. The largest group is found without a pass over all."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[Connection, None]] = {}
        self._by_size: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._largest = 0
        self.count = 0

    def add(self, key: str, connection: Connection) -> None:
        group = self._groups.setdefault(key, {})
        group[connection] = None
        self._resize(key, len(group) - 1, len(group))
        self.count += 1
        self._largest = max(self._largest, len(group))

    def remove(self, key: str, connection: Connection) -> None:
        group = self._groups[key]
        del group[connection]
        self._resize(key, len(group) + 1, len(group))
        self.count -= 1
        if self._largest and self._largest not in self._by_size:
            self._largest -= 1  # the group that was the largest has one less now
        if not group:
            del self._groups[key]

    def largest(self) -> tuple[str, Iterable[Connection]]:
        """A caller with the most connections, and these. Needs one."""
        key = next(iter(self._by_size[self._largest]))
        return key, self._groups[key]

    def _resize(self, key: str, before: int, after: int) -> None:
        if before:
            del self._by_size[before][key]
            if not self._by_size[before]:
                del self._by_size[before]
        if after:
            self._by_size[after][key] = None


class Acceptor:
    """Accepts connections in place of asyncio's server.

    That one has no bound and fails 2,048 times in a row once a descriptor is lacking.

    Args:
        listener: bound, not yet listening.
        make: a new connection's protocol.
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
        self._most_requests = most - max(1, most // _WAITING)
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, asyncio.Task[None]] = {}
        """The oldest first, each with the task that has set it up."""
        self._waiting = _Groups()
        self._requests = {kind: _Groups() for kind in KINDS}
        self._places: dict[Connection, tuple[_Groups, str]] = {}
        self._unsent: dict[Connection, int] = {}
        """Connections whose readers are behind, the first one first, with the bytes that wait for each."""
        self._accepts = False
        self._closed = False
        self._notified = False
        self._logged_at = float("-inf")

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
        """Accept no more connections. Existing ones end with the answer to their request: a client that keeps one would
        hold up the end of the server."""
        if not self._closed:
            self._pause()
        self._closed = True
        for connection in list(self._open):
            self._end_after_answer(connection)

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
                accepted, address = self._listener.accept()
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
            connection.network = network_of(address[0])
            connection.on_change, connection.on_close = self._place, self._forget
            connection.on_backlog = self._limit_unsent
            self._open[connection] = self._loop.create_task(self._set_up(connection, accepted))
            self._place(connection)

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
        else:
            self._end_after_answer(connection)

    def _end_after_answer(self, connection: Connection) -> None:
        if self._closed and connection.transport is not None:
            connection.shutdown()

    def _place(self, connection: Connection) -> None:
        """Count a connection for its caller; while its request is under way, among the requests."""
        if connection not in self._open:
            return
        self._displace(connection)
        kind: Kind = "unknown" if connection.sender is None else connection.sender.kind
        groups = self._waiting if connection.is_idle else self._requests[kind]
        self._places[connection] = groups, connection.caller
        groups.add(connection.caller, connection)
        self._end_after_answer(connection)
        while sum(groups.count for groups in self._requests.values()) > self._most_requests:
            self._end_costliest()

    def _displace(self, connection: Connection) -> None:
        place = self._places.pop(connection, None)
        if place is not None:
            groups, key = place
            groups.remove(key, connection)

    def _limit_unsent(self, connection: Connection, size: int) -> None:
        """Note what waits for a reader. Above the limit the caller with the most loses its oldest such connection."""
        self._unsent.pop(connection, None)
        if not size or connection not in self._open:
            return
        self._unsent[connection] = size
        while len(self._unsent) > 1 and sum(self._unsent.values()) > _MOST_UNSENT:
            by_caller: Counter[str] = Counter()
            for waiting, count in self._unsent.items():
                by_caller[waiting.caller] += count
            most = max(by_caller, key=by_caller.__getitem__)
            self._log_shortage("more than %d MiB of answers wait for their readers", _MOST_UNSENT >> 20, most)
            self._end(next(waiting for waiting in self._unsent if waiting.caller == most))

    def _make_room(self) -> bool:
        """End the connection that has waited the longest, of the caller with the most that wait.

        Returns whether it was old enough."""
        _, group = self._waiting.largest()  # requests leave a part of the connections to these
        oldest = next(iter(group))
        if oldest.since > self._loop.time() - _LEAST_AGE:
            return False
        self._end(oldest)
        return True

    def _end_costliest(self) -> None:
        """End a request of the kind of callers that is the furthest beyond its part."""
        kind = max(KINDS, key=lambda kind: self._requests[kind].count - self._part(kind))
        caller, group = self._requests[kind].largest()
        now = self._loop.time()
        costliest = max(islice(group, _COMPARED), key=lambda connection: connection.cost(now))
        self._log_shortage("all %d connections for requests are taken", self._most_requests, caller)
        costliest.refuse(
            503,
            "the service has no connection left and this caller has the most: close some, then send this again",
            retry_after="5",
        )
        self._end(costliest)

    def _log_shortage(self, what: str, number: int, caller: str) -> None:
        now = self._loop.time()
        if now - self._logged_at > _LOGGED:
            self._logged_at = now
            log.warning(what + ": the caller with the most (%s) loses the costliest", number, caller)

    def _part(self, kind: Kind) -> int:
        return max(1, self._most_requests * _PARTS[kind] // sum(_PARTS.values()))

    def _end(self, connection: Connection) -> None:
        task = self._open[connection]
        self._forget(connection)
        task.cancel()
        connection.end()

    def _forget(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._unsent.pop(connection, None)
        self._displace(connection)
        if not self._notified:
            self._resume()

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self._open):
            connection.sweep(now)
        self._sweeper = self._loop.call_later(_SWEEP, self._sweep)

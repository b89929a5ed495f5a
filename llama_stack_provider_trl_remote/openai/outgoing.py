"""One POST to an address that the operator has configured: to public addresses alone, within a time, without redirects.

The addresses of the host are checked where the connection is made, and the connection is to the one that was checked: a
name that leads elsewhere a moment later (DNS rebinding) changes nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llama_stack_provider_trl.errors import TrlError

PATIENCE = 10.0
"""Seconds that one POST may take, from the connection to the status."""
_LINGER, _REST = 1.0, 64 << 10
"""Seconds and bytes for what follows the status: it is not needed, but some servers report a connection that ends
before they have sent it."""
_HEAD = 8192
"""Bytes of a status with the headers behind it."""
_WITH_RETRY_AFTER = frozenset({429, 503})
"""Statuses whose answers may say when to call again (RFC 9110, 10.2.3)."""
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")

type Address = ipaddress.IPv4Address | ipaddress.IPv6Address
type Network = ipaddress.IPv4Network | ipaddress.IPv6Network
type Resolve = Callable[..., Sequence[tuple[Any, ...]]]


class Undelivered(TrlError):
    """Raised when a POST has not been accepted, with the reason. The reason has no text of the receiver.

    Args:
        retry_after: seconds for which the receiver wants no further POST; 0: it says nothing of that.
    """

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        self.retry_after = retry_after
        super().__init__(reason)


class WebhookAddress(NamedTuple):
    """Where a POST goes."""

    host: str
    port: int
    path: str
    """With its query."""
    is_tls: bool
    networks: tuple[Network, ...] = ()
    """Networks of private addresses that the host may lead to."""

    @classmethod
    def of(cls, url: str, networks: Sequence[str] = ()) -> WebhookAddress:
        """Of a url and networks that the settings have checked."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        found = tuple(ipaddress.ip_network(network) for network in networks)
        return cls(parts.hostname or "", parts.port or (443 if is_tls else 80), path, is_tls, found)

    @property
    def place(self) -> str:
        """Host and port, as a header and a log have them: the path may hold a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    def admits(self, address: str) -> bool:
        """Whether a POST may go to an address: it is public, or in one of the networks."""
        found: Address = ipaddress.ip_address(address)
        if isinstance(found, ipaddress.IPv6Address):
            found = found.ipv4_mapped or found
        return _is_public(found) or any(found in network for network in self.networks)


def post(
    target: WebhookAddress,
    headers: Mapping[str, str],
    body: bytes,
    patience: float = PATIENCE,
    resolve: Resolve = socket.getaddrinfo,
) -> None:
    """Send a body. Raises Undelivered: no connection, no status in time, or another one than 2xx.

    Args:
        patience: seconds that it may take after the addresses of the host have been found.
    """
    try:
        _post(target, headers, body, patience, resolve)
    except TimeoutError as error:
        raise Undelivered(f"no answer within {patience:g} s") from error
    except (OSError, ValueError) as error:
        raise Undelivered(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error


def _post(target: WebhookAddress, headers: Mapping[str, str], body: bytes, patience: float, resolve: Resolve) -> None:
    addresses = _addresses(target, resolve)
    deadline = time.monotonic() + patience
    lines = [f"POST {target.path} HTTP/1.1", f"Host: {target.place}", "Connection: close"]
    lines += [f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
    with _connected(target, addresses, deadline) as connection:
        _wait_until(connection, deadline)
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        status, received = _status(connection, deadline)
        if 300 <= status < 400:
            raise Undelivered(f"it answered {status}: redirects are not followed, set the address that it leads to")
        if status in _WITH_RETRY_AFTER:
            head = _rest_of_head(connection, received, min(deadline, time.monotonic() + _LINGER))
            raise Undelivered(f"it answered {status}", retry_after(head, time.time()))
        if not 200 <= status < 300:
            raise Undelivered(f"it answered {status}")
        _let_end(connection, deadline)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    # 6to4 and Teredo have an IPv4 address within, which may be private.
    is_tunnel = address.sixtofour is not None or address.teredo is not None
    return address in _GLOBAL_UNICAST and address.is_global and not is_tunnel


def _addresses(target: WebhookAddress, resolve: Resolve) -> list[tuple[Any, ...]]:
    """The entries of getaddrinfo that a POST may go to."""
    found = list(resolve(target.host, target.port, type=socket.SOCK_STREAM))
    admitted = [entry for entry in found if target.admits(entry[4][0])]
    if not admitted:
        private = ", ".join(sorted({entry[4][0] for entry in found})) or "no address"
        raise Undelivered(
            f"its host leads to {private}, which is not public: `networks` of the webhook names where it may lead to"
        )
    return admitted


def _connected(target: WebhookAddress, addresses: Sequence[tuple[Any, ...]], deadline: float) -> socket.socket:
    """A connection to the first address that takes one."""
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()) / (len(addresses) - number))
            connection.connect(address)
            if not target.is_tls:
                return connection
            _wait_until(connection, deadline)
            return _tls().wrap_socket(connection, server_hostname=target.host)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError) or isinstance(error, ssl.SSLError) or number + 1 == len(addresses):
                raise
    raise AssertionError("no address")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _wait_until(connection: socket.socket, deadline: float) -> None:
    """The next call of a connection ends at the deadline. Raises TimeoutError: it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _status(connection: socket.socket, deadline: float) -> tuple[int, bytes]:
    """The status of an answer, and what has come of it so far."""
    received = b""
    while b"\n" not in received and len(received) < _HEAD:
        _wait_until(connection, deadline)
        piece = connection.recv(1024)
        if not piece:
            break
        received += piece
    found = re.match(rb"HTTP/1\.[01] ([0-9]{3})[ \r\n]", received)
    if found is None:
        raise Undelivered("it answered with no HTTP" if received else "it closed the connection without an answer")
    return int(found[1]), received


def _rest_of_head(connection: socket.socket, received: bytes, deadline: float) -> bytes:
    """An answer up to the end of its headers, or what comes of them in time."""
    with suppress(OSError):
        while b"\r\n\r\n" not in received and len(received) < _HEAD:
            _wait_until(connection, deadline)
            piece = connection.recv(1024)
            if not piece:
                break
            received += piece
    return received.partition(b"\r\n\r\n")[0]


def retry_after(head: bytes, now: float) -> float:
    """Seconds that an answer wants its client to wait; 0: it has no Retry-After, or one that is neither a number of
    seconds nor a date.

    Args:
        head: its status and headers.
        now: seconds since the epoch.
    """
    fields = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    text = next((value for name, _, value in fields if name.lower() == b"retry-after"), b"").decode("latin-1").strip()
    if re.fullmatch(r"[0-9]{1,18}", text):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError, OSError):
        return 0.0


def _let_end(connection: socket.socket, deadline: float) -> None:
    """Read the rest of an answer, for a moment."""
    left, until = _REST, min(deadline, time.monotonic() + _LINGER)
    with suppress(OSError):
        while left > 0:
            _wait_until(connection, until)
            piece = connection.recv(8192)
            if not piece:
                return
            left -= len(piece)

"""What is decided about every request before it is routed: its form, where it comes from, and who sends it.

Pure ASGI, so that bodies pass through in pieces: Starlette's own middleware classes would hold them. Who may call which
route is declared on the route (`access`).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import BODY, CALLER, Body, Caller, Refused
from .errors import raw_answer
from .settings import ServiceSettings

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPARE = 64 << 20
"""Bytes of a refused body which are read and dropped, so that its sender lives to see the answer."""
_DRAIN_SECONDS = 10.0

type Authenticate = Callable[[str], Caller | None]
"""A token -> its caller; None: it is not known."""


class ConfiguredTokens:
    """The tokens of the configuration.

    Args:
        more: further tokens, with the names of their callers.
    """

    def __init__(self, settings: ServiceSettings, more: Mapping[str, Caller] | None = None) -> None:
        self._callers: dict[bytes, Caller] = {}
        operator = settings.api_token.get_secret_value() if settings.api_token else None
        for number, (token, role) in enumerate(settings.credentials.items(), 1):
            name = "operator" if token == operator else f"configured-{number}"
            self._callers[token.encode()] = Caller(role, name, presented=True)
        if self._callers:
            for token, caller in (more or {}).items():
                self._callers.setdefault(token.encode(), caller)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def __call__(self, token: str) -> Caller | None:
        # All are compared, each in constant time: the time taken says nothing about any of them.
        given = token.encode()
        matches = [caller for known, caller in self._callers.items() if hmac.compare_digest(known, given)]
        return matches[0] if matches else None


class AnyOf:
    """Authenticates with the first that knows a token."""

    def __init__(self, *authenticators: Authenticate) -> None:
        self._authenticators = authenticators

    def __call__(self, token: str) -> Caller | None:
        return next((caller for known in self._authenticators if (caller := known(token)) is not None), None)


class Gate:
    """Checks path, Host and Origin of every request, and authenticates its sender.

    Args:
        authenticate: None: no token is needed, and every caller has the role admin.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings, authenticate: Authenticate | None) -> None:
        self.app = app
        self._authenticate = authenticate
        self._hosts = LOOPBACK_NAMES | {name.lower() for name in settings.allowed_hosts}
        # DNS rebinding comes with a name: beyond loopback, an address as such is what our clients use.
        self._addresses_pass = not settings.on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        scope[BODY] = body = Body(receive, headers)
        answered = False

        async def draining(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and message["status"] >= 400:
                await _drain(body)
            answered = True
            await send(message)

        try:
            _check_path(scope)
            self._check_origin(headers)
            scope[CALLER] = self._caller(headers)
            await self.app(scope, body.receive, draining)
        except Refused as refusal:
            if not answered:
                await _drain(body)
                await _answer(send, refusal)

    def _check_origin(self, headers: Headers) -> None:
        """A browser can be made to call us from any page: by a name that resolves to us, or by a form."""
        host = headers.get("host", "")
        if not self._known(_name(host)):
            raise Refused(
                403,
                f"the Host header is {host[:100]!r}, expected one of {', '.join(sorted(self._hosts))}: call the "
                "service by one of these, or add the name to allowed_hosts in the service's configuration",
            )
        origin = headers.get("origin")
        if origin is not None and not self._known(_name(_authority(origin))):
            raise Refused(403, f"a page of {origin[:100]!r} may not call this service: only its own pages may")

    def _known(self, name: str) -> bool:
        return name in self._hosts or (self._addresses_pass and _is_address(name))

    def _caller(self, headers: Headers) -> Caller:
        if self._authenticate is None:
            return Caller("admin", "local")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = self._authenticate(given.strip()) if scheme.lower() == "bearer" else None
        return found or Caller(None, presented=bool(given))


def _check_path(scope: Scope) -> None:
    """Refuse control characters: what matches a path then cannot depend on how a pattern treats a line's end.

    Raises:
        Refused: 400.
    """
    if found := _CONTROL.search(scope["path"]):
        raise Refused(400, f"the path has the control character {found[0]!r}: send a path without any")


async def _drain(body: Body) -> None:
    """Read and drop what is still being sent, within bounds: a connection that is closed on unread data is reset, and
    the sender never sees the answer."""
    if body.whole or (body.waits_for_continue and not body.count) or body.announced - body.count > _SPARE:
        return
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while dropped <= _SPARE and not body.whole:
                dropped += await body.discard()


def _authority(origin: str) -> str:
    """`Origin` without its scheme; nothing where it is malformed."""
    try:
        return urlsplit(origin).netloc if "//" in origin else origin
    except ValueError:  # http://[
        return ""


def _name(host: str) -> str:
    """`Host` without its port; an IPv6 address without its brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _answer(send: Send, refusal: Refused) -> None:
    headers, body = raw_answer(refusal.status_code, str(refusal.detail))
    headers += [(name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()]
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})

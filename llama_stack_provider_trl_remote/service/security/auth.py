"""Decisions about every request before it is routed: its form, its origin and its sender.

Pure ASGI, so that bodies pass through in parts: Starlette's own middleware classes would buffer them. The access to
each route is declared on the route (`access`).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_stack_provider_trl.jobs.store.tokens import Role, digest
from llama_stack_provider_trl.specs.names import problem_of_name
from llama_stack_provider_trl.system.console import shown

from ..http.connections import DRAINING, Kind, identify
from ..http.errors import raw_answer
from ..settings import LOCAL, ServiceSettings
from .access import BODY, CALLER, REFUSALS, ROUTE, Body, Caller, Refused, Removed, sender
from .audit import Refusal, Refusals
from .limits import Bucket, Failures
from .recording import RECORDED
from .sessions import Sessions, cookies_of
from .streams import COUNTED

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_PARAMETERS = 1000
"""Parameters of a path."""
_SPARE = 64 << 20
"""Bytes of a refused body that are read and dropped, so that its sender can read the answer."""
_DRAIN_SECONDS = 10.0
_UNKNOWN_DRAIN_SECONDS = 1.0
"""For a caller without a known token."""
_CHECK_SECONDS = 0.5
"""Seconds between checks of whether the token of a running answer is still valid."""
_MOST_KIND = 256
"""Characters of a Content-Type."""
_PORTS = {"http": 80, "https": 443}
_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
_BEARER = {"WWW-Authenticate": "Bearer"}
_KINDS: dict[Role | None, Kind] = {
    **{None: "unknown", "metrics": "user", "read": "user", "submit": "user", "node": "node", "admin": "admin"}
}
"""Role -> the kind of callers among which its connections are counted."""

type Authenticate = Callable[[str], Caller | None]
"""Returns the caller of a token; None: the token is unknown."""


class ConfiguredTokens:
    """Authenticates with the tokens of the configuration.

    Args:
        more: further tokens, with the names of their callers.
    """

    def __init__(self, settings: ServiceSettings, more: Mapping[str, Caller] | None = None) -> None:
        self._callers: dict[bytes, Caller] = {}
        for entry in settings.configured_tokens:
            rate = entry.limits.requests_per_second
            self._callers[entry.token.encode()] = Caller(
                entry.role,
                entry.name,
                presented=True,
                limits=entry.limits,
                bucket=None if rate is None else Bucket(rate),
            )
        if self._callers:
            for token, caller in (more or {}).items():
                self._callers.setdefault(token.encode(), caller)
        self._by_digest = {digest(token.decode()): caller for token, caller in self._callers.items()}

    def digests(self) -> Iterable[str]:
        return tuple(self._by_digest)

    def by_digest(self, sha256: str) -> Caller | None:
        return self._by_digest.get(sha256)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def __call__(self, token: str) -> Caller | None:
        # All are compared, each in constant time: the time taken discloses nothing about them.
        given = token.encode()
        matches = [caller for known, caller in self._callers.items() if hmac.compare_digest(known, given)]
        return matches[0] if matches else None


class AnyOf:
    """Authenticates with the first authenticator that knows a token."""

    def __init__(self, *authenticators: Authenticate) -> None:
        self._authenticators = authenticators

    def __call__(self, token: str) -> Caller | None:
        return next((caller for known in self._authenticators if (caller := known(token)) is not None), None)


class Authenticator:
    """Determines the callers of requests: by the token in a header, or by the session of a browser.

    Args:
        authenticate: None: no token is needed, and every caller has the role admin.
        sessions: None: only tokens are accepted.
    """

    def __init__(self, authenticate: Authenticate | None, sessions: Sessions | None = None) -> None:
        self._authenticate = authenticate
        self._sessions = sessions
        self._failures = Failures()

    @property
    def needs_token(self) -> bool:
        return self._authenticate is not None

    def of_request(self, scope: Scope, headers: Headers) -> Caller:
        """The caller of a request. A request with a token in its header has no session."""
        if self._authenticate is None:
            return Caller("admin", LOCAL)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.of_token(scope, given.strip())
        if not scheme and self._sessions is not None and (cookies := headers.get("cookie")):
            found = self._sessions.caller(cookies_of(cookies).get(self._sessions.cookie, ""))
            if found is not None:
                return found
        return Caller(None, presented=bool(given))

    def of_token(self, scope: Scope, token: str) -> Caller:
        """The caller of a token that arrived with this request. Wrong ones count against the request's address."""
        if self._authenticate is None:
            return Caller("admin", LOCAL)
        address = (scope.get("client") or ("",))[0]
        if not self._failures.may_try(address, token):
            return Caller(None, presented=True, throttled=True)
        found = self._authenticate(token)
        self._failures.note(address, token, found is not None)
        return found or Caller(None, presented=bool(token))


class Gate:
    """Checks path, Host and Origin of every request, authenticates its sender, and ends it when its token is revoked.

    Args:
        refusals: where refused requests are recorded.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServiceSettings,
        authenticator: Authenticator,
        refusals: Refusals | None = None,
    ) -> None:
        self.app = app
        self._authenticator = authenticator
        self._refusals = refusals
        self._allowed_hosts = {name.lower() for name in settings.allowed_hosts}
        self._hosts = LOOPBACK_NAMES | self._allowed_hosts
        # DNS rebinding needs a name. Beyond loopback our clients use addresses, so an address as such is accepted.
        self._addresses_pass = not settings.on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        scope[BODY] = body = Body(receive, headers)
        answer = ResponseState(scope, send)

        async def draining(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(scope, message["status"])
                if message["status"] >= 400:
                    await _drain(scope, body)
                message["headers"] = with_policy(message.get("headers", ()))
            await answer.send(message)

        try:
            _check_names(scope)
            _check_length(headers)
            _check_kind(headers)
            self._check_host(headers)
            self._check_origin(scope, headers)
            scope[CALLER] = caller = self._authenticator.of_request(scope, headers)
            # FastAPI parses cookies for every route, with http.cookies: 6 s for one of 30 KiB of backslashes.
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"cookie"]
            identify(scope, _KINDS[caller.role], caller.name)
            if caller.check is None:
                await self.app(scope, body.receive, draining)
            else:
                await _while_valid(caller, body, answer, self.app(scope, body.receive, draining))
        except Refused as refusal:
            if isinstance(refusal, Removed):
                scope[CALLER] = Caller(None, refusal.node, refusal.node, presented=True)
            self._note(scope, refusal.status_code, always=isinstance(refusal, Removed))
            if not answer.begun:
                await _drain(scope, body)
                await _answer(scope, send, refusal)
        finally:
            # Scope, body and uvicorn's cycle refer to one another. 200 connections that poll left 14 MiB of such cycles
            # to the garbage collector.
            del scope[BODY]

    def _note(self, scope: Scope, status: int, always: bool = False) -> None:
        """Record a refusal."""
        if self._refusals is None or not (always or status in REFUSALS) or RECORDED in scope:
            return
        self._refusals.add(Refusal(status=status, method=scope["method"][:16], route=scope.get(ROUTE), **sender(scope)))

    def _check_host(self, headers: Headers) -> None:
        """Refuse names that are not the service's: one of a foreign page may resolve to its address."""
        host = headers.get("host", "")
        if not self._known(_name(host)):
            raise Refused(
                403,
                f"the Host header is {host[:100]!r}, expected one of {', '.join(sorted(self._hosts))}: call the "
                "service by one of these, or add the name to allowed_hosts in the service's configuration",
            )

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuse pages of another origin, be it another port of the same host: a browser sends their forms and requests
        with the user's address, which is all that a service without tokens checks."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and _origin(origin) not in self._own_origins(scope, host):
            raise Refused(
                403,
                f"a page of {origin[:100]!r} may not call this service, only its own pages may: open them by the "
                "address that the request is sent to",
            )
        site = headers.get("sec-fetch-site", "none").lower()
        if site not in ("none", "same-origin") and not _opens_page(scope["method"], headers):
            raise Refused(403, f"a page of another origin ({site[:20]!r}) may link to this service, and not call it")

    def _own_origins(self, scope: Scope, host: str) -> set[_Origin | None]:
        """The origins that a page of this service has, by the Host header of its request."""
        schemes = [scope.get("scheme", "http")]
        if _name(host) in self._allowed_hosts:
            schemes.append("https")  # a proxy that serves TLS under this name
        return {_origin(f"{scheme}://{host}") for scheme in schemes} - {None}

    def _known(self, name: str) -> bool:
        return name in self._hosts or (self._addresses_pass and _is_address(name))


class ResponseState:
    """The state of the answer to a request."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.begun = self.ended = False
        self._has_length = False

    async def send(self, message: Message) -> None:
        self.begun = True
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
        elif not message.get("more_body"):
            self.ended = True
        elif COUNTED not in self._scope:
            raise RuntimeError("an answer in parts counts for its caller: send a CountedStream or a CountedFile")
        await self._send(message)

    async def end(self) -> None:
        """End an answer early: a stream properly; a file, whose length is announced, with its connection."""
        if not self.ended and not self._has_length:
            await self.send({"type": "http.response.body", "body": b""})


async def _while_valid(caller: Caller, body: Body, answer: ResponseState, handled: Awaitable[None]) -> None:
    """Handle a request for as long as its token is valid.

    Only an answer that is being sent or a body that is being received is broken off. Everything between takes effect as
    a whole, or not at all. Raises Refused: 401.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal timer
        if not caller.still_valid() and (answer.begun or (body.count and not body.whole)):
            bound.reschedule(loop.time())
        else:
            timer = loop.call_later(_CHECK_SECONDS, check)

    timer = loop.call_later(_CHECK_SECONDS, check)
    try:
        async with asyncio.timeout(None) as bound:
            await handled
    except TimeoutError:
        if not bound.expired():
            raise
        if answer.begun:
            await answer.end()
        raise Refused(401, "the token was revoked or has expired: use another", _BEARER) from None
    finally:
        timer.cancel()


def _check_names(scope: Scope) -> None:
    """Refuse paths and parameters with characters that are not printed. They are names, and whether a pattern of a path
    matches must not depend on how it treats line ends. Raises Refused: 400."""
    if problem := problem_of_name(scope["path"]):
        raise Refused(400, f"the path has a control character, or is too long: {problem}")
    try:
        parameters = parse_qsl(
            scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=_PARAMETERS
        )
    except ValueError as error:
        raise Refused(400, f"the parameters of the path cannot be read: {error}") from error
    for name, value in parameters:
        if problem := problem_of_name(name) or problem_of_name(value):
            raise Refused(400, f"the parameter {shown(name[:100])!r} cannot be a name: {problem}")


def _check_length(headers: Headers) -> None:
    """Refuse a body with two lengths: memory is reserved for one, and the other is received. Raises Refused: 400."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise Refused(
            400,
            "the request has both Content-Length and Transfer-Encoding, expected one: send Content-Length alone",
            {"Connection": "close"},
        )


def _check_kind(headers: Headers) -> None:
    """Refuse a Content-Type that no client needs: what parses it takes time by the square of its length. Raises
    Refused: 400."""
    if (length := len(headers.get("content-type", ""))) > _MOST_KIND:
        raise Refused(
            400, f"the Content-Type has {length} characters, expected {_MOST_KIND} at most: send the type of the body"
        )


async def _drain(scope: Scope, body: Body) -> None:
    """Read and drop the rest of a body, within bounds. A connection that is closed on unread data is reset, and the
    sender never reads the answer."""
    if body.whole or (body.waits_for_continue and not body.count) or body.announced - body.count > _SPARE:
        return
    caller: Caller | None = scope.get(CALLER)
    seconds = _UNKNOWN_DRAIN_SECONDS if caller is None or caller.role is None else _DRAIN_SECONDS
    dropped = 0
    scope[DRAINING] = True
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while dropped <= _SPARE and not body.whole:
                    dropped += await body.discard()
    finally:
        scope[DRAINING] = False


class _Origin(NamedTuple):
    scheme: str
    name: str
    port: int


def _origin(text: str) -> _Origin | None:
    """An origin by its parts; None: it is malformed, or `null`."""
    try:
        parts = urlsplit(text.strip().lower())
        port = parts.port
    except ValueError:  # http://[, http://localhost:x
        return None
    is_origin = parts.scheme in _PORTS and parts.hostname and (parts.path, parts.query, parts.fragment) == ("", "", "")
    if not is_origin or "@" in parts.netloc:
        return None
    return _Origin(parts.scheme, parts.hostname or "", _PORTS[parts.scheme] if port is None else port)


def _opens_page(method: str, headers: Headers) -> bool:
    """Whether a browser follows a link to a page of the service."""
    navigates = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return method in ("GET", "HEAD") and navigates


def with_policy(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers of an answer, with those that every answer has. Pages have a policy of their own; where logs, files or
    descriptions are opened in its place, nothing runs and nothing is loaded."""
    given = list(headers)
    if not any(name.lower() == _POLICY[0] for name, _ in given):
        given.append(_POLICY)
    return [*given, (b"x-content-type-options", b"nosniff")]


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


async def _answer(scope: Scope, send: Send, refusal: Refused) -> None:
    headers, body = raw_answer(refusal.status_code, str(refusal.detail), scope["path"])
    headers += [(name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()]
    headers = with_policy(headers)
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})

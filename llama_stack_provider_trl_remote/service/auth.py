"""Who may call, from where, and with how large a body: decided before a request reaches any handler.

Pure ASGI, so that bodies pass through in pieces: Starlette's own middleware classes would hold them.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Forbidden, raw_answer
from .settings import Role, ServiceSettings

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/v1/health"})
"""Answered without a token."""
_UPLOAD = re.compile(
    r"/v1/blobs/[^/]*|/v1/nodes/[^/]*/tasks/[^/]*/(events|logs/[^/]*|checkpoints/[^/]*/files/.*)", re.DOTALL
)
_OF_NODES = re.compile(r"/v1/nodes(/[^/]*/(poll|tasks/.*))?", re.DOTALL)
"""What nodes call, and besides them only who may do everything."""
_FOR_NODES = re.compile(r"/v1/blobs/[^/]*|/v1(alpha)?/post-training/jobs/[^/]*/checkpoints(/.*)?", re.DOTALL)
"""What else nodes may GET."""
_SPARE = 64 << 20
"""Bytes of a refused body which are read and dropped, so that its sender lives to see the answer."""
_DRAIN_SECONDS = 10.0


class Refused(HTTPException):
    """Raised inside the gate: the request goes no further. FastAPI lets its own exceptions out of a body's reading."""


class Gate:
    """Checks Host, Origin, token, content type and size of every request."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, node_token: str | None = None) -> None:
        self.app = app
        self._tokens = {token.encode(): role for token, role in settings.credentials.items()}
        if self._tokens and node_token is not None:
            self._tokens.setdefault(node_token.encode(), "node")
        self._hosts = LOOPBACK_NAMES | {name.lower() for name in settings.allowed_hosts}
        # DNS rebinding comes with a name: beyond loopback, an address as such is what our clients use.
        self._addresses_pass = not settings.on_loopback
        self._limits = (settings.max_body_mb << 20, settings.max_upload_mb << 20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        body = _Body(receive, send, self._limits[bool(_UPLOAD.fullmatch(scope["path"]))], headers)
        try:
            self._check_origin(headers)
            scope["trl_role"] = role = self._role(scope, headers)
            _check_role(role, scope)
            _check_content_type(scope, headers)
            body.check_announced()
            await self.app(scope, body.receive, body.send)
        except Refused as refusal:
            if not body.answered:
                await body.drain()
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
        if origin is not None and not self._known(_name(urlsplit(origin).netloc if "//" in origin else origin)):
            raise Refused(403, f"a page of {origin[:100]!r} may not call this service: only its own pages may")

    def _known(self, name: str) -> bool:
        return name in self._hosts or (self._addresses_pass and _is_address(name))

    def _role(self, scope: Scope, headers: Headers) -> Role:
        if not self._tokens:
            return "admin"
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            # All are compared, each in constant time: the time taken says nothing about any of them.
            matches = [
                role for token, role in self._tokens.items() if hmac.compare_digest(token, given.strip().encode())
            ]
            if matches:
                return matches[0]
        if scope["path"] in OPEN_PATHS:
            return "submit"
        found = "is not one that this service knows" if given else "is missing"
        raise Refused(
            401, f"the token {found}: send `Authorization: Bearer TOKEN` with the token that the service was given"
        )


def _check_role(role: Role, scope: Scope) -> None:
    """Nodes do what nodes do, and nobody else does that but the operator."""
    method, path = scope["method"], scope["path"]
    is_of_nodes = _OF_NODES.fullmatch(path) is not None and (method != "GET" or path != "/v1/nodes")
    if role == "node":
        reads = method in ("GET", "HEAD") and (_FOR_NODES.fullmatch(path) or path in (*OPEN_PATHS, "/v1/nodes"))
        if not is_of_nodes and not reads:
            raise Refused(403, "a token with the role node is for agents only: use one with the role submit or admin")
    elif role == "submit" and is_of_nodes:
        raise Refused(403, "this call is for agents: it needs a token with the role node or admin")


async def needs_admin(request: Request) -> None:
    """A dependency of the calls that destroy something."""
    if request.scope["trl_role"] != "admin":
        role = request.scope["trl_role"]
        raise Forbidden(f"this call needs a token with the role admin, yours has the role {role}: ask the operator")


class _Body:
    """The body of one request as it passes: counted, and refused where it is too large."""

    def __init__(self, receive: Receive, send: Send, limit: int, headers: Headers) -> None:
        self._receive, self._send, self._limit = receive, send, limit
        announced = headers.get("content-length", "")
        self._announced = int(announced) if announced.isdigit() else 0
        self._waits = headers.get("expect", "").lower() == "100-continue"
        """Its sender sends nothing before we ask for it."""
        self._count = 0
        self._whole = False
        self.answered = False

    def check_announced(self) -> None:
        if self._announced > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        message = await self._receive()
        self._count += len(message.get("body", b""))
        self._whole = not message.get("more_body")
        if self._count > self._limit:
            raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            await self.drain()
        self.answered = True
        await self._send(message)

    async def drain(self) -> None:
        """Read and drop what is still being sent, within bounds: a connection that is closed on unread data is reset,
        and the sender never sees the answer."""
        if self._whole or (self._waits and not self._count) or self._announced - self._count > _SPARE:
            return
        dropped = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while dropped <= _SPARE and not self._whole:
                    message = await self._receive()
                    dropped += len(message.get("body", b""))
                    self._whole = message["type"] != "http.request" or not message.get("more_body")

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"the body is larger than {self._limit >> 20} MiB: upload rows with PUT /v1/blobs/SHA256, or raise "
            "max_body_mb or max_upload_mb in the service's configuration",
        )


def _check_content_type(scope: Scope, headers: Headers) -> None:
    """A form of any page can be posted here, as every type but JSON. (A blob is PUT, which no form can.)"""
    if scope["method"] != "POST" or _UPLOAD.fullmatch(scope["path"]):
        return
    if not (headers.get("content-length", "0") != "0" or "transfer-encoding" in headers or "content-type" in headers):
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(400, f"the Content-Type is {kind or 'missing'!r}, expected application/json: send JSON")


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
    extra: Mapping[int, Any] = {401: [(b"www-authenticate", b"Bearer")], 413: [(b"connection", b"close")]}
    headers += extra.get(refusal.status_code, [])
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})

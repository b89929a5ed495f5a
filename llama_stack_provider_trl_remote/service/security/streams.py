"""Answers that are sent in parts: event streams and files. Each counts for its caller and for its address.

A stream costs its reader nothing and keeps a connection, so that one token could take all of them. `auth.Gate` refuses
to send an answer in parts that is not counted here.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..http.connections import network_of
from ..http.errors import answer
from .access import CALLER, Caller

COUNTED = "trl_counted_stream"
"""Key of an ASGI scope: set while its answer counts as a stream."""
_RETRY_AFTER = "5"
_NAME = "streams"


class _Owner(NamedTuple):
    kind: str
    name: str


class Streams:
    """Counts the streams that are open.

    Args:
        most: of one token, and of one address.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[_Owner] = Counter()

    def full(self, owners: list[_Owner]) -> _Owner | None:
        """The first of these that may open no more; None: all may."""
        return next((owner for owner in owners if self._open[owner] >= self._most), None)

    def refusal(self, owner: _Owner) -> str:
        return (
            f"the {owner.kind} {owner.name!r} has {self._most} event streams and downloads open, as many as "
            "max_streams allows: close one, then send this again"
        )

    @contextmanager
    def counted(self, owners: list[_Owner]) -> Iterator[None]:
        """Count a stream for its owners, for as long as the block lasts."""
        self._open.update(owners)
        try:
            yield
        finally:
            for owner in owners:
                self._open[owner] -= 1
                if not self._open[owner]:
                    del self._open[owner]


def add_streams(state: object, most: int) -> None:
    """Give an application its counter."""
    setattr(state, _NAME, Streams(most))


def _owners(scope: Scope) -> list[_Owner]:
    """The token and the address for which a stream counts. Behind a proxy on this machine all callers share an address,
    so loopback counts for none; nor does it for a node: many may share the address of one network."""
    caller: Caller = scope[CALLER]
    address = (scope.get("client") or ("",))[0]
    owners = [] if caller.role is None else [_Owner("caller", caller.name)]
    return (
        owners
        if caller.node is not None or _is_loopback(address)
        else [*owners, _Owner("address", network_of(address))]
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(network_of(address)).is_loopback
    except ValueError:  # an IPv6 network, or no address at all
        return address == "::1"


class _CountedAnswer(Response):
    """An answer that may take long."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams: Streams = getattr(scope["app"].state, _NAME)
        owners = _owners(scope)
        if (owner := streams.full(owners)) is not None:
            await answer(429, streams.refusal(owner), {"Retry-After": _RETRY_AFTER})(scope, receive, send)
            return
        scope[COUNTED] = True
        with streams.counted(owners):
            await super().__call__(scope, receive, send)


class CountedStream(_CountedAnswer, StreamingResponse):
    """Parts as they are made."""


class CountedFile(_CountedAnswer, FileResponse):
    """A file by its path."""

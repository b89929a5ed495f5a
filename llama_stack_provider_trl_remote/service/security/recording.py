"""Writes requests to the audit log: the beginning once the body is valid, the result before the answer is sent.

The beginning is written before the handler runs, so a call that took effect is in the log even if the process is killed
before it answers. Where the disk of the log hangs, the call waits for it, and nothing else does.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from llama_stack_provider_trl.errors import StoreError

from .audit import AuditLog, shortened

RECORDED = "trl_recorded"
"""Key of an ASGI scope: set once the audit log has this request, so that no other line repeats it."""
_NAMES = ("job_uuid", "job_id", "dataset_id", "file_id", "name", "checkpoints", "action")
"""Parameters and fields of bodies that identify the subject of a call, and what is done to it where one route does
several things. Nothing else of a body is recorded."""
_MARK = "trl_recorded"
_current: ContextVar[Call | None] = ContextVar("trl_call", default=None)

type Handle = Callable[[Scope, Receive, Send], Awaitable[None]]


class Call:
    """One request as the audit log describes it.

    Args:
        about: caller, role, node, address, method and route.
        forced: whether its result is forced to disk before the answer, as for the actions of admins.
        state_of: the state of a job; may raise StoreError.
    """

    def __init__(
        self,
        audit: AuditLog,
        about: Mapping[str, Any],
        params: Mapping[str, Any],
        forced: bool,
        state_of: Callable[[str], str | None],
    ) -> None:
        self._audit = audit
        self._state_of = state_of
        self._about = about
        self._params = dict(params)
        self._forced = forced
        self._begun: Future[int | None] | None = None
        self._state: str | None = None
        """State of the job that the call concerns, after the call."""
        self.ended = False

    async def begin(self) -> None:
        self._begun = self._audit.submit("begin", **self._about, params=shortened(self._params))
        await asyncio.wrap_future(self._begun)

    def add(self, params: Mapping[str, Any]) -> None:
        self._params |= params

    def note_state(self, job_uuid: str) -> None:
        """Read the state of the job that the call concerns."""
        with suppress(StoreError):  # the call has succeeded: an unreadable database must not turn it into a failure
            self._state = self._state_of(job_uuid)

    async def end(self, status: int | None, error: str | None = None) -> None:
        """Write the result, once. status None: the call was broken off."""
        if self.ended:
            return
        self.ended = True
        result = {"status": status, "error": error, "state": self._state}
        about = {**self._about, "params": shortened(self._params), **result}
        await asyncio.wrap_future(self._audit.submit("end", of=self._begun, **about))
        if self._forced and status is not None:
            await asyncio.to_thread(self._audit.sync)


async def record(call: Call, scope: Scope, receive: Receive, send: Send, handle: Handle) -> None:
    """Handle a request whose call is recorded."""
    scope[RECORDED] = True

    async def recorded(message: Message) -> None:
        if message["type"] == "http.response.start":
            await call.end(message["status"])
        await send(message)

    token = _current.set(call)
    try:
        await handle(scope, receive, recorded)
    except Exception as error:
        status = None if isinstance(error, ClientDisconnect) else getattr(error, "status_code", 500)
        await call.end(status, type(error).__name__)
        raise
    except asyncio.CancelledError:
        await call.end(None, "broken off")
        raise
    finally:
        _current.reset(token)


def recorded[**Parameters, Answer](
    endpoint: Callable[Parameters, Awaitable[Answer]],
) -> Callable[Parameters, Awaitable[Answer]]:
    """Wrap a handler, so that the beginning of its call is written before it runs, with the names in its arguments."""
    if hasattr(endpoint, _MARK):  # FastAPI recreates a route from its handler where a router is included in another
        return endpoint

    @functools.wraps(endpoint)
    async def begun(*arguments: Parameters.args, **values: Parameters.kwargs) -> Answer:
        call = _current.get()
        if call is None:
            return await endpoint(*arguments, **values)
        call.add(_names(values))
        await call.begin()
        answer = await endpoint(*arguments, **values)
        named = _names(values)
        call.add(named)  # a dataset without a name has one now
        if job_uuid := named.get("job_uuid", named.get("job_id")):
            call.note_state(str(job_uuid))
        return answer

    setattr(begun, _MARK, True)
    return begun


def _names(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _NAMES and isinstance(value, str | bool):
            found[name] = value
        elif isinstance(value, BaseModel):
            named = {field: getattr(value, field, None) for field in _NAMES}
            found |= {field: text for field, text in named.items() if isinstance(text, str | bool)}
    return found

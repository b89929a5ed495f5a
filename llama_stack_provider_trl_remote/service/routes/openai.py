"""OpenAI's calls for models that answer: chats, completions, and the list of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, JobNotFound

from ..dependencies import ChatsDep
from ..http.chat_bodies import ChatBody, CompletionBody
from ..http.declared_routes import Routes
from ..http.errors import OPENAI_FORM, NotFound, OpenAIRefused, answered, declared, openai_error
from ..security.access import USERS_JOB, CurrentCaller, GuardedRoute
from ..serving.chats import BegunAnswer
from .files import STREAM, EventStream

_FINAL = frozenset({409, 500, 507})
"""Statuses of answers that another try would not change. OpenAI's SDK repeats these unless a header forbids it."""


class ChatStream(EventStream):
    """The events of an answer, which is closed however the stream ends, also where it may not begin."""

    def __init__(self, begun: BegunAnswer) -> None:
        self._begun = begun
        super().__init__(begun.stream())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._begun.close()


class OpenAIRoute(GuardedRoute):
    """A route whose errors have OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                return await _error(request, error)

        return handled


async def client_left(request: Request) -> None:
    """Return when the client is gone. The body was received."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _error(request: Request, error: Exception) -> Response:
    answer = await answered(request, error)
    detail = json.loads(bytes(answer.body))["detail"]
    headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
    status = 404 if isinstance(error, JobNotFound) else answer.status_code
    if status in _FINAL:
        headers["x-should-retry"] = "false"
    code = error.code if isinstance(error, OpenAIRefused) else None
    return JSONResponse(openai_error(status, detail, _param_of(error), code), status, headers)


def _param_of(error: Exception) -> str | None:
    """The field of the request that an error names; None: no single one."""
    if isinstance(error, OpenAIRefused):
        return error.param
    if isinstance(error, RequestValidationError):
        _, *path = error.errors()[0]["loc"]
        # Between the fields are pydantic's names of what a union may be, such as `constrained-int`.
        return ".".join(str(part) for part in path if str(part).isidentifier() or isinstance(part, int)) or None
    return error.field if isinstance(error, InvalidRequest | NotFound) and not isinstance(error, InvalidRows) else None


router = Routes(OpenAIRoute, prefix="/openai/v1", tags=["chats, in OpenAI's form"])
_ANSWERS: dict[int | str, dict[str, Any]] = {
    **declared(404, form=OPENAI_FORM),
    200: {
        "description": "The answer, or with `stream` its parts as events",
        "content": {"application/json": {}, STREAM: {"schema": {"type": "string"}}},
    },
}


@router.post("/chat/completions", dependencies=[USERS_JOB], responses=_ANSWERS)
async def chat_completions(chats: ChatsDep, body: ChatBody, caller: CurrentCaller, request: Request) -> Response:
    """Answer a chat with the result of a job, a checkpoint, or a base model."""
    return await _answer(chats, body, caller, request)


@router.post("/completions", dependencies=[USERS_JOB], responses=_ANSWERS)
async def completions(chats: ChatsDep, body: CompletionBody, caller: CurrentCaller, request: Request) -> Response:
    """Continue a text with the result of a job, a checkpoint, or a base model."""
    return await _answer(chats, body, caller, request)


async def _answer(
    chats: ChatsDep, body: ChatBody | CompletionBody, caller: CurrentCaller, request: Request
) -> Response:
    answer = await chats.begin(body, caller.name)
    if body.stream:
        return ChatStream(answer)
    found = await answer.whole(client_left(request))
    return Response(status_code=499) if found is None else JSONResponse(found)

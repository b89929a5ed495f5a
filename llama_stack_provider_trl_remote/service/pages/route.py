"""Routes that answer with pages: their errors are pages too, and a request without a login gets the form to log in."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from ..http.errors import answered
from ..security.access import GuardedRoute, Refused
from .rendering import error_page

_PROBLEM = "trl_problem"
"""Key of an ASGI scope: headers of the API's answer to an error that the page shows, such as `Retry-After`."""


class PageRoute(GuardedRoute):
    """A route of the dashboard."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def page(request: Request) -> Response:
            try:
                found = await handle(request)
                found.headers.update(request.scope.get(_PROBLEM, {}))
                return found
            except Exception as error:
                return await _page_of(request, error)

        return page

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().handle(scope, receive, send)
        except Refused as refusal:
            answer = await _page_of(Request(scope, receive, send), refusal)
            await answer(scope, receive, send)


async def problem_of(request: Request, error: Exception) -> tuple[int, str]:
    """Status and sentence with which the API answers an error, for a page that shows it beside its form."""
    answer = await answered(request, error)
    request.scope[_PROBLEM] = _headers_of(answer)
    return answer.status_code, json.loads(bytes(answer.body))["detail"]


async def _page_of(request: Request, error: Exception) -> Response:
    """The answer of the API to an error, as a page."""
    answer = await answered(request, error)
    detail = json.loads(bytes(answer.body))["detail"]
    return error_page(request, answer.status_code, detail, _headers_of(answer))


def _headers_of(answer: Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if not name.startswith("content-")}

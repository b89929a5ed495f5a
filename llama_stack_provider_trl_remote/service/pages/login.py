"""Login and logout: a token is exchanged for a session, checked as every call checks it."""

from __future__ import annotations

import asyncio
import hmac
import re
from typing import Any
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request, Response
from starlette.responses import RedirectResponse

from llama_stack_provider_trl.jobs.store.tokens import digest

from ..dependencies import AuditDep, SettingsDep
from ..http.declared_routes import Routes
from ..security.access import (
    ANYONE,
    LOGIN_FORM,
    LOGOUT_FORM,
    READER_ROLES,
    Caller,
    CurrentCaller,
    Refused,
    one_of,
    sender,
)
from ..security.auth import Authenticator
from ..security.sessions import Sessions, cookie_header
from .rendering import HEADERS, page
from .route import PageRoute

router = Routes(PageRoute, include_in_schema=False)

_MOST_FIELDS = 60
_SHORT = 64 << 10
"""Characters of a form that is read at once; others take longer than the event loop may."""
_OWN_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""A path of this service: no address of another one, no character that a header or a browser reads otherwise."""


@router.get("/login", dependencies=[ANYONE])
async def login_page(request: Request, caller: CurrentCaller) -> Response:
    """The form to log in."""
    if caller.role is not None:
        return see_other("/")
    return page(request, "login.html", back="/", wrong=False)


@router.post("/login", dependencies=[LOGIN_FORM])
async def log_in(request: Request, settings: SettingsDep, audit: AuditDep) -> Response:
    """Open a session for a token. Wrong tokens count as those of any call."""
    authenticator: Authenticator = request.app.state.authenticator
    fields = await form_fields(request)
    if not authenticator.needs_token:
        return see_other("/")
    token = fields.get("token", "").strip()
    caller = authenticator.of_token(request.scope, token)
    caller.require_known()
    caller.take_request()
    if caller.role not in READER_ROLES:
        raise Refused(
            403, f"this token has the role {caller.role}, which has no pages: log in with one of {one_of(READER_ROLES)}"
        )
    sessions: Sessions = request.app.state.sessions
    session_id = await asyncio.to_thread(sessions.open, digest(token))
    await _record(audit, request, "login", caller)
    back = fields.get("back", "/")
    answer = see_other(back if _OWN_PATH.fullmatch(back) else "/")
    answer.headers["Set-Cookie"] = cookie_header(sessions.cookie, session_id, secure=_secure(settings))
    return answer


@router.post("/logout", dependencies=[LOGOUT_FORM])
async def log_out(request: Request, settings: SettingsDep, audit: AuditDep, caller: CurrentCaller) -> Response:
    """End the session."""
    await checked_form(request, caller)
    sessions: Sessions = request.app.state.sessions
    await asyncio.to_thread(sessions.close, caller.session)
    await _record(audit, request, "logout", caller)
    answer = see_other("/login")
    answer.headers["Set-Cookie"] = cookie_header(sessions.cookie, "", secure=_secure(settings))
    return answer


async def form_fields(request: Request) -> dict[str, str]:
    """The fields of a form; of a name that is given twice, the last one. Raises HTTPException: too many."""
    text = (await request.body()).decode("utf-8", "replace")
    try:
        if len(text) <= _SHORT:
            return _parsed(text)
        return await asyncio.to_thread(_parsed, text)
    except ValueError:
        raise HTTPException(400, f"the form has more than {_MOST_FIELDS} fields: send one of the dashboard") from None


def _parsed(text: str) -> dict[str, str]:
    return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS))


async def checked_form(request: Request, caller: Caller) -> dict[str, str]:
    """The fields of a form that a page of this caller's session holds.

    Raises:
        Refused: 403, its form token is missing or another session's.
    """
    fields = await form_fields(request)
    _require_form_token(request, caller, fields.get("form_token", ""))
    return fields


FORM_TOKEN_HEADER = "X-Form-Token"
"""Of a file, whose body has no place for the token."""


def check_sent_file(request: Request, caller: Caller) -> None:
    """Return if a page of this caller's session sends this file. Raises Refused: 403, as `checked_form`."""
    _require_form_token(request, caller, request.headers.get(FORM_TOKEN_HEADER, ""))


def _require_form_token(request: Request, caller: Caller, given: str) -> None:
    expected = request.app.state.sessions.form_token(caller.session)
    if not hmac.compare_digest(given.encode(), expected.encode()):
        raise Refused(403, "this form is not of your login: reload the page it is on, and send it again")


def see_other(path: str) -> Response:
    """The answer to a form: the browser gets this page next."""
    return RedirectResponse(path, 303, HEADERS)


def _secure(settings: SettingsDep) -> bool:
    return settings.tls_cert is not None


async def _record(audit: AuditDep, request: Request, event: str, caller: Caller) -> None:
    about: dict[str, Any] = {**sender(request.scope), "caller": caller.name, "role": caller.role}
    if audit is not None:
        await asyncio.wrap_future(audit.submit(event, **about))

"""Maps errors to HTTP answers: `{"detail": "one sentence"}` for every error."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from llama_stack_provider_trl.errors import (
    InvalidRequest,
    JobConflict,
    JobFailure,
    JobNotFound,
    LimitReached,
    NotServed,
    QuotaReached,
    ServiceUnreachable,
    Shortage,
    StoreError,
    TrlError,
    shortage_behind,
    shortage_of,
    trouble_of,
)
from llama_stack_provider_trl.requests.choices import problem_of
from llama_stack_provider_trl.specs.events import Reason

log = logging.getLogger(__name__)


class NotFound(TrlError, LookupError):
    """Raised when a dataset, a blob, a checkpoint, a file or a log does not exist. -> 404

    Args:
        field: the parameter that names it; None: OpenAI's API does not show it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


class Conflict(TrlError, RuntimeError):
    """Raised when a name is in use. -> 409"""


class TooLarge(TrlError, ValueError):
    """Raised when a body or a dataset is over its limit; names the limit. -> 413"""


class OutOfRange(TrlError, ValueError):
    """Raised when a Range header requests bytes beyond the end of the file. -> 416"""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"the range begins beyond the end of the file, which has {size} bytes")


class Gone(TrlError, LookupError):
    """Raised when a node names a task that is not its own, not current, or was ordered to stop. -> 410"""


class WrongOffset(TrlError, RuntimeError):
    """Raised when the uploaded part does not begin where the file ends. -> 409, with the header Upload-Offset"""

    def __init__(self, sent: int, offset: int) -> None:
        self.offset = offset
        super().__init__(f"offset={sent}: {offset} bytes are here; send what follows them, with offset={offset}")


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    detail: str
    """What was found, what was expected, what to do next."""


OPENAI = "/openai/"
"""Begins the paths whose errors have OpenAI's form."""


OPENAI_FORM = "OpenAIErrorAnswer"
_OPENAI_SCHEMA = {
    "type": "object",
    "title": OPENAI_FORM,
    "description": "The body of every answer that is not a success, in OpenAI's form.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
"""No model: Llama Stack imports this module with the external API."""


_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (InvalidRequest, 400),
    (JobNotFound, 404),
    (NotFound, 404),
    (JobConflict, 409),
    (Conflict, 409),
    (Gone, 410),
    (WrongOffset, 409),
    (TooLarge, 413),
    (OutOfRange, 416),
    (LimitReached, 429),
    (NotServed, 503),
    (QuotaReached, 507),
    (ServiceUnreachable, 502),
)
_LONGEST = 10_000
"""Characters of an answer's sentence."""
_REQUEST_AT_FAULT = {Reason.invalid_request, Reason.invalid_dataset, Reason.invalid_model, Reason.timed_out}
"""Reasons for which a preflight fails and another request can succeed."""
_MEANING = {
    400: "Something in the request cannot be honoured; the sentence names it",
    401: "No token, or a wrong one",
    403: "Wrong Host or Origin header, or the token's role is too low",
    404: "The job, dataset, checkpoint, file, node or token does not exist",
    408: "The body came too slowly: send it again, or a smaller one",
    409: "Its name is taken, or its state forbids the call",
    410: "The task is not this node's, not current, or was ordered to stop: end it",
    413: "Over a limit of size",
    416: "The range begins beyond the end of the file",
    429: "A limit is reached: requests, wrong tokens, waiting jobs, CPU time of checks; wait for Retry-After seconds",
    500: "A bug",
    503: "Busy, out of descriptors, memory or threads, or the database is locked or damaged: wait Retry-After seconds",
    507: "The disk is full or read-only, or the token has stored as many bytes as it may: the sentence has what to do",
}


def declared(*codes: int, form: str = ErrorAnswer.__name__) -> dict[int | str, dict[str, Any]]:
    """Error answers for a route's `responses`; those of every route are included. `describe` adds their schema."""
    # As a `model`, FastAPI would make a validator of each, a thousand in all, at the import and at the first request.
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
    return {
        code: {"content": content, "description": _MEANING[code]}
        for code in sorted({400, 401, 403, 408, 413, 429, 500, 503, 507, *codes})
    }


def describe(document: dict[str, Any]) -> dict[str, Any]:
    """Add to the description of an API what `declared` refers to."""
    schemas = document["components"]["schemas"]
    schemas[ErrorAnswer.__name__] = ErrorAnswer.model_json_schema()
    schemas[OPENAI_FORM] = _OPENAI_SCHEMA
    document["components"]["schemas"] = {name: schemas[name] for name in sorted(schemas)}
    return document


def answer(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    # The sentence may quote the client, and JSON can carry half of a surrogate pair that UTF-8 cannot.
    text = detail.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"detail": text[:_LONGEST]}, status, headers=headers)


def handle_errors(app: FastAPI) -> None:
    """Answer every error of a handler in the same form."""
    for kind, handler in _handlers():
        app.add_exception_handler(kind, handler)


async def answered(request: Request, error: Exception) -> Response:
    """The answer that the API gives to an error of a handler."""
    return await next(handler for kind, handler in _handlers() if isinstance(error, kind))(request, error)


async def answer_to(request: Request, error: Exception) -> Response | None:
    """The answer to an error of ours, or to an invalid body; None: the error is neither."""
    if isinstance(error, RequestValidationError):
        return await _invalid(request, error)
    # A provider's error wraps the error of ours in a form that Llama Stack can show.
    cause = error if isinstance(error, TrlError) else error.__cause__
    return await _ours(request, cause) if isinstance(cause, TrlError) else None


def _handlers() -> tuple[tuple[type[Exception], Callable[[Request, Exception], Awaitable[Response]]], ...]:
    """Kinds of errors, each before those that it is one of."""
    return (
        (TrlError, _ours),
        (RequestValidationError, _invalid),
        (HTTPException, _http),
        (ClientDisconnect, _disconnected),
        (UnicodeEncodeError, _not_text),
        *((kind, _other) for kind in (OSError, sqlite3.Error, MemoryError, RuntimeError, Exception)),
    )


async def _ours(request: Request, error: Exception) -> Response:
    # Of other errors the direct cause only: what is further away may be another's failure, which was dealt with.
    if isinstance(error, StoreError):
        return _short(request, error, shortage_behind(error))
    if isinstance(error.__cause__, StoreError | OSError) and (shortage := shortage_of(error.__cause__)) is not None:
        return _short(request, error, shortage)
    if isinstance(error, JobFailure) and error.reason in _REQUEST_AT_FAULT:
        return answer(400, error.message)
    of_its_own = getattr(error, "status_code", 500)
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), of_its_own)
    if status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error)
    headers = {"Content-Range": f"bytes */{error.size}"} if isinstance(error, OutOfRange) else None
    if isinstance(error, LimitReached | NotServed):
        headers = {"Retry-After": str(error.retry_after)}
    if isinstance(error, WrongOffset):
        headers = {"Upload-Offset": str(error.offset)}
    return answer(status, str(error), headers)


def _short(request: Request, error: Exception, shortage: Shortage) -> Response:
    """The answer where storage cannot be used. Every route gives it: each reads or writes something."""
    known = isinstance(error, TrlError | MemoryError) or shortage_of(error) is not None
    log.warning("%s %s: %s", request.method, request.url.path, error, exc_info=None if known else error)
    return answer(shortage.status, shortage.described(error), shortage.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    body = getattr(request.scope.get("route"), "body_field", None)  # None of a form
    return answer(400, sentence(_of_every_kind(error.errors()), body and body.field_info.annotation))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _wrong_method(request)
    # An unknown path keeps the framework's bare "Not Found": clients conclude from it that they call another server.
    return answer(error.status_code, str(error.detail), error.headers)


async def _disconnected(request: Request, error: Exception) -> Response:
    """The answer to a body that broke off: no fault of the service, and the client is gone."""
    return answer(400, "the connection was closed before the whole body was received: send it again")


async def _not_text(request: Request, error: Exception) -> Response:
    """The answer to half of a surrogate pair (`"\\ud800"`): JSON can carry it, a database or a path cannot."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end][:10]
    return answer(400, f"the request holds {found!r}, half of a surrogate pair: send whole characters")


def _wrong_method(request: Request) -> Response:
    """The answer to a wrong method, with all methods of the path: the framework names those of one route only."""
    path = request.scope["path"]
    has = sorted({name for pattern, names in request.app.state.methods if pattern.match(path) for name in names})
    allowed = ", ".join(has) or "GET, HEAD"  # of the documentation
    detail = f"{path} has no {request.method}, only {allowed}: GET /docs shows every call"
    return answer(405, detail, {"Allow": allowed})


async def _other(request: Request, error: Exception) -> Response:
    """The answer to an error that is none of ours."""
    if (trouble := trouble_of(error)) is not None:
        return _short(request, error, trouble)
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer(500, "this is a bug of the service: report it with the service's log")


_KIND = re.compile(r"constrained-|literal\[")
"""What pydantic puts behind the name of a field that takes values of several kinds, such as `constrained-int`."""


def _of_every_kind(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first error; of a field that takes values of several kinds, with what each of them expects."""
    *path, kind = errors[0]["loc"]
    if not _KIND.match(str(kind)) or errors[0]["type"] == "extra_forbidden":
        return errors[0]
    first, *others = (str(error["msg"]) for error in errors if list(error["loc"][:-1]) == path)
    expected = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    return {**errors[0], "loc": tuple(path), "msg": expected}


def sentence(found: Mapping[str, Any], body: Any = None) -> str:
    """One validation error as a sentence that names the field, its value and what was expected.

    Args:
        body: the model of the body; None: not known.
    """
    source, *path = found["loc"]
    if path[:1] == ["source"]:  # pydantic names the kind of source as well: source.rows.rows.1
        del path[1:2]
    field = ".".join(map(str, path)) or f"the {source}"
    if found["type"] == "json_invalid":
        return f"the body is not JSON: {found['ctx']['error']} at character {path[-1] if path else 0}"
    if found["type"] == "missing":
        where = "body" if source == "body" else f"{source} parameters"
        if not path:
            return "the body is missing: send a JSON object with Content-Type application/json"
        return f"{field} is missing from the {where}: it is required"
    problem = problem_of({**found, "loc": found["loc"][1:] or (field,)}, body if source == "body" else None)
    return str(InvalidRequest(field, found["input"], problem))


class OpenAIRefused(TrlError, ValueError):
    """Raised when a call of OpenAI's API cannot be honoured.

    Args:
        param: the field of the request; None: no single one.
        code: the word by which programs tell errors apart.
    """

    def __init__(self, message: str, param: str | None, code: str, status_code: int = 400) -> None:
        self.param, self.code, self.status_code = param, code, status_code
        super().__init__(message)


_CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    429: "rate_limit_exceeded",
    503: "overloaded",
    507: "insufficient_storage",
}


def openai_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = code or _CODES.get(status, "invalid_value" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def raw_answer(status: int, detail: str, path: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error for code below the framework.

    Args:
        path: of the request, which decides the form.
    """
    body = json.dumps(openai_error(status, detail) if path.startswith(OPENAI) else {"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return headers, body

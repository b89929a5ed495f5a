"""The routes of tokens, the audit log, and the logs of the service and its agents, for admins."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Path, Query, Response

from llama_stack_provider_trl.jobs.store.tokens import TokenLimits, TokenRecord

from ...wire import NAME
from ..dependencies import AuditLogDep, LogsDep, SettingsDep, TokensDep
from ..http.bodies import AuditLine, AuditPage, CreatedToken, CreateToken, ListTokensResponse, TokenRow
from ..http.declared_routes import Routes
from ..http.errors import declared
from ..http.places import MOST, After, Limit, ListPlace, page_of
from ..security.access import ADMINS, CurrentCaller, GuardedRoute
from ..views.logs import MOST_BYTES
from .files import TEXT
from .jobs import as_json

router = Routes(GuardedRoute, prefix="/tokens", tags=["tokens and audit"])
audit = Routes(GuardedRoute, prefix="/audit", tags=["tokens and audit"])
logs = Routes(GuardedRoute, prefix="/logs", tags=["tokens and audit"])

Name = Annotated[str, Path(pattern=NAME, description="The token's name")]


@router.post("", dependencies=[ADMINS], status_code=201, response_model=CreatedToken, responses=declared(409))
async def create_token(tokens: TokensDep, settings: SettingsDep, body: CreateToken, caller: CurrentCaller) -> Response:
    """Create a token. Only this answer shows it."""
    limits = TokenLimits(
        body.max_queued_jobs, body.requests_per_second, None if body.priorities is None else tuple(body.priorities)
    )
    created = (body.name, body.role, caller.name, body.expires_in, limits)
    token, record = await asyncio.to_thread(tokens.create, *created)
    answer = CreatedToken(token=token, required=bool(settings.credentials), **_row(record).model_dump())
    response = as_json(answer)
    response.status_code = 201
    response.headers["Cache-Control"] = "no-store"
    return response


@router.get("", dependencies=[ADMINS], response_model=ListTokensResponse, responses=declared())
async def list_tokens(tokens: TokensDep, settings: SettingsDep, limit: Limit = MOST, after: After = None) -> Response:
    """Tokens without the tokens themselves: those of the configuration first, others as they were created."""
    rows = [
        TokenRow(name=entry.name, role=entry.role, source=entry.setting, **_limits(entry.limits))
        for entry in settings.configured_tokens
    ]
    rows += map(_row, tokens.all())
    page, following = page_of(rows, _place, limit, after)
    return as_json(ListTokensResponse(data=[*page], next=following))


@router.delete("/{name}", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def revoke_token(tokens: TokensDep, name: Name) -> Response:
    """Refuse a token from now on, on running answers too."""
    await asyncio.to_thread(tokens.revoke, name)
    return Response(status_code=204)


@audit.get("", dependencies=[ADMINS], response_model=AuditPage, responses=declared())
async def read_audit(
    entries: AuditLogDep,
    after: Annotated[int, Query(ge=0, le=2**53, description="`next` of the page before")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Lines per page")] = 100,
    caller: Annotated[str | None, Query(max_length=64, description="Only of this token")] = None,
    route: Annotated[str | None, Query(max_length=200, description="Only of this path template")] = None,
) -> Response:
    """The audit log, oldest line first."""
    lines, last = await asyncio.to_thread(entries.page, after, limit, caller, route)
    page = AuditPage(data=[AuditLine.model_validate(line) for line in lines], next=last, last=entries.last)
    return Response(page.model_dump_json(exclude_none=True), media_type="application/json")


@logs.get("", dependencies=[ADMINS], response_class=Response, responses={**declared(404), **TEXT})
async def read_logs(
    written: LogsDep,
    node: Annotated[str | None, Query(pattern=NAME, description="Whose agent; left out: the service")] = None,
    lines: Annotated[int, Query(alias="tail", ge=1, le=100_000, description="Lines from the end")] = 200,
    size: Annotated[int, Query(ge=1, le=MOST_BYTES, description="Bytes at most")] = MOST_BYTES,
) -> Response:
    """The end of the log of the service, or of a node's agent as far as that has sent it."""
    return Response(await asyncio.to_thread(written.read, node, lines, size), media_type="text/plain")


def _place(row: TokenRow) -> ListPlace:
    return ListPlace(row.created_at.timestamp() if row.created_at else 0.0, row.name)


def _row(record: TokenRecord) -> TokenRow:
    return TokenRow(
        name=record.name,
        role=record.role,
        source="created",
        created_at=_utc(record.created_at),
        created_by=record.created_by,
        expires_at=None if record.expires_at is None else _utc(record.expires_at),
        last_used_at=None if record.last_used_at is None else _utc(record.last_used_at),
        **_limits(record.limits),
    )


def _limits(limits: TokenLimits) -> dict[str, Any]:
    return {
        "max_queued_jobs": limits.max_queued_jobs,
        "requests_per_second": limits.requests_per_second,
        "priorities": None if limits.priorities is None else list(limits.priorities),
    }


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)

"""The page of jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator

from llama_stack_provider_trl.jobs.states import TERMINAL, JobState

from ..context import Stored
from ..security.access import USERS
from ..views.queue import queue_page
from .rendering import page
from .route import PageRoute

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_PER_PAGE = 100


@router.get("/", dependencies=[USERS])
async def jobs_page(
    request: Request,
    service: Stored,
    state: Annotated[JobState | None, BeforeValidator(lambda text: text or None), Query()] = None,
    search: Annotated[str, Query(max_length=200)] = "",
    number: Annotated[int, Query(alias="page", ge=1, le=10**6)] = 1,
) -> Response:
    """Jobs in the order in which they run, 100 to a page."""
    offset = (number - 1) * _PER_PAGE
    found = await asyncio.to_thread(queue_page, service.store, state, search, _PER_PAGE, offset)
    return page(
        request,
        "jobs.html",
        jobs=found.data,
        counts=found.counts,
        matching=found.matching,
        states=list(JobState),
        state=state,
        search=search,
        number=number,
        pages=max(1, -(-found.matching // _PER_PAGE)),
        first=offset + 1,
        followed=[job.job_uuid for job in found.data if job.state not in TERMINAL],
    )

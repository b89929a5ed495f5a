"""The page of jobs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState

from ..dependencies import StoredJobsDep
from ..http.bodies import QueueRow
from ..security.access import USERS
from .rendering import page
from .route import PageRoute

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_PER_PAGE = 100


@router.get("/", dependencies=[USERS])
async def jobs_page(
    request: Request,
    jobs: StoredJobsDep,
    state: Annotated[JobState | None, BeforeValidator(lambda text: text or None), Query()] = None,
    search: Annotated[str, Query(max_length=200)] = "",
    number: Annotated[int, Query(alias="page", ge=1, le=10**6)] = 1,
) -> Response:
    """Jobs in the order in which they run, 100 to a page."""
    offset = (number - 1) * _PER_PAGE
    found = await asyncio.to_thread(jobs.queue, state, search, _PER_PAGE, offset)
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
        starts={job.job_uuid: text for job in found.data if (text := start_text(job, datetime.now(UTC)))},
        followed=[job.job_uuid for job in found.data if job.state not in TERMINAL],
    )


def start_text(job: QueueRow, now: datetime) -> str:
    """When a waiting job starts, or why that is not known; empty: it does not wait."""
    if job.unpredicted:
        return f"start not known: {job.unpredicted}"
    if job.predicted_start is None:
        return ""
    seconds = (job.predicted_start - now).total_seconds()
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"starts in about {seconds / length:.0f} {unit}"
    return "starts in about a minute" if seconds > 20 else "starts in a moment"

"""The page of a search: its trials as a table and as lines, and what each searched field has to do with the result."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path, Query, Request, Response

from ..dependencies import StoredJobsDep
from ..http.declared_routes import Routes
from ..http.errors import NotFound
from ..security.access import USERS
from .job_view import path_of
from .rendering import page
from .route import PageRoute
from .trial_view import LEAST_TRIALS, MOST_COMPARED, shown

router = Routes(PageRoute, prefix="/jobs/{job_uuid}", include_in_schema=False)


@router.get("/trials", dependencies=[USERS])
async def trials_page(
    request: Request,
    jobs: StoredJobsDep,
    job_uuid: Annotated[str, Path(description="The job's name")],
    sort: Annotated[str, Query(max_length=300)] = "",
) -> Response:
    """The trials of a search."""
    status = await asyncio.to_thread(jobs.status, job_uuid)
    search = status.resources_allocated.get("search")
    if not search:
        raise NotFound(f"job {job_uuid!r} is no search: its page has its curves and its result")
    return page(
        request,
        "trials.html",
        job_uuid=job_uuid,
        path=path_of(job_uuid),
        state=status.resources_allocated["state"],
        search=search,
        shown=await asyncio.to_thread(shown, job_uuid, search, sort),
        least=LEAST_TRIALS,
        most=MOST_COMPARED,
    )

"""The page of jobs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import BeforeValidator

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.store import Store

from ..dependencies import StoreDep, StoredJobsDep
from ..http.bodies import QueueResponse, QueueRow
from ..http.declared_routes import Routes
from ..jobs.stored_jobs import StoredJobs
from ..security.access import READERS
from ..views.events import read_states
from ..views.queue import Sort
from . import list_view
from .rendering import page
from .route import PageRoute

router = Routes(PageRoute, include_in_schema=False)

_PER_PAGE = 100
_MOST_FOLLOWED = 100
"""Jobs of one stream of events."""


@router.get("/", dependencies=[READERS])
async def jobs_page(
    request: Request,
    jobs: StoredJobsDep,
    store: StoreDep,
    state: Annotated[JobState | None, BeforeValidator(lambda text: text or None), Query()] = None,
    search: Annotated[str, Query(max_length=200)] = "",
    owner: Annotated[str, Query(max_length=200)] = "",
    sort: Annotated[Sort, Query()] = "",
    opened: Annotated[list[str] | None, Query(alias="open", max_length=50)] = None,
    flat: Annotated[str, Query(max_length=10)] = "",
    number: Annotated[int, Query(alias="page", ge=1, le=10**6)] = 1,
) -> Response:
    """Jobs in the order in which they run, or by a column, 100 to a page."""
    query = list_view.Query(state, search.strip(), owner, sort, tuple(opened or ()), bool(flat), number)
    # In a thread with its rendering: a page with all of its families open has 1,100 rows.
    return await asyncio.to_thread(_page, request, jobs, store, query)


def _page(request: Request, jobs: StoredJobs, store: Store, query: list_view.Query) -> Response:
    return page(request, "jobs.html", **_values(jobs, store, query))


def _values(jobs: StoredJobs, store: Store, query: list_view.Query) -> dict[str, Any]:
    """What the template shows. Only the jobs of this page are computed."""
    now = datetime.now(UTC)
    with store.snapshot():  # the stream of events begins exactly behind what the rows show
        found, members, sparks = _read(jobs, query)
        shown = list_view.rows_of(found.data, members, query.opened)
        every = [row.job for row in shown]
        followed = [job.job_uuid for job in every if JobState(job.state or "") not in TERMINAL][:_MOST_FOLLOWED]
        _, cursors = read_states(store, followed)
    return {
        "query": query,
        "rows": shown,
        "columns": list_view.COLUMNS,
        "counts": found.counts,
        "total": sum(found.counts.values()),
        "matching": found.matching,
        "pages": max(1, -(-found.matching // _PER_PAGE)),
        "starts": {job.job_uuid: text for job in every if (text := list_view.start_text(job, now))},
        "sparks": {name: points for name, values in sparks.items() if (points := list_view.spark(values))},
        "seconds": {job.job_uuid: list_view.seconds_of(job, now) for job in every},
        "followed": [(name, str(cursor)) for name, cursor in zip(followed, cursors, strict=True)],
        "now": now,
        "view": list_view,
    }


def _read(jobs: StoredJobs, query: list_view.Query) -> tuple[QueueResponse, list[QueueRow], Any]:
    """The page of the queue, the jobs that stand under those on it, and the losses of all of them."""
    offset = (query.number - 1) * _PER_PAGE
    arguments = (query.state, query.search, _PER_PAGE, offset, query.owner or None, query.sort, query.folded)
    found = jobs.queue(*arguments)
    roots = [job.job_uuid for job in found.data if job.members]
    members = jobs.members(roots, [name for name in roots if name in query.opened], query.sort)
    names = [job.job_uuid for job in (*found.data, *members)]
    return found, members, jobs.sparks(names, list_view.SPARK_POINTS)

"""What a page that shows jobs while they run reads: the events of several jobs in one stream, curves, samples."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query, Response

from llama_stack_provider_trl.errors import InvalidRequest

from ..dependencies import FeedsDep, SeriesDep, StoppingDep, StoreDep
from ..http.bodies import JobStateRow, JobStatesResponse, SamplesResponse, SeriesResponse
from ..http.declared_routes import Routes
from ..http.errors import declared
from ..security.access import READERS, GuardedRoute
from ..views.events import Cursor, read_page, read_states
from ..views.samples import list_samples
from ..views.series import LAST_STEP
from .files import STREAM, Accept, EventStream, LastEventId
from .jobs import JobUuid, as_json

router = Routes(GuardedRoute, prefix="/post-training", tags=["what a job leaves behind"])

_MOST_JOBS = 100
_MESSAGE = (
    "`data` of an event is {job, event} and what follows from the event: `point` {kind, metrics by the names of "
    "`series`}, `superseded_after` (points beyond this step no longer count), `eta_seconds` (as in the status)"
)
Step = Annotated[int | None, Query(ge=0, le=LAST_STEP)]


@router.get(
    "/events",
    dependencies=[READERS],
    response_model=JobStatesResponse,
    responses={
        **declared(404),
        200: {
            "content": {STREAM: {"schema": {"type": "string", "description": _MESSAGE}}},
            "description": "The states, or a stream",
        },
    },
)
async def events_of_jobs(
    store: StoreDep,
    feeds: FeedsDep,
    stopping: StoppingDep,
    job: Annotated[list[str], Query(min_length=1, max_length=_MOST_JOBS, description="Names of jobs, each once")],
    after: Annotated[str | None, Query(description="`next` of an answer, or an event's id")] = None,
    accept: Accept = None,
    last_event_id: LastEventId = None,
) -> Response:
    """States of several jobs. With `Accept: text/event-stream` a stream of their events and states, which ends with
    `event: end`."""
    if len(set(job)) < len(job):
        raise InvalidRequest("job", job, "expected each job once")
    streams = STREAM in (accept or "")
    field, text = ("Last-Event-ID", last_event_id) if streams and last_event_id else ("after", after)
    begin = Cursor.parse_all(text, len(job), field)
    states, ends = await asyncio.to_thread(read_states, store, job)
    if streams:
        # An invalid cursor must be refused before the stream begins.
        for name, cursor in zip(job, begin, strict=True):
            await asyncio.to_thread(read_page, store, name, cursor, 1)
        return EventStream(feeds.streams(job, begin, stopping))
    rows = [JobStateRow(job_uuid=name, state=state) for name, state in zip(job, states, strict=True)]
    return as_json(JobStatesResponse(data=rows, next="~".join(map(str, ends))))


@router.get("/jobs/{job_uuid}/series", dependencies=[READERS], response_model=SeriesResponse, responses=declared(404))
async def job_series(
    series: SeriesDep,
    job_uuid: JobUuid,
    metric: Annotated[list[str] | None, Query(max_length=256, description="Names of metrics; left out: all")] = None,
    points: Annotated[int, Query(ge=2, le=20_000, description="Points of a curve at most")] = 1000,
    begin: Step = None,
    end: Step = None,
) -> Response:
    """Metric points as curves. Of more points than requested, the lowest and highest of each part of the range."""
    wanted = (metric or (), points, begin or 0, LAST_STEP if end is None else end)
    return Response(await asyncio.to_thread(series.read, job_uuid, *wanted), media_type="application/json")


@router.get("/jobs/{job_uuid}/samples", dependencies=[READERS], response_model=SamplesResponse, responses=declared(404))
async def job_samples(
    store: StoreDep,
    job_uuid: JobUuid,
    limit: Annotated[int, Query(ge=1, le=100, description="Sets of answers per page")] = 20,
    offset: Annotated[int, Query(ge=0, le=10**6, description="Sets before this page")] = 0,
) -> Response:
    """The model's answers to the prompts of the provider option `samples`: before, at each checkpoint, after."""
    return as_json(await asyncio.to_thread(list_samples, store, job_uuid, limit, offset))

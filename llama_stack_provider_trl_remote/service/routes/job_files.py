"""What a job leaves behind: events, logs, metrics, checkpoints and their files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import Path, Query, Response

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.stack.responses import checkpoint_response
from llama_stack_provider_trl.system.ownership import Ownership

from ..dependencies import DigestsDep, FeedsDep, SettingsDep, StoppingDep, StoreDep
from ..http.bodies import CheckpointFiles, EventLine, EventsResponse, ListCheckpointsResponse, MetricsResponse, Point
from ..http.declared_routes import Routes
from ..http.errors import declared
from ..security.access import READERS, TASK_JOB, GuardedRoute
from ..views.answers import find_answers
from ..views.checkpoints import Digests, find_file, list_files
from ..views.events import Cursor, parsed, read_page
from ..views.logs import MOST_BYTES, read_log
from .files import (
    LINES,
    STREAM,
    TEXT,
    Accept,
    EventStream,
    IfRange,
    LastEventId,
    RangeHeader,
    file_answers,
    file_response,
)
from .jobs import JobUuid, as_json

router = Routes(GuardedRoute, prefix="/post-training/jobs/{job_uuid}", tags=["what a job leaves behind"])

_KINDS = 10
"""At least so many points a page has: more than a step."""


@router.get(
    "/events",
    dependencies=[READERS],
    response_model=EventsResponse,
    responses={
        **declared(404),
        200: {"content": {STREAM: {"schema": {"type": "string"}}}, "description": "A page, or a stream"},
    },
)
async def job_events(
    store: StoreDep,
    feeds: FeedsDep,
    stopping: StoppingDep,
    job_uuid: JobUuid,
    after: Annotated[str | None, Query(description="`next` of the page before, or an event's id")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Events per page")] = 1000,
    accept: Accept = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Events of all attempts, in order. With `Accept: text/event-stream` as a stream that ends with `event: end`."""
    streams = STREAM in (accept or "")
    begin = Cursor.parse(last_event_id, "Last-Event-ID") if streams and last_event_id else Cursor.parse(after, "after")
    # For a stream too: an invalid request must be refused before the stream begins.
    page = await asyncio.to_thread(read_page, store, job_uuid, begin, 1 if streams else limit)
    if streams:
        return EventStream(feeds.stream(job_uuid, begin, stopping))
    data = [EventLine(id=str(line.cursor), event=parsed(line)) for line in page.lines]
    return as_json(EventsResponse(data=data, next=str(page.next)))


@router.get("/logs", dependencies=[READERS], response_class=Response, responses={**declared(404), **TEXT})
async def job_logs(
    store: StoreDep,
    job_uuid: JobUuid,
    rank: Annotated[str, Query(pattern=r"^(\d{1,4}|launcher)$", description="A rank's number, or launcher")] = "0",
    lines: Annotated[int, Query(alias="tail", ge=1, le=100_000, description="Lines from the end")] = 200,
    attempt: Annotated[int | None, Query(ge=1, le=10**6, description="Left out: the current one")] = None,
    size: Annotated[int, Query(ge=1, le=MOST_BYTES, description="Bytes at most")] = MOST_BYTES,
) -> Response:
    """What a rank of a job printed."""
    text = await asyncio.to_thread(read_log, store, job_uuid, rank, lines, attempt, size)
    return Response(text, media_type="text/plain")


@router.get("/metrics", dependencies=[READERS], response_model=MetricsResponse, responses=declared(404))
async def job_metrics(
    store: StoreDep,
    job_uuid: JobUuid,
    after: Annotated[int, Query(ge=-1, le=2**53, description="Points beyond this step only")] = -1,
    limit: Annotated[int, Query(ge=_KINDS, le=10_000, description="Points per page; of a step, all or none")] = 10_000,
) -> Response:
    """Metric points by step; where a step was done again after a failure, the last one counts."""
    points = await asyncio.to_thread(store.points, job_uuid, after, limit + 1)
    following = None
    if len(points) > limit:
        points = [point for point in points if point.step < points[-1].step]
        following = points[-1].step
    data = [
        Point(kind=point.kind, step=point.step, epoch=point.epoch, time=point.time, metrics=dict(point.metrics))
        for point in points
    ]
    return as_json(MetricsResponse(data=data, next=following))


@router.get("/checkpoints", dependencies=[TASK_JOB], response_model=ListCheckpointsResponse, responses=declared(404))
async def job_checkpoints(store: StoreDep, job_uuid: JobUuid) -> Response:
    """Every complete checkpoint."""
    job, checkpoints = store.get(job_uuid), store.checkpoints(job_uuid)
    return as_json(ListCheckpointsResponse(data=[checkpoint_response(job, checkpoint) for checkpoint in checkpoints]))


@router.get(
    "/answers",
    dependencies=[READERS],
    response_class=Response,
    responses={**declared(404, 409, 416), **file_answers(LINES, "One JSON object per answer, in their order")},
)
async def job_answers(
    store: StoreDep,
    digests: DigestsDep,
    settings: SettingsDep,
    job_uuid: JobUuid,
    wanted: RangeHeader = None,
    if_range: IfRange = None,
) -> Response:
    """The answers of a job that has ended, with what each passes; of one that failed or was cancelled, those that it
    has. Its ETag is the sha256."""
    find = partial(find_answers, Ownership(settings.data_dir))
    found, size, sha256 = await _with_digests(store, digests, find, job_uuid)
    return file_response(found, size, sha256, wanted, if_range, "application/x-ndjson")


# Before the next one, whose identifier may hold slashes as well.
@router.get(
    "/checkpoints/{identifier:path}/files/{path:path}",
    dependencies=[TASK_JOB],
    response_class=Response,
    responses={**declared(404, 416), **file_answers()},
)
async def checkpoint_file(
    store: StoreDep,
    digests: DigestsDep,
    job_uuid: JobUuid,
    identifier: Annotated[str, Path(description="Its identifier, or the name of its directory, such as final")],
    path: Annotated[str, Path(description="As the checkpoint's list of files names it")],
    wanted: RangeHeader = None,
    if_range: IfRange = None,
) -> Response:
    """A file of a checkpoint; its ETag is its sha256."""
    found, size, sha256 = await _with_digests(store, digests, find_file, job_uuid, identifier, path)
    return file_response(found, size, sha256, wanted, if_range)


@router.get(
    "/checkpoints/{identifier:path}", dependencies=[TASK_JOB], response_model=CheckpointFiles, responses=declared(404)
)
async def checkpoint_files(
    store: StoreDep,
    digests: DigestsDep,
    job_uuid: JobUuid,
    identifier: Annotated[str, Path(description="Its identifier, or the name of its directory, such as final")],
) -> Response:
    """The files of a checkpoint with size and sha256 (computed at the first call)."""
    return as_json(await _with_digests(store, digests, list_files, job_uuid, identifier))


async def _with_digests[Found](store: Store, digests: Digests, find: Callable[..., Found], *arguments: str) -> Found:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(digests.threads, find, store, digests, *arguments)

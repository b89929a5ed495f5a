"""The routes of post-training: Llama Stack's six calls in both path styles, and pause, resume, delete."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Body, Path, Query, Response
from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.states import JobState, shown
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.choices import nearest_choice
from llama_stack_provider_trl.requests.work import KINDS, WorkRequest
from llama_stack_provider_trl.stack.responses import (
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobStatusResponse,
    artifacts_response,
)

from ..dependencies import JobChecksDep, PipelinesDep, StoreDep, StoredJobsDep, SubmissionsDep
from ..http.bodies import (
    WORK_BODIES,
    JobName,
    JobRow,
    ListJobsResponse,
    PipelineBody,
    PipelineResponse,
    PreferenceOptimizeBody,
    PreflightBody,
    PreflightResponse,
    PreviewBody,
    PreviewResponse,
    QueueResponse,
    SupervisedFineTuneBody,
    WorkBody,
)
from ..http.declared_routes import Routes
from ..http.errors import declared
from ..jobs.stored_jobs import StoredJobs
from ..security.access import ADMINS, READERS, USERS, USERS_JOB, CurrentCaller, GuardedRoute
from ..views.queue import Sort, job_row

router = Routes(GuardedRoute, prefix="/post-training", tags=["post-training"])

JobUuid = Annotated[str, Path(description="The job's name")]
JobQuery = Annotated[str, Query(description="The job's name")]
WithConfig = Annotated[bool, Query(description="Add `effective_config`, which is long and rarely changes")]


_MOST_FULL = 1000
"""Jobs of a page that shows more than names: 10,000 of them took a second of the event loop's processor."""
NULL: dict[int | str, dict[str, Any]] = {
    200: {"description": "Recorded", "content": {"application/json": {"schema": {"type": "null"}}}}
}


@router.post(
    "/supervised-fine-tune", dependencies=[USERS_JOB], response_model=PostTrainingJob, responses=declared(409, 507)
)
async def supervised_fine_tune(
    submissions: SubmissionsDep, body: SupervisedFineTuneBody, caller: CurrentCaller
) -> PostTrainingJob:
    """Queue a supervised fine-tuning job. The same body again is the same job."""
    await submissions.submit(body, caller)
    return PostTrainingJob(job_uuid=body.job_uuid)


@router.post(
    "/preference-optimize", dependencies=[USERS_JOB], response_model=PostTrainingJob, responses=declared(409, 507)
)
async def preference_optimize(
    submissions: SubmissionsDep, body: PreferenceOptimizeBody, caller: CurrentCaller
) -> PostTrainingJob:
    """Queue a job of DPO, or of the method that `algorithm_config.type` names. The same body again is the same job."""
    await submissions.submit(body, caller)
    return PostTrainingJob(job_uuid=body.job_uuid)


def _add_call_of(kind: type[WorkRequest]) -> None:
    """Add the call that queues the jobs of a kind."""

    async def call(submissions: SubmissionsDep, body: WorkBody, caller: CurrentCaller) -> PostTrainingJob:
        await submissions.submit(body, caller)
        return PostTrainingJob(job_uuid=body.job_uuid)

    call.__annotations__["body"] = WORK_BODIES[kind.kind]
    call.__name__ = kind.kind
    what = (kind.__doc__ or "").removeprefix("A ")
    call.__doc__ = f"Queue a {what} The same body again is the same job."
    router.post(
        f"/{kind.kind}", dependencies=[USERS_JOB], response_model=PostTrainingJob, responses=declared(409, 507)
    )(call)


for _kind in KINDS.values():
    _add_call_of(_kind)


@router.post("/pipelines", dependencies=[USERS_JOB], response_model=PipelineResponse, responses=declared(409, 507))
async def run_pipeline(pipelines: PipelinesDep, body: PipelineBody, caller: CurrentCaller) -> Response:
    """Queue the jobs of a pipeline that are not here, all or none of them. The same body again is the same jobs."""
    return as_json(await pipelines.submit(body, caller))


@router.post("/preflight", dependencies=[USERS_JOB], response_model=PreflightResponse, responses=declared(507))
async def preflight(checks: JobChecksDep, body: PreflightBody) -> Response:
    """Report what a job with this body would do and whether it fits. Nothing is queued, no device is used."""
    return as_json(await checks.preflight(body))


@router.post("/preview", dependencies=[USERS_JOB], response_model=PreviewResponse, responses=declared(507))
async def preview(checks: JobChecksDep, body: PreviewBody) -> Response:
    """Show rows of a job's dataset as they would be trained: tokens, loss, what is cut or dropped and why."""
    return as_json(await checks.preview(body))


@router.get("/jobs", dependencies=[READERS], response_model=ListJobsResponse, responses=declared(404))
async def list_jobs(
    store: StoreDep,
    status: Annotated[str | None, Query(description="A status or a state, such as in_progress or paused")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Jobs per page; with `full` 1000 at most")] = 10_000,
    after: Annotated[str | None, Query(description="`next` of the page before")] = None,
    full: Annotated[bool, Query(description="List state and progress of each job")] = False,
) -> Response:
    """Jobs, oldest first."""
    states = None if status is None else _states_named(status)
    most = min(limit, _MOST_FULL) if full else limit
    return Response(await asyncio.to_thread(_page, store, states, most, after, full), media_type="application/json")


@router.get("/queue", dependencies=[READERS], response_model=QueueResponse, responses=declared())
async def read_queue(
    jobs: StoredJobsDep,
    state: Annotated[JobState | None, Query(description="Only jobs in this state")] = None,
    search: Annotated[
        str | None, Query(max_length=200, description="Part of the names of jobs, of their models or of their metadata")
    ] = None,
    owner: Annotated[str | None, Query(max_length=200, description="Name of the token that submitted them")] = None,
    sort: Annotated[Sort, Query(description="A column, with a minus the largest first; or match")] = "",
    folded: Annotated[bool, Query(description="Of a search and of a chain only the first job")] = False,
    limit: Annotated[int, Query(ge=1, le=1000, description="Jobs per page")] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9, description="Jobs before this page")] = 0,
) -> Response:
    """Jobs in the order in which they run: running, waiting, paused, then those that have ended, the last one first; or
    sorted by a column, those without a value last. Waiting ones have their predicted start."""
    return as_json(await asyncio.to_thread(jobs.queue, state, search, limit, offset, owner, sort, folded))


@router.get(
    "/job/status", dependencies=[READERS], response_model=PostTrainingJobStatusResponse, responses=declared(404)
)
async def get_job_status(jobs: StoredJobsDep, job_uuid: JobQuery, config: WithConfig = False) -> Response:
    """The status of a job."""
    return as_json(jobs.status(job_uuid, config))


@router.get(
    "/jobs/{job_uuid}/status",
    dependencies=[READERS],
    response_model=PostTrainingJobStatusResponse,
    responses=declared(404),
)
async def job_status(jobs: StoredJobsDep, job_uuid: JobUuid, config: WithConfig = False) -> Response:
    """The status of a job."""
    return as_json(jobs.status(job_uuid, config))


@router.get(
    "/job/artifacts", dependencies=[READERS], response_model=PostTrainingJobArtifactsResponse, responses=declared(404)
)
async def get_job_artifacts(store: StoreDep, job_uuid: JobQuery) -> Response:
    """Every complete checkpoint of a job."""
    return as_json(_artifacts(store, job_uuid))


@router.get(
    "/jobs/{job_uuid}/artifacts",
    dependencies=[READERS],
    response_model=PostTrainingJobArtifactsResponse,
    responses=declared(404),
)
async def job_artifacts(store: StoreDep, job_uuid: JobUuid) -> Response:
    """Every complete checkpoint of a job."""
    return as_json(_artifacts(store, job_uuid))


@router.post("/job/cancel", dependencies=[USERS], responses={**declared(404, 409), **NULL})
async def cancel_job(
    jobs: StoredJobsDep,
    caller: CurrentCaller,
    body: Annotated[JobName | None, Body()] = None,
    job_uuid: Annotated[str | None, Query(description="The job's name, where no body names it")] = None,
) -> Response:
    """End a job: its processes are gone within seconds, its checkpoints stay."""
    name = body.job_uuid if body is not None else job_uuid
    if name is None:
        raise InvalidRequest("job_uuid", None, 'name the job: {"job_uuid": "..."} as the body, or ?job_uuid=')
    return await _cancel(jobs, name, caller.name)


@router.post("/jobs/{job_uuid}/cancel", dependencies=[USERS], responses={**declared(404, 409), **NULL})
async def job_cancel(jobs: StoredJobsDep, caller: CurrentCaller, job_uuid: JobUuid) -> Response:
    """End a job: its processes are gone within seconds, its checkpoints stay."""
    return await _cancel(jobs, job_uuid, caller.name)


@router.post(
    "/jobs/{job_uuid}/pause",
    dependencies=[USERS],
    response_model=PostTrainingJobStatusResponse,
    responses=declared(404, 409),
)
async def pause_job(jobs: StoredJobsDep, caller: CurrentCaller, job_uuid: JobUuid) -> Response:
    """Save a checkpoint, then free the device; a waiting job stays in the queue, paused."""
    await jobs.pause(job_uuid, caller.name)
    return as_json(jobs.status(job_uuid, config=False))


@router.post(
    "/jobs/{job_uuid}/resume",
    dependencies=[USERS],
    response_model=PostTrainingJobStatusResponse,
    responses=declared(404, 409),
)
async def resume_job(jobs: StoredJobsDep, job_uuid: JobUuid) -> Response:
    """Queue a paused job again."""
    await jobs.resume(job_uuid)
    return as_json(jobs.status(job_uuid, config=False))


@router.delete(
    "/jobs/{job_uuid}",
    dependencies=[ADMINS],
    status_code=204,
    responses=declared(404, 409),
)
async def delete_job(
    jobs: StoredJobsDep,
    job_uuid: JobUuid,
    checkpoints: Annotated[bool, Query(description="Remove its checkpoints too")] = False,
) -> Response:
    """Delete a job that has ended, with its logs and events."""
    await asyncio.to_thread(jobs.delete, job_uuid, checkpoints)
    return Response(status_code=204)


def as_json(model: BaseModel) -> Response:
    """Serialize a model directly: FastAPI would validate it again, which for a status costs more than building it."""
    return Response(model.model_dump_json(), media_type="application/json")


async def _cancel(jobs: StoredJobs, job_uuid: str, by: str) -> Response:
    await jobs.cancel(job_uuid, by)
    return Response("null", media_type="application/json")


def _artifacts(store: Store, job_uuid: str) -> PostTrainingJobArtifactsResponse:
    return artifacts_response(store.get(job_uuid), store.checkpoints(job_uuid))


def _states_named(text: str) -> list[JobState]:
    """The states that a state of Llama Stack, or one of ours, stands for. Raises InvalidRequest."""
    if text in (JobState.launching, JobState.pausing, JobState.paused, JobState.cancelling):
        return [JobState(text)]
    states = [state for state in JobState if shown(state) == text]
    if not states:
        raise InvalidRequest("status", text, nearest_choice(text, list(JobState)))
    return states


def _page(store: Store, states: list[JobState] | None, limit: int, after: str | None, full: bool) -> str:
    """A page of the list as JSON."""
    wanted = limit + 1  # one more, to know whether there is a next page
    if full:
        rows = [job_row(job) for job in store.page(after, states, wanted)]
    else:
        rows = [JobRow(job_uuid=name) for name in store.page_of_names(after, states, wanted)]
    page = rows[:limit]
    answer = ListJobsResponse(data=page, next=page[-1].job_uuid if len(rows) > limit else None)
    return answer.model_dump_json(exclude_unset=not full)  # rows without `full` have nothing but their names

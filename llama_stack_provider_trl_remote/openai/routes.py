"""The routes of OpenAI's API for files, fine-tuning jobs and models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Path, Query, Request, Response
from starlette.responses import JSONResponse

from llama_stack_provider_trl.jobs.store.records import JobRecord

from ..service.context import Service
from ..service.dependencies import StoreDep, StoredJobsDep
from ..service.http.declared_routes import Routes
from ..service.http.errors import OPENAI_FORM, OpenAIRefused, declared
from ..service.routes.files import RangeHeader, file_answers, file_response
from ..service.routes.openai import OpenAIRoute
from ..service.security.access import (
    ADMINS,
    BODY,
    READERS,
    USERS,
    USERS_JOB,
    USERS_PART,
    USERS_UPLOAD,
    CurrentCaller,
)
from ..service.serving.openai import model_list
from .bodies import CompleteUpload, CreateFineTuningJob, CreatePermissions, CreateUpload
from .files import OpenAIFiles, OpenAIUploads
from .jobs import FineTuning
from .models import OpenAIModels
from .multipart import Form
from .names import JOB, Called
from .shown import checkpoint_page, event_page, find_job, job_object

router = Routes(OpenAIRoute, prefix="/openai/v1", tags=["fine-tuning, in OpenAI's form"])

type Json = dict[str, Any]
Found = tuple[JobRecord, Called]
FileId = Annotated[str, Path(description="Id of a file", max_length=512)]
JobId = Annotated[str, Path(description="Id of a fine-tuning job", max_length=128)]
UploadId = Annotated[str, Path(description="Id of an upload", max_length=128)]
Tuned = Annotated[str, Path(description="A fine-tuned model, or a checkpoint of one", max_length=512)]
After = Annotated[str | None, Query(max_length=512, description="Id of the last object of the page before")]
_METADATA = "metadata["
_BYTES: Json = {"type": "string", "format": "binary"}


def _form(text: str, **fields: Json) -> Json:
    """The `openapi_extra` of a route whose body is a form."""
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    return {
        "requestBody": {"required": True, "description": text, "content": {"multipart/form-data": {"schema": schema}}}
    }


_FORM = _form(
    "The fields `purpose` (fine-tune) and `file`", purpose={"type": "string", "enum": ["fine-tune"]}, file=_BYTES
)
_PART_FORM = _form("The field `data`, with the bytes of the part", data=_BYTES)


class OpenAICalls:
    """Files, jobs and models of a service, built at the first call. Its state is the locks of requests that are under
    way, and which answers may have been lost."""

    def __init__(self, service: Service) -> None:
        self.files = OpenAIFiles(service.datasets, service.row_uploads, service.blobs, service.store)
        self.uploads = OpenAIUploads(service.part_uploads, self.files)
        self.fine_tuning = FineTuning(service.submissions, service.store, self.files, service.settings.openai.models)
        self.models = OpenAIModels(service.chats, service.jobs, service.store)


async def _calls(request: Request) -> OpenAICalls:
    state = request.app.state
    if not hasattr(state, "openai"):
        state.openai = OpenAICalls(state.service)
    found: OpenAICalls = state.openai
    return found


OpenAICallsDep = Annotated[OpenAICalls, Depends(_calls)]


async def _refuse_others(request: Request) -> None:
    """Refuse a parameter that the route does not have: its list would be another one than the caller expects. Raises
    OpenAIRefused."""
    known = sorted(field.alias for field in request.scope["route"].dependant.query_params)
    has_metadata = request.scope["route"].path.endswith("/fine_tuning/jobs")
    for name in request.query_params:
        if name in known or (has_metadata and name.startswith(_METADATA) and name.endswith("]")):
            continue
        hint = f"there is no parameter {name[:100]!r}, only {', '.join(known)}"
        if has_metadata:
            hint += " and metadata[NAME]=TEXT, for jobs that have this text"
        raise OpenAIRefused(f"{hint}: leave it out", name[:100], "unknown_parameter")


LISTS = Depends(_refuse_others)


async def _found(calls: OpenAICallsDep, store: StoreDep, caller: CurrentCaller, job_id: JobId) -> Found:
    found = find_job(store, job_id)
    calls.fine_tuning.see(found[0], caller)
    return found


FoundJob = Annotated[Found, Depends(_found)]
"""The job of the path, which its caller has the name of."""


def _declared(*codes: int) -> dict[int | str, Json]:
    return declared(*codes, form=OPENAI_FORM)


@router.post("/files", dependencies=[USERS_UPLOAD], responses=_declared(409), openapi_extra=_FORM)
async def upload_file(calls: OpenAICallsDep, caller: CurrentCaller, request: Request) -> Response:
    """Upload a file with rows. It is there once all of it is stored."""
    form = Form(request.headers.get("content-type", ""), frozenset({"purpose"}))
    return JSONResponse(await calls.files.upload(form, request.stream(), request.scope[BODY].announced, caller.name))


@router.get("/files", dependencies=[READERS, LISTS], responses=_declared(404))
async def list_files(
    calls: OpenAICallsDep,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Files per page, 1000 of which are answered")] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="By the time of their upload")] = "desc",
    purpose: Annotated[
        Literal["fine-tune", "fine-tune-results"] | None, Query(description="Files of one purpose only")
    ] = None,
) -> Response:
    """Uploaded files, and the metrics of jobs that have succeeded."""
    rows, has_more = await asyncio.to_thread(calls.files.page, after, limit, purpose, newest_first=order == "desc")
    return _list(rows, has_more)


@router.get("/files/{file_id}", dependencies=[READERS], responses=_declared(404))
async def get_file(calls: OpenAICallsDep, file_id: FileId) -> Response:
    """One file, without its content."""
    return JSONResponse(await asyncio.to_thread(calls.files.get, file_id))


@router.get(
    "/files/{file_id}/content",
    dependencies=[READERS],
    response_class=Response,
    responses={**_declared(404, 416), **file_answers()},
)
async def file_content(
    calls: OpenAICallsDep,
    file_id: FileId,
    wanted: RangeHeader = None,
) -> Response:
    """The content of a file, byte by byte as it was uploaded; of a job's metrics, a CSV file."""
    opener, size, digest = await asyncio.to_thread(calls.files.content, file_id)
    return file_response(opener, size, digest, wanted)


@router.delete("/files/{file_id}", dependencies=[USERS], responses=_declared(404))
async def delete_file(calls: OpenAICallsDep, file_id: FileId) -> Response:
    """Delete a file. Jobs that were made with it keep their rows."""
    return JSONResponse(await asyncio.to_thread(calls.files.delete, file_id))


@router.post("/uploads", dependencies=[USERS], responses=_declared())
async def create_upload(calls: OpenAICallsDep, caller: CurrentCaller, body: CreateUpload) -> Response:
    """Begin a file that is sent in parts. It expires after an hour."""
    return JSONResponse(await calls.uploads.create(body, caller.name))


@router.post(
    "/uploads/{upload_id}/parts", dependencies=[USERS_PART], responses=_declared(404), openapi_extra=_PART_FORM
)
async def add_upload_part(
    calls: OpenAICallsDep, caller: CurrentCaller, upload_id: UploadId, request: Request
) -> Response:
    """Add a part of at most 64 MiB. The same part again is the same part."""
    form = Form(request.headers.get("content-type", ""), frozenset(), "data")
    size = request.scope[BODY].announced
    return JSONResponse(await calls.uploads.add_part(upload_id, form, request.stream(), size, caller.name))


@router.post("/uploads/{upload_id}/complete", dependencies=[USERS_JOB], responses=_declared(404, 409))
async def complete_upload(
    calls: OpenAICallsDep, caller: CurrentCaller, upload_id: UploadId, body: CompleteUpload
) -> Response:
    """Make a file of the parts. The same again changes nothing."""
    return JSONResponse(await calls.uploads.complete(upload_id, body, caller.name))


@router.post("/uploads/{upload_id}/cancel", dependencies=[USERS], responses=_declared(404))
async def cancel_upload(calls: OpenAICallsDep, caller: CurrentCaller, upload_id: UploadId) -> Response:
    """Cancel an upload, and remove its parts."""
    return JSONResponse(await calls.uploads.cancel(upload_id, caller.name))


@router.post("/fine_tuning/jobs", dependencies=[USERS_JOB], responses=_declared(404, 409))
async def create_job(
    calls: OpenAICallsDep,
    store: StoreDep,
    body: CreateFineTuningJob,
    caller: CurrentCaller,
    retry: Annotated[
        str | None, Header(alias="x-stainless-retry-count", description="1 or more: the SDK repeats a request")
    ] = None,
) -> Response:
    """Queue a fine-tuning job. A request that the SDK repeats is the job that the first one has made."""
    is_retry = retry is not None and retry.isdecimal() and int(retry[:9]) > 0
    name = await calls.fine_tuning.create(body, caller, is_retry=is_retry)
    body.job_id = name
    return _job(store, name)


@router.get("/fine_tuning/jobs", dependencies=[READERS, LISTS], responses=_declared(404))
async def list_fine_tuning_jobs(
    store: StoreDep,
    request: Request,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Jobs per page")] = 20,
) -> Response:
    """Fine-tuning jobs, newest first; with `metadata[NAME]=TEXT` those that have these texts."""
    wanted = {
        name[len(_METADATA) : -1]: text
        for name, text in request.query_params.items()
        if name.startswith(_METADATA) and name.endswith("]")
    }
    rows, has_more = await asyncio.to_thread(_jobs, store, after, limit, wanted)
    return _list(rows, has_more)


@router.get("/fine_tuning/jobs/{job_id}", dependencies=[READERS], responses=_declared(404))
async def get_fine_tuning_job(found: FoundJob) -> Response:
    """One fine-tuning job."""
    return JSONResponse(job_object(*found))


@router.post("/fine_tuning/jobs/{job_id}/cancel", dependencies=[USERS], responses=_declared(404, 409))
async def cancel_fine_tuning_job(
    found: FoundJob, store: StoreDep, jobs: StoredJobsDep, caller: CurrentCaller
) -> Response:
    """End a job: its processes are gone within seconds, its checkpoints stay."""
    await jobs.cancel(found[0].job_uuid, caller.name)
    return _job(store, found[0].job_uuid)


@router.post("/fine_tuning/jobs/{job_id}/pause", dependencies=[USERS], responses=_declared(404, 409))
async def pause_fine_tuning_job(
    found: FoundJob, store: StoreDep, jobs: StoredJobsDep, caller: CurrentCaller
) -> Response:
    """Save a checkpoint, then free the device."""
    await jobs.pause(found[0].job_uuid, caller.name)
    return _job(store, found[0].job_uuid)


@router.post("/fine_tuning/jobs/{job_id}/resume", dependencies=[USERS], responses=_declared(404, 409))
async def resume_fine_tuning_job(found: FoundJob, store: StoreDep, jobs: StoredJobsDep) -> Response:
    """Queue a paused job again."""
    await jobs.resume(found[0].job_uuid)
    return _job(store, found[0].job_uuid)


@router.get("/fine_tuning/jobs/{job_id}/events", dependencies=[READERS, LISTS], responses=_declared(404))
async def list_fine_tuning_events(
    store: StoreDep,
    found: FoundJob,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Events per page")] = 20,
) -> Response:
    """The events of a job, the last one first. The id of an event never changes."""
    return _list(*await asyncio.to_thread(event_page, store, *found, after, limit))


@router.get("/fine_tuning/jobs/{job_id}/checkpoints", dependencies=[READERS, LISTS], responses=_declared(404))
async def list_fine_tuning_checkpoints(
    store: StoreDep,
    found: FoundJob,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Checkpoints per page")] = 10,
) -> Response:
    """The checkpoints of a job with their metrics, the last one first."""
    return _list(*await asyncio.to_thread(checkpoint_page, store, *found, after, limit))


@router.get(
    "/fine_tuning/checkpoints/{model:path}/permissions", dependencies=[READERS, LISTS], responses=_declared(404)
)
async def list_permissions(
    calls: OpenAICallsDep,
    model: Tuned,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Permissions per page")] = 10,
    order: Annotated[Literal["ascending", "descending"], Query(description="By their time")] = "descending",
    project_id: Annotated[str | None, Query(max_length=512, description="Those of one project only")] = None,
) -> Response:
    """The projects that may use a checkpoint of another one: none, since a service has no projects."""
    await asyncio.to_thread(calls.models.get, model)
    if after is not None:
        raise OpenAIRefused(f"there is no permission {after!r}: leave after out", "after", "invalid_value")
    return _list([], False)


@router.post("/fine_tuning/checkpoints/{model:path}/permissions", dependencies=[USERS], responses=_declared(404))
async def create_permissions(calls: OpenAICallsDep, model: Tuned, body: CreatePermissions) -> Response:
    """Refused: every token of the service may use every result."""
    await asyncio.to_thread(calls.models.get, model)
    raise OpenAIRefused(
        "permissions of checkpoints are not supported: a service has no projects, and every token with the role submit "
        "may use every model of GET /openai/v1/models",
        "project_ids",
        "not_supported",
    )


@router.delete(
    "/fine_tuning/checkpoints/{model:path}/permissions/{permission_id}",
    dependencies=[USERS],
    responses=_declared(404),
)
async def delete_permission(
    calls: OpenAICallsDep,
    model: Tuned,
    permission_id: Annotated[str, Path(description="Id of a permission", max_length=512)],
) -> Response:
    """Refused: there is none."""
    await asyncio.to_thread(calls.models.get, model)
    raise OpenAIRefused(
        f"there is no permission {permission_id[:200]!r}: a service has no projects that could get one",
        "permission_id",
        "not_found",
        404,
    )


@router.get("/models", dependencies=[READERS], responses=_declared())
async def models(calls: OpenAICallsDep) -> Response:
    """The results of completed jobs, and the models that jobs here were trained from."""
    return JSONResponse(model_list(await asyncio.to_thread(calls.models.all)))


@router.get("/models/{model:path}", dependencies=[READERS], responses=_declared(404))
async def model(calls: OpenAICallsDep, model: Annotated[str, Path(description="As in the list")]) -> Response:
    """One entry of the list of models."""
    return JSONResponse(await asyncio.to_thread(calls.models.get, model))


@router.delete("/models/{model:path}", dependencies=[ADMINS], responses=_declared(404, 409))
async def delete_model(calls: OpenAICallsDep, model: Annotated[str, Path(description="As in the list")]) -> Response:
    """Remove the files of a job's result, and its checkpoints. The job stays."""
    return JSONResponse(await asyncio.to_thread(calls.models.delete, model))


def _jobs(store: StoreDep, after: str | None, limit: int, metadata: Json) -> tuple[list[Json], bool]:
    if after is not None:
        find_job(store, after, "after")
    names = store.newest(JOB, after, limit=limit + 1, metadata=metadata)
    rows = []
    for name in names[:limit]:
        try:
            rows.append(job_object(*find_job(store, name)))
        except OpenAIRefused:  # deleted meanwhile, or not made by this API
            continue
    return rows, len(names) > limit


def _job(store: StoreDep, job_id: str) -> Response:
    return JSONResponse(job_object(*find_job(store, job_id)))


def _list(rows: Sequence[Json], has_more: bool) -> Response:
    ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": [*rows], "has_more": has_more, **ends})

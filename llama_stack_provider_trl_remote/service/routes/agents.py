"""The routes of the nodes' agents (`wire`): join, poll, send events, logs, answers and checkpoints.

A call counts as the node's heartbeat once it is accepted: a poll of the agent that joined, or a call about a current
task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Path, Query, Request, Response

from llama_stack_provider_trl.errors import StoreError, shortage_of

from ...wire import (
    MOST_KEPT,
    POLL_SECONDS,
    AnswersBegin,
    CheckpointAnswer,
    CheckpointReport,
    Joined,
    NodeReport,
    Orders,
    Poll,
    TaskOrder,
)
from ..cluster.presence import Presence
from ..cluster.uploads import UploadReceiver
from ..dependencies import (
    DigestsDep,
    JoinsDep,
    ModelsDep,
    PollsDep,
    PresenceDep,
    StoppingDep,
    UploadsDep,
    WakeDep,
)
from ..http.dataset_bodies import Sha256
from ..http.declared_routes import Routes
from ..http.errors import NotFound, declared
from ..security.access import (
    JOIN,
    NODES,
    NODES_ANSWERS,
    NODES_EVENTS,
    NODES_LOG,
    NODES_POLL,
    NODES_READ,
    NODES_UPLOAD,
    CurrentCaller,
    GuardedRoute,
)
from .files import OCTETS, RangeHeader, file_answers, file_response
from .jobs import as_json
from .nodes import Name

log = logging.getLogger(__name__)
router = Routes(GuardedRoute, prefix="/nodes", tags=["nodes"])

POLL_INTERVAL = 0.1
"""Seconds between two checks for new orders of a waiting node: a point read of 20 us."""
RECHECK = 1.0
"""Seconds between two checks that the task of an upload is still current."""
TaskId = Annotated[str, Path(description="As its order has it")]
Checkpoint = Annotated[str, Path(description="The name of its directory, such as checkpoint-10 or final")]
AnswersFile = Annotated[str, Path(max_length=64, description="answers.jsonl, or rows.jsonl of a generate job")]
Kept = Annotated[list[str], Query(max_length=MOST_KEPT, description="Jobs of which the node has files and no task")]
_NONE: list[str] = []
Offset = Annotated[int, Query(ge=0, le=2**42, description="Bytes that were sent before")]
_BYTES = {"requestBody": {"required": True, "content": OCTETS}}
_OFFSET = {
    "description": "Upload-Offset: bytes that are here now",
    "headers": {"Upload-Offset": {"schema": {"type": "string"}}},
}


@router.post("", dependencies=[JOIN], response_model=Joined, responses=declared(409, 410))
async def join(joins: JoinsDep, caller: CurrentCaller, body: NodeReport) -> Response:
    """Join, or update the report. The answer has a new credential, which the node's other calls need."""
    return as_json(await asyncio.to_thread(joins.join, caller, body))


@router.post("/{name}/poll", dependencies=[NODES_POLL], response_model=Orders, responses=declared(404, 409, 410))
async def poll(
    polls: PollsDep,
    stopping: StoppingDep,
    wake: WakeDep,
    caller: CurrentCaller,
    name: Name,
    body: Poll,
    kept: Kept = _NONE,
) -> Response:
    """The orders of the node, as soon as they are new; and those of its kept jobs that are over."""
    try:
        if await asyncio.to_thread(polls.record, caller, name, body):
            wake()
    except StoreError as error:
        if shortage_of(error) is None:
            raise
        # The node repeats its reports with every poll, and must be able to end what was cancelled.
        log.warning("the reports of node %s are not stored: %s", name, error)
    deadline = time.monotonic() + POLL_SECONDS
    while True:
        record = polls.node_of(name, body)
        if record.revision != body.seen or stopping.is_set() or time.monotonic() > deadline:
            return as_json(await asyncio.to_thread(polls.orders, record, kept))
        await asyncio.sleep(POLL_INTERVAL)


@router.post(
    "/{name}/tasks/{task_id}/events",
    dependencies=[NODES_EVENTS],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_events(
    uploads: UploadsDep,
    presence: PresenceDep,
    wake: WakeDep,
    name: Name,
    task_id: TaskId,
    offset: Offset,
    request: Request,
) -> Response:
    """Append whole lines to the attempt's events; 409 has the offset at which they must begin in Upload-Offset."""
    await asyncio.to_thread(uploads.first, task_id, name)  # before the body is read
    presence.note_call(name)
    lines = await request.body()
    size = await asyncio.to_thread(uploads.add_events, task_id, name, offset, lines)
    wake()
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.put(
    "/{name}/tasks/{task_id}/logs/{file}",
    dependencies=[NODES_LOG],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_log(
    uploads: UploadsDep,
    presence: PresenceDep,
    name: Name,
    task_id: TaskId,
    file: str,
    offset: Offset,
    request: Request,
) -> Response:
    """Append to a log; an offset beyond its end leaves a gap."""
    _check_task(uploads, presence, name, task_id)  # before the body is read
    data = await request.body()
    size = await asyncio.to_thread(uploads.add_log, task_id, name, file, offset, data)
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.post(
    "/{name}/tasks/{task_id}/answers",
    dependencies=[NODES_READ],
    response_model=AnswersBegin,
    responses=declared(404, 409, 410, 507),
)
async def begin_answers(
    uploads: UploadsDep, presence: PresenceDep, digests: DigestsDep, name: Name, task_id: TaskId
) -> Response:
    """The answers with which the task begins: the whole batches that the job has. The rest of a batch is removed."""
    _check_task(uploads, presence, name, task_id)
    loop, begin = asyncio.get_running_loop(), uploads.begin_answers
    return as_json(await loop.run_in_executor(digests.threads, begin, task_id, name))


@router.get(
    "/{name}/tasks/{task_id}/answers/{file}",
    dependencies=[NODES_READ],
    response_class=Response,
    responses={**declared(404, 409, 410, 416), **file_answers()},
)
async def answers_file(
    uploads: UploadsDep,
    presence: PresenceDep,
    digests: DigestsDep,
    name: Name,
    task_id: TaskId,
    file: AnswersFile,
    wanted: RangeHeader = None,
) -> Response:
    """The answers that the task's job has so far; the ETag is their sha256."""
    _check_task(uploads, presence, name, task_id)
    loop, find = asyncio.get_running_loop(), uploads.answers
    opener, size, sha256 = await loop.run_in_executor(digests.threads, find, task_id, name, file)
    return file_response(opener, size, sha256, wanted)


@router.put(
    "/{name}/tasks/{task_id}/answers/{file}",
    dependencies=[NODES_ANSWERS],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_answers(
    uploads: UploadsDep,
    presence: PresenceDep,
    name: Name,
    task_id: TaskId,
    file: AnswersFile,
    offset: Offset,
    request: Request,
) -> Response:
    """Append to a file of answers; 409 has the offset at which a part must begin in Upload-Offset."""
    _check_task(uploads, presence, name, task_id)  # before the body is read
    data = await request.body()
    size = await asyncio.to_thread(uploads.add_answers, task_id, name, file, offset, data)
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.post(
    "/{name}/tasks/{task_id}/checkpoints/{checkpoint}",
    dependencies=[NODES],
    response_model=CheckpointAnswer,
    responses=declared(404, 409, 410, 507),
)
async def ask_for_checkpoint(
    uploads: UploadsDep,
    presence: PresenceDep,
    digests: DigestsDep,
    name: Name,
    task_id: TaskId,
    checkpoint: Checkpoint,
    body: CheckpointReport,
) -> Response:
    """The files of a checkpoint that are missing here; without any, the checkpoint is complete."""
    _check_task(uploads, presence, name, task_id)
    loop, ask = asyncio.get_running_loop(), uploads.ask
    # It may read the present files: in the readers' threads, so that other calls find a free thread.
    answer = await loop.run_in_executor(digests.threads, ask, task_id, name, checkpoint, body)
    return as_json(answer)


@router.put(
    "/{name}/tasks/{task_id}/checkpoints/{checkpoint}/files/{path:path}",
    dependencies=[NODES_UPLOAD],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_checkpoint_file(
    uploads: UploadsDep,
    presence: PresenceDep,
    name: Name,
    task_id: TaskId,
    checkpoint: Checkpoint,
    path: Annotated[str, Path(description="As the checkpoint's report names it")],
    sha256: Annotated[Sha256, Query(description="Of the whole file")],
    request: Request,
    offset: Offset = 0,
) -> Response:
    """A file of a checkpoint, or the rest of one: the bytes before a lost connection are kept."""

    _check_task(uploads, presence, name, task_id)

    async def pieces() -> AsyncIterator[bytes]:
        checked = time.monotonic()
        async for piece in request.stream():
            if time.monotonic() - checked > RECHECK:
                checked = time.monotonic()
                uploads.current(task_id, name)
            presence.note_call(name)
            yield piece

    size = await uploads.receive(task_id, name, checkpoint, path, sha256, offset, pieces())
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.get(
    "/{name}/tasks/{task_id}/models/{sha256}/files/{path:path}",
    dependencies=[NODES_READ],
    response_class=Response,
    responses={**declared(404, 409, 410, 416), **file_answers()},
)
async def model_file(
    uploads: UploadsDep,
    presence: PresenceDep,
    served: ModelsDep,
    name: Name,
    task_id: TaskId,
    sha256: Annotated[Sha256, Path(description="Of the model, as the task's order has it")],
    path: Annotated[str, Path(description="As the task's order names it")],
    wanted: RangeHeader = None,
) -> Response:
    """A file of a model that the task trains; its ETag is its sha256."""
    task = uploads.current(task_id, name)
    presence.note_call(name)
    models = TaskOrder.model_validate_json(task.order).models
    files = [file for model in models if model.sha256 == sha256 for file in model.files if file.path == path]
    if not files:
        raise NotFound(f"the order of task {task_id!r} names no file {path[:200]!r} of a model {sha256}")
    loop, expected = asyncio.get_running_loop(), files[0].sha256
    opener, size = await loop.run_in_executor(served.threads, served.open, sha256, path, expected)
    return file_response(opener, size, expected, wanted)


def _check_task(uploads: UploadReceiver, presence: Presence, name: str, task_id: str) -> None:
    """Check that a task is current on its node; the call counts as a heartbeat then. Raises Gone."""
    uploads.current(task_id, name)
    presence.note_call(name)

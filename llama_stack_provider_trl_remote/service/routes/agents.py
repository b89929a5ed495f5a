"""The routes of the nodes' agents (`wire`): join, poll, send events, logs, answers and checkpoints.

A call counts as the node's heartbeat once it is accepted: a poll of the agent that joined, or a call about a current
task.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, StoreError, shortage_of
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL
from llama_stack_provider_trl.jobs.store.records import NodeRecord
from llama_stack_provider_trl.specs.events import Failed

from ...wire import (
    MOST_KEPT,
    POLL_SECONDS,
    SILENCE,
    SPECS,
    VERSIONS,
    AnswersBegin,
    CheckpointAnswer,
    CheckpointReport,
    Joined,
    NodeReport,
    Orders,
    Poll,
    Stage,
    StageProgress,
    TaskOrder,
    TaskReport,
)
from ..cluster.credentials import new_credential, removed
from ..cluster.membership import has_other_build, incarnation
from ..cluster.reports import observation
from ..context import Context, Service
from ..http.bodies import Sha256
from ..http.errors import Conflict, Gone, NotFound, declared
from ..security.access import (
    JOIN,
    NODES,
    NODES_ANSWERS,
    NODES_EVENTS,
    NODES_LOG,
    NODES_POLL,
    NODES_READ,
    NODES_UPLOAD,
    Caller,
    CurrentCaller,
    GuardedRoute,
    Refused,
)
from .files import OCTETS, file_response
from .jobs import as_json
from .nodes import Name

log = logging.getLogger(__name__)
router = APIRouter(route_class=GuardedRoute, prefix="/nodes", tags=["nodes"])

POLL_INTERVAL = 0.1
"""Seconds between two checks for new orders of a waiting node: a point read of 20 us."""
RECHECK = 1.0
"""Seconds between two checks that the task of an upload is still current."""
TaskId = Annotated[str, Path(description="As its order has it")]
Checkpoint = Annotated[str, Path(description="The name of its directory, such as checkpoint-10 or final")]
AnswersFile = Annotated[str, Path(max_length=64, description="answers.jsonl, or rows.jsonl of a generate job")]
RangeHeader = Annotated[str | None, Header(alias="Range", description="One range of bytes, such as bytes=100-")]
Kept = Annotated[list[str], Query(max_length=MOST_KEPT, description="Jobs of which the node has files and no task")]
_NONE: list[str] = []
Offset = Annotated[int, Query(ge=0, le=2**42, description="Bytes that were sent before")]
_MOST_NODES = 1024
"""Nodes that tokens of agents may add; each is a row, and a part of every placement."""
_JOINING = threading.Lock()
"""Lock from the check of a name until it is taken."""
_BYTES = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_OFFSET = {
    "description": "Upload-Offset: bytes that are here now",
    "headers": {"Upload-Offset": {"schema": {"type": "string"}}},
}


@router.post("", dependencies=[JOIN], response_model=Joined, responses=declared(409, 410))
async def join(service: Context, caller: CurrentCaller, body: NodeReport) -> Response:
    """Join, or update the report. The answer has a new credential, which the node's other calls need."""
    credential = await asyncio.to_thread(_join, service, caller, body)
    return as_json(Joined(node=body.name, head=service.node_name, version=__version__, credential=credential))


@router.post("/{name}/poll", dependencies=[NODES_POLL], response_model=Orders, responses=declared(404, 409, 410))
async def poll(service: Context, caller: CurrentCaller, name: Name, body: Poll, kept: Kept = _NONE) -> Response:
    """The orders of the node, as soon as they are new; and those of its kept jobs that are over."""
    try:
        if await asyncio.to_thread(_store_reports, service, caller, name, body):
            service.supervisor.wake()
    except StoreError as error:
        if shortage_of(error) is None:
            raise
        # The node repeats its reports with every poll, and must be able to end what was cancelled.
        log.warning("the reports of node %s are not stored: %s", name, error)
    deadline = time.monotonic() + POLL_SECONDS
    while True:
        record = _welcome(service, name, body)
        if record.revision != body.seen or service.stopping.is_set() or time.monotonic() > deadline:
            orders = await asyncio.to_thread(_orders, service, record, kept)
            return as_json(orders)
        await asyncio.sleep(POLL_INTERVAL)


@router.post(
    "/{name}/tasks/{task_id}/events",
    dependencies=[NODES_EVENTS],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_events(service: Context, name: Name, task_id: TaskId, offset: Offset, request: Request) -> Response:
    """Append whole lines to the attempt's events; 409 has the offset at which they must begin in Upload-Offset."""
    await asyncio.to_thread(service.uploads.first, task_id, name)  # before the body is read
    service.presence.note_call(name)
    lines = await request.body()
    size = await asyncio.to_thread(service.uploads.add_events, task_id, name, offset, lines)
    service.supervisor.wake()
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.put(
    "/{name}/tasks/{task_id}/logs/{file}",
    dependencies=[NODES_LOG],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_log(
    service: Context, name: Name, task_id: TaskId, file: str, offset: Offset, request: Request
) -> Response:
    """Append to a log; an offset beyond its end leaves a gap."""
    _check_task(service, name, task_id)  # before the body is read
    data = await request.body()
    size = await asyncio.to_thread(service.uploads.add_log, task_id, name, file, offset, data)
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.post(
    "/{name}/tasks/{task_id}/answers",
    dependencies=[NODES_READ],
    response_model=AnswersBegin,
    responses=declared(404, 409, 410, 507),
)
async def begin_answers(service: Context, name: Name, task_id: TaskId) -> Response:
    """The answers with which the task begins: the whole batches that the job has. The rest of a batch is removed."""
    _check_task(service, name, task_id)
    loop, begin = asyncio.get_running_loop(), service.uploads.begin_answers
    return as_json(await loop.run_in_executor(service.digests.threads, begin, task_id, name))


@router.get(
    "/{name}/tasks/{task_id}/answers/{file}",
    dependencies=[NODES_READ],
    response_class=Response,
    responses={
        **declared(404, 409, 410, 416),
        200: {"content": OCTETS, "description": "The whole file"},
        206: {"content": OCTETS, "description": "The bytes that Range asks for"},
    },
)
async def answers_file(
    service: Context, name: Name, task_id: TaskId, file: AnswersFile, wanted: RangeHeader = None
) -> Response:
    """The answers that the task's job has so far; the ETag is their sha256."""
    _check_task(service, name, task_id)
    loop, find = asyncio.get_running_loop(), service.uploads.answers
    opener, size, sha256 = await loop.run_in_executor(service.digests.threads, find, task_id, name, file)
    return file_response(opener, size, sha256, wanted)


@router.put(
    "/{name}/tasks/{task_id}/answers/{file}",
    dependencies=[NODES_ANSWERS],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_answers(
    service: Context, name: Name, task_id: TaskId, file: AnswersFile, offset: Offset, request: Request
) -> Response:
    """Append to a file of answers; 409 has the offset at which a part must begin in Upload-Offset."""
    _check_task(service, name, task_id)  # before the body is read
    data = await request.body()
    size = await asyncio.to_thread(service.uploads.add_answers, task_id, name, file, offset, data)
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.post(
    "/{name}/tasks/{task_id}/checkpoints/{checkpoint}",
    dependencies=[NODES],
    response_model=CheckpointAnswer,
    responses=declared(404, 409, 410, 507),
)
async def ask_for_checkpoint(
    service: Context, name: Name, task_id: TaskId, checkpoint: Checkpoint, body: CheckpointReport
) -> Response:
    """The files of a checkpoint that are missing here; without any, the checkpoint is complete."""
    _check_task(service, name, task_id)
    loop, ask = asyncio.get_running_loop(), service.uploads.ask
    # It may read the present files: in the readers' threads, so that other calls find a free thread.
    answer = await loop.run_in_executor(service.digests.threads, ask, task_id, name, checkpoint, body)
    return as_json(answer)


@router.put(
    "/{name}/tasks/{task_id}/checkpoints/{checkpoint}/files/{path:path}",
    dependencies=[NODES_UPLOAD],
    status_code=204,
    responses={**declared(404, 409, 410, 507), 204: _OFFSET},
    openapi_extra=_BYTES,
)
async def add_checkpoint_file(
    service: Context,
    name: Name,
    task_id: TaskId,
    checkpoint: Checkpoint,
    path: Annotated[str, Path(description="As the checkpoint's report names it")],
    sha256: Annotated[Sha256, Query(description="Of the whole file")],
    request: Request,
    offset: Offset = 0,
) -> Response:
    """A file of a checkpoint, or the rest of one: the bytes before a lost connection are kept."""

    _check_task(service, name, task_id)

    async def pieces() -> AsyncIterator[bytes]:
        checked = time.monotonic()
        async for piece in request.stream():
            if time.monotonic() - checked > RECHECK:
                checked = time.monotonic()
                service.uploads.current(task_id, name)
            service.presence.note_call(name)
            yield piece

    size = await service.uploads.receive(task_id, name, checkpoint, path, sha256, offset, pieces())
    return Response(status_code=204, headers={"Upload-Offset": str(size)})


@router.get(
    "/{name}/tasks/{task_id}/models/{sha256}/files/{path:path}",
    dependencies=[NODES_READ],
    response_class=Response,
    responses={
        **declared(404, 409, 410, 416),
        200: {"content": OCTETS, "description": "The whole file"},
        206: {"content": OCTETS, "description": "The bytes that Range asks for"},
    },
)
async def model_file(
    service: Context,
    name: Name,
    task_id: TaskId,
    sha256: Annotated[Sha256, Path(description="Of the model, as the task's order has it")],
    path: Annotated[str, Path(description="As the task's order names it")],
    wanted: RangeHeader = None,
) -> Response:
    """A file of a model that the task trains; its ETag is its sha256."""
    task = service.uploads.current(task_id, name)
    service.presence.note_call(name)
    models = TaskOrder.model_validate_json(task.order).models
    files = [file for model in models if model.sha256 == sha256 for file in model.files if file.path == path]
    if not files:
        raise NotFound(f"the order of task {task_id!r} names no file {path[:200]!r} of a model {sha256}")
    loop, expected = asyncio.get_running_loop(), files[0].sha256
    opener, size = await loop.run_in_executor(service.models.threads, service.models.open, sha256, path, expected)
    return file_response(opener, size, expected, wanted)


def _check_task(service: Service, name: str, task_id: str) -> None:
    """Check that a task is current on its node; the call counts as a heartbeat then. Raises Gone."""
    service.uploads.current(task_id, name)
    service.presence.note_call(name)


def _join(service: Service, caller: Caller, report: NodeReport) -> str:
    """Record a node. Returns its new credential; empty: the caller has one that is not replaced.

    Raises:
        InvalidRequest, Conflict.
        Refused: 403, the credential of another node.
    """
    try:
        address = ipaddress.ip_address(report.address)
    except ValueError as error:
        hint = "give the literal IP address at which the other nodes reach this one (TRL_NODE_ADDRESS)"
        raise InvalidRequest("address", report.address, hint) from error
    mapped = getattr(address, "ipv4_mapped", None) or address
    if mapped.is_unspecified or mapped.is_multicast:
        raise InvalidRequest("address", report.address, "send the address of one of its network interfaces")
    if mapped.is_loopback and not service.settings.on_loopback:
        hint = "other nodes cannot reach that: give the address of the interface that they share (TRL_NODE_ADDRESS)"
        raise InvalidRequest("address", report.address, hint)
    ours = service.versions()
    for package in VERSIONS:
        theirs = report.versions.get(package, "").partition("+")[0]
        if theirs != ours[package]:
            raise Conflict(
                f"node {report.name!r} has {package} {theirs or 'none'}, the service has {ours[package] or 'none'}: "
                "install the same version on both"
            )
    theirs, is_other = report.versions.get(SPECS, ""), has_other_build(report)
    # This machine's own agent has a token that lasts as long as this process.
    credential, sha256 = ("", None) if report.name == service.node_name else new_credential()
    with _JOINING:
        known = service.store.nodes.get(report.name)
        _check_name(service, caller, report, known)
        # An agent that has joined already keeps its trainings, and gets no further ones (`Cluster.why_closed`).
        if is_other and (known is None or known.boot_id != incarnation(report)):
            raise Conflict(
                f"node {report.name!r} has another build of llama_stack_provider_trl {__version__}: its job "
                f"specifications have the digest {theirs or 'none'}, the service's {ours[SPECS]}. Install the same "
                "build on both, which is the wheel or the checkout of the newer one, and start the agent again"
            )
        if known is None and caller.node is None and len(service.store.nodes.all()) >= _MOST_NODES:
            raise Conflict(
                f"there are {_MOST_NODES} nodes already: remove those that are gone (trl-remote nodes remove NAME), "
                f"and start the agent of {report.name!r} again"
            )
        _note_used(service, caller)
        service.removed.pop(report.name, None)
        service.store.nodes.join(report.name, report.machine_id, incarnation(report), report.model_dump_json(), sha256)
        service.presence.note_call(report.name)
        service.cluster.allow_again(report.name)
    service.supervisor.wake()
    if known is None:
        log.info("node %s (%s) has joined with %s", report.name, report.address, _names(report))
    return credential


def _check_name(service: Service, caller: Caller, report: NodeReport, known: NodeRecord | None) -> None:
    """Check that a join may use its name. No message here discloses anything about the other machine.

    Raises:
        Conflict: it is another node's.
        Refused: 403, the caller is another node.
    """
    name, same_machine = report.name, known is not None and known.machine_id == report.machine_id
    if caller.node is not None and caller.node != name:
        raise Refused(403, f"this credential is another node's: only {name!r} itself may join under this name")
    if name == service.node_name and caller.node != name:
        raise Conflict(
            f"the node {name!r} is there already: it is the service's own machine; choose another name "
            "(--name, TRL_NODE_NAME)"
        )
    if known is None or (caller.node == name and (same_machine or name == service.node_name)):
        return
    if _is_live(service, known):
        # Until a credential was used, the answer with it may be lost: the same agent then joins again.
        if same_machine and known.boot_id == incarnation(report) and not service.store.nodes.has_used_credential(name):
            return
        raise Conflict(
            f"the node {name!r} is there already: choose another name (--name, TRL_NODE_NAME); if this is its machine "
            f"with a new data directory, stop its agent and start this one {SILENCE:.0f} s later"
        )
    if caller.node != name and not same_machine:
        raise Conflict(
            f"the node {name!r} joined from another machine before: choose another name (--name, TRL_NODE_NAME), or "
            f"have the operator remove it (trl-remote nodes remove {name})"
        )


def _is_live(service: Service, record: NodeRecord) -> bool:
    """Whether the node called within SILENCE, before the service was started too."""
    if service.presence.has_called(record.name):
        return not service.presence.is_absent(record.name)
    return abs(time.time() - record.seen_at.timestamp()) < SILENCE  # abs: the clock may have been set back


def _welcome(service: Service, name: str, body: Poll) -> NodeRecord:
    """The node that polls. The errors may arise while the call waits for its answer.

    Raises:
        NotFound.
        Gone: it was removed.
        Conflict: it has not joined since it was started.
    """
    try:
        record = service.known_node(name)
    except NotFound:
        # Checked after the read: another thread may remove the node meanwhile, which notes it here before it deletes.
        if service.removed.get(name) == incarnation(body):
            raise Gone(removed(name)) from None
        raise
    if record.boot_id != incarnation(body):
        raise Conflict(f"node {name!r} has joined as another agent, or before this machine was started: join again")
    return record


def _store_reports(service: Service, caller: Caller, name: str, body: Poll) -> bool:
    """Record the reports of a node. Returns whether any is new. Raises InvalidRequest, and the errors of `_welcome`."""
    record = _welcome(service, name, body)
    for report in body.tasks:
        _check(report)
    service.presence.note_call(name)
    _note_used(service, caller)
    with service.polls.recording(name, body) as counts:
        is_new = counts and _record_poll(service, record, body)
    if service.store.nodes.get(name) is None:  # another thread has removed it since it was found
        service.forget_node(name)
    return is_new


def _record_poll(service: Service, record: NodeRecord, body: Poll) -> bool:
    """Record what a node reports. Returns whether any of its tasks, or of its owner's use, is new."""
    name = record.name
    if body.load is not None and name != service.node_name:  # which the service measures itself
        service.loads.note(name, body.load)
    if body.log is not None:
        service.logs.add(name, body.log)
    if body.leaving and record.mode == "open":
        service.store.nodes.set_mode(name, "draining")
        log.info("node %s is draining: its machine is about to be taken away", name)
    if abs(time.time() - record.seen_at.timestamp()) > SILENCE / 3:  # abs: the clock may have been set back
        service.store.nodes.record_heartbeat(name)
    reports = {report.task_id: report for report in body.tasks}
    gone = [
        task.task_id
        for task in service.store.tasks.of_node(name)
        # Without an order to stop its agent has ended it.
        if (task.stage == Stage.stop or task.task_id in reports) and _is_over(reports.get(task.task_id))
    ]
    is_new = service.store.tasks.record_reports(
        name, {key: report.model_dump_json() for key, report in reports.items()}, gone
    )
    return service.cluster.note_owner(name, body.owner) or is_new


def _note_used(service: Service, caller: Caller) -> None:
    """Record the first use of a credential, with which those before it expire."""
    if caller.node is not None and caller.unused_credential:
        with suppress(StoreError):  # a full disk: those before it stay valid, and the next call tries again
            service.store.nodes.record_credential_use(caller.node, caller.unused_credential)


def _check(report: TaskReport) -> None:
    """Check a report. Raises InvalidRequest: a report that the supervisor cannot read would block the job."""
    try:
        if report.observation is not None:
            observation(report.observation)
        if report.failed is not None:
            Failed.model_validate(report.failed)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequest(f"tasks of {report.task_id}", str(error)[:200], "send a `TaskReport`") from error


def _is_over(report: TaskReport | None) -> bool:
    """Whether nothing of a task that was ordered to stop is left. None: the node does not know it (any more)."""
    return report is None or (report.stage is Stage.stop and report.progress is StageProgress.done)


def _orders(service: Service, record: NodeRecord, kept: Sequence[str]) -> Orders:
    orders = []
    for task in service.store.tasks.of_node(record.name):
        order = TaskOrder.model_validate_json(task.order)
        orders.append(order.model_copy(update={"stage": Stage(task.stage)}))
    over = tuple(job_uuid for job_uuid in kept if _has_ended(service, job_uuid))
    return Orders(revision=record.revision, tasks=tuple(orders), over=over)


def _has_ended(service: Service, job_uuid: str) -> bool:
    """Whether a job has ended. An unknown one has not: the database may be another one than before."""
    try:
        return service.store.get(job_uuid).state in TERMINAL
    except (JobNotFound, StoreError):
        return False


def _names(report: NodeReport) -> str:
    return ", ".join(device.name for device in report.devices)

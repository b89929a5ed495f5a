"""Jobs, their events, checkpoints and metrics in OpenAI's forms: the metrics are a CSV file with a line per optimizer
step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Literal

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.records import CheckpointRecord, JobRecord, PointRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import (
    CheckpointDamaged,
    CheckpointSaved,
    Evaluated,
    Event,
    Failed,
    Finished,
    Paused,
    Prepared,
    Progress,
    Reason,
    Started,
    Warned,
)
from llama_stack_provider_trl.specs.rewards import checks_of

from ..service.http.errors import OpenAIRefused
from ..service.views.events import Cursor, Line, read_back
from .bodies import MARK
from .graders import with_named_models
from .names import JOB, OWNER, Called, checkpoint_name, result_file

type Json = dict[str, Any]
_STATUS = {
    JobState.scheduled: "queued",
    JobState.launching: "running",
    JobState.in_progress: "running",
    JobState.pausing: "running",
    JobState.paused: "queued",
    JobState.cancelling: "running",
    JobState.completed: "succeeded",
    JobState.failed: "failed",
    JobState.cancelled: "cancelled",
}
"""OpenAI has no status of a paused job."""
_EVENT, _CREATED, _ENDED = "ftevent-", "created", "ended"
_PIECE, _HIDDEN = 200, 8
"""Events that are read at once at most, and beside those of a page: some are not shown. To parse 200 takes 5 ms."""


def find_job(store: Store, job_id: str, param: str = "fine_tuning_job_id") -> tuple[JobRecord, Called]:
    """A job that was made by this API. Raises OpenAIRefused: 404, which names the parameter."""
    try:
        job = store.get(job_id)
        called = Called.of(job.spec.metadata) if job_id.startswith(JOB) else None
    except JobNotFound:
        called = None
    if called is None:
        text = f"no fine-tuning job {job_id[:200]!r} is here ({param}): GET /openai/v1/fine_tuning/jobs lists them"
        raise OpenAIRefused(text, param, "not_found", 404)
    return job, called


def job_object(job: JobRecord, called: Called) -> Json:
    succeeded = job.state is JobState.completed
    data = job.spec.data
    method = _method(job, called)
    return {
        "object": "fine_tuning.job",
        "id": job.job_uuid,
        "created_at": int(job.scheduled_at.timestamp()),
        "finished_at": None if job.completed_at is None else int(job.completed_at.timestamp()),
        "estimated_finish": _estimated_finish(job),
        "model": called.model,
        "fine_tuned_model": called.result_of(job.job_uuid) if succeeded else None,
        "organization_id": f"org-{OWNER}",
        "status": _STATUS[job.state],
        "error": _error(job),
        "hyperparameters": method["supervised"]["hyperparameters"] if method["type"] == "supervised" else {},
        "method": method,
        "training_file": data.dataset.dataset_id,
        "validation_file": None if data.validation is None else data.validation.dataset_id,
        "result_files": [result_file(job.job_uuid)] if succeeded else [],
        "trained_tokens": job.progress.tokens_seen if succeeded else None,
        "seed": data.seed,
        "integrations": [],
        "metadata": {name: text for name, text in job.spec.metadata.items() if name != MARK},
    }


def _method(job: JobRecord, called: Called) -> Json:
    method = called.method
    if method["type"] != "reinforcement" or not job.spec.method.rewards_of_answers:
        return method
    (check,) = checks_of(job.spec.method.rewards_of_answers)
    assert check.grader is not None
    grader = with_named_models(check.grader.model_dump(mode="json"), called.grading)
    below = grader.get("graders", {})
    if [*below] == [one["name"] for one in below.values()] and len(below) == 1:
        (grader["graders"],) = below.values()  # without a name before it, as the SDK's type has a single one
    block = {"grader": grader, **method["reinforcement"]}
    return {"type": "reinforcement", "reinforcement": block}


def event_page(store: Store, job: JobRecord, called: Called, after: str | None, limit: int) -> tuple[list[Json], bool]:
    """Events, the last one first, and whether there are earlier ones. Raises OpenAIRefused: `after` is the id of no
    event."""
    place = "" if after is None else after.removeprefix(_EVENT)
    if after is not None and not after.startswith(_EVENT):
        raise _no_event(after)
    found: list[Json] = []
    if after is None and job.state in TERMINAL:
        found.append(_end(job))
    before, piece = None, min(limit + _HIDDEN, _PIECE)
    while place != _CREATED and len(found) <= limit:
        try:
            if before is None and place not in ("", _ENDED):
                before = Cursor.parse(place, "after")
            lines = read_back(store, job.job_uuid, before, piece)
        except InvalidRequest as error:
            raise _no_event(after) from error
        found += filter(None, (_event(line, job, called) for line in lines))
        if len(lines) < piece:
            found.append(_created(job))
            break
        before = lines[-1].cursor
    return found[:limit], len(found) > limit


def _no_event(after: str | None) -> OpenAIRefused:
    return OpenAIRefused(
        f"after={after!r} is no event of this job: send the id of one, ftevent-..., or leave it out",
        "after",
        "invalid_value",
    )


def checkpoint_page(
    store: Store, job: JobRecord, called: Called, after: str | None, limit: int
) -> tuple[list[Json], bool]:
    """Checkpoints, the last one first, and whether there are earlier ones. Raises OpenAIRefused: `after` is the id of
    no checkpoint."""
    records: Sequence[CheckpointRecord] = [one for one in store.checkpoints(job.job_uuid) if one.kind != "merged"]
    records = sorted(records, key=lambda one: (one.step, one.kind == "final"), reverse=True)
    ids = [_checkpoint_id(job, one) for one in records]
    if after is not None:
        if after not in ids:
            raise OpenAIRefused(
                f"after={after!r} is no checkpoint of this job: send the id of one, ftckpt-..., or leave it out",
                "after",
                "invalid_value",
            )
        records = records[ids.index(after) + 1 :]
    page = [_checkpoint(store, job, called, one) for one in records[:limit]]
    return page, len(records) > limit


def _estimated_finish(job: JobRecord) -> int | None:
    if _STATUS[job.state] != "running" or job.progress.eta_seconds is None:
        return None
    return int(time.time() + job.progress.eta_seconds)


def _error(job: JobRecord) -> Json | None:
    if job.state is not JobState.failed:
        return None
    reason = job.reason or Reason.internal
    param = {Reason.invalid_dataset: "training_file", Reason.invalid_model: "model"}.get(reason)
    return {"code": reason.value, "message": job.advised, "param": param}


def _checkpoint_id(job: JobRecord, checkpoint: CheckpointRecord) -> str:
    name = f"step-{checkpoint.step}" if checkpoint.kind == "step" else checkpoint.kind
    return f"ftckpt-{job.job_uuid.removeprefix(JOB)}-{name}"


def _checkpoint(store: Store, job: JobRecord, called: Called, checkpoint: CheckpointRecord) -> Json:
    step = checkpoint.step
    points = [point for point in store.points(job.job_uuid, step - 1, 2) if point.step == step]
    values = values_of(points)
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": _checkpoint_id(job, checkpoint),
        "created_at": int(checkpoint.created_at.timestamp()),
        "fine_tuned_model_checkpoint": checkpoint_name(job, called, checkpoint),
        "fine_tuning_job_id": job.job_uuid,
        "step_number": step,
        "metrics": {
            "step": step,
            "train_loss": values["train_loss"],
            "train_mean_token_accuracy": values["train_accuracy"],
            "valid_loss": values["valid_loss"],
            "valid_mean_token_accuracy": values["valid_mean_token_accuracy"],
            "full_valid_loss": checkpoint.validation_loss,
            "full_valid_mean_token_accuracy": values["valid_mean_token_accuracy"],
        },
    }


def _event_object(place: str, at: float, message: str, level: str = "info", data: Json | None = None) -> Json:
    return {
        "object": "fine_tuning.job.event",
        "id": f"{_EVENT}{place}",
        "created_at": int(at),
        "level": level,
        "message": message,
        "data": data,
        "type": "message" if data is None else "metrics",
    }


def _created(job: JobRecord) -> Json:
    at = job.scheduled_at.timestamp()
    return _event_object(_CREATED, at, f"Created fine-tuning job {job.job_uuid}: its files were checked, it is queued")


def _end(job: JobRecord) -> Json:
    at = (job.completed_at or job.scheduled_at).timestamp()
    if job.state is JobState.failed:
        return _event_object(_ENDED, at, f"The job has failed: {job.message}", "error")
    text = "The job has successfully completed" if job.state is JobState.completed else "The job was cancelled"
    return _event_object(_ENDED, at, text)


def _event(line: Line, job: JobRecord, called: Called) -> Json | None:
    """None: it is not shown."""
    event: Event = line.event
    data, level = None, "info"
    match event:
        case Started():
            text = f"Fine-tuning has started on {event.device} (attempt {line.cursor.attempt})"
        case Prepared(start_step=0):
            text = f"{event.num_rows} examples are trained in {event.total_steps} steps"
        case Prepared():
            text = f"Training resumes behind step {event.start_step} of {event.total_steps}"
        case Warned() | CheckpointDamaged():
            text, level = event.message, "warn"
        case Progress() | Evaluated():
            text, data = _metrics(event, job)
        case CheckpointSaved(kind="step"):
            text = f"Checkpoint created at step {event.step}: {called.result_of(job.job_uuid)}:ckpt-step-{event.step}"
        case CheckpointSaved(kind="final"):
            text = f"New fine-tuned model created: {called.result_of(job.job_uuid)}"
        case Paused():
            text = f"The job has paused behind step {event.step}: POST .../resume continues it"
        case Failed():
            text, level = event.message, "error"
        case Finished():
            text = f"Training has ended behind step {event.step}"
        case _:
            return None
    return _event_object(str(line.cursor), event.time, text, level, data)


def _metrics(event: Progress | Evaluated, job: JobRecord) -> tuple[str, Json]:
    kind: Literal["train", "validation"] = "train" if isinstance(event, Progress) else "validation"
    at = datetime.fromtimestamp(event.time, UTC)
    values = values_of([PointRecord(kind, event.step, event.epoch, at, event.metrics)])
    names = {"train_accuracy": "train_mean_token_accuracy"}
    data: Json = {"step": event.step, "total_steps": job.progress.total_steps}
    data |= {names.get(name, name): value for name, value in values.items() if value is not None}
    what, loss = ("training", values["train_loss"]) if kind == "train" else ("validation", values["valid_loss"])
    total = f"/{job.progress.total_steps}" if job.progress.total_steps else ""
    return f"Step {event.step}{total}: {what} loss={'unknown' if loss is None else f'{loss:.4f}'}", data


COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
_PAGE = 4000
_ACCURACIES = ("mean_token_accuracy", "rewards/accuracies")
"""Of supervised jobs, and of DPO: the share of pairs whose preferred answer has the higher reward."""


def metrics_csv(store: Store, job_uuid: str) -> Iterator[bytes]:
    """The lines, some at a time. Raises JobNotFound."""
    yield (",".join(COLUMNS) + "\n").encode()
    after = -1
    while True:
        points = list(store.points(job_uuid, after, _PAGE))
        if len(points) == _PAGE:  # the last step may go on
            last = points[-1].step
            points = [point for point in points if point.step < last]
        if not points:
            return
        yield "".join(_line(step, list(group)) for step, group in groupby(points, lambda point: point.step)).encode()
        after = points[-1].step


def values_of(points: list[PointRecord]) -> dict[str, float | None]:
    """The columns behind the step, of the points of one step."""
    found: dict[str, float | None] = dict.fromkeys(COLUMNS[1:])
    for point in points:
        if point.kind == "train":
            found["train_loss"] = point.metrics.get("loss")
            found["train_accuracy"] = _accuracy(point.metrics, "")
        else:
            found["valid_loss"] = point.metrics.get("eval_loss")
            found["valid_mean_token_accuracy"] = _accuracy(point.metrics, "eval_")
    return found


def _accuracy(metrics: Mapping[str, float], prefix: str) -> float | None:
    return next((metrics[prefix + name] for name in _ACCURACIES if prefix + name in metrics), None)


def _line(step: int, points: list[PointRecord]) -> str:
    values = values_of(points)
    return ",".join([str(step), *("" if value is None else f"{value:.6g}" for value in values.values())]) + "\n"

"""Maps rows of the database to records, and events to the statements that store them. Pure functions."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ...requests.options import RESERVED
from ...specs.event_fields import LAST_TIME
from ...specs.events import (
    Answer,
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
    RolledOut,
    Sampled,
    Started,
    Tokenizing,
    Warned,
)
from ...specs.job import JobSpec
from ..decisions.demands import Queued
from ..decisions.prediction import RunningJob, StepPace, WaitingJob
from ..decisions.states import JobState
from .monitoring.totals import CHECKPOINT, observed
from .records import (
    JobProgress,
    JobRecord,
    JobSummary,
    ListedJob,
    NodeTaskRecord,
    PointRecord,
    SamplesRecord,
)


def statements(event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of the statements that store an event, each with its values."""
    row = {"time": event.time}
    match event:
        case Started():
            yield "note_started", row
            yield "note_attempt_started", row
        case Prepared():
            steps = {"total_steps": event.total_steps, "start_step": event.start_step}
            resumed_from = None if event.resumed_from is None else str(event.resumed_from)
            yield "note_prepared", {**row, **steps, "resumed_from": resumed_from, "event": event.model_dump_json()}
            yield "supersede_points", steps
            yield "supersede_samples", steps
            if event.tokens_seen is not None:  # of the job whose checkpoint this one begins with: they count there
                yield "note_tokens", {"tokens": event.tokens_seen}
        case Tokenizing():
            yield "note_tokenizing", {"progress": event.values().model_dump_json(exclude_none=True)}
        case Warned():
            yield "insert_warning", {"message": event.message}
        case Progress():
            values = {**event.values().model_dump(exclude_none=True), **dict.fromkeys(event.lost())}
            yield "note_progress", {**row, "step": event.step, "progress": json.dumps(values)}
            if event.tokens_seen is not None:
                yield "count_tokens", {"tokens": event.tokens_seen}
                yield "note_tokens", {"tokens": event.tokens_seen}
            yield "upsert_point", {**row, **_point(event)}
        case Evaluated():
            yield "upsert_point", {**row, **_point(event)}
        case Sampled():
            answers = json.dumps([answer.model_dump() for answer in event.answers])
            yield (
                "upsert_samples",
                {**row, "step": event.step, "kind": event.kind, "epoch": event.epoch, "answers": answers},
            )
        case RolledOut():
            place = {"step": event.step, "kind": "rollout", "epoch": event.epoch}
            yield "upsert_samples", {**row, **place, "answers": event.model_dump_json()}
        case CheckpointSaved():
            yield "upsert_checkpoint", {**row, **event.model_dump(mode="json", exclude={"time", "type"})}
            if event.write_seconds is not None:
                for counted in observed(CHECKPOINT, event.write_seconds, event.kind):
                    yield "count", counted
        case CheckpointDamaged():
            yield "delete_checkpoint", {"path": str(event.path)}
            yield "insert_warning", {"message": event.message}
        case Finished():
            yield "note_finished", {"step": event.step}
            if event.result is not None:
                yield "note_result", {"result": json.dumps(event.result)}
        case Paused():
            yield "note_paused", {"step": event.step}
        case Failed():
            yield "note_failed", {"event": event.model_dump_json()}


def metrics_of(event: Progress | Evaluated) -> tuple[Literal["train", "validation"], dict[str, float]]:
    """The kind of the point that an event stands for, and its metrics by the names that curves have."""
    if isinstance(event, Progress):
        return "train", {**event.metrics, **dict(event.memory())}
    return "validation", dict(event.metrics)


def _point(event: Progress | Evaluated) -> dict[str, Any]:
    kind, metrics = metrics_of(event)
    return {"step": event.step, "epoch": event.epoch, "kind": kind, "metrics": json.dumps(metrics)}


def job_record(row: sqlite3.Row) -> JobRecord:
    prepared = None if row["prepared"] is None else json.loads(row["prepared"])
    return record_of(
        JobRecord,
        row,
        spec=JobSpec.model_validate_json(row["spec"]),
        progress=_progress(row),
        effective=prepared and {name: prepared[name] for name in prepared if name not in ("type", "time")},
        warnings=tuple(json.loads(row["warnings"])),
    )


def job_summary(row: sqlite3.Row) -> JobSummary:
    return record_of(JobSummary, row, progress=_position(row))


def listed_job(row: sqlite3.Row) -> ListedJob:
    eta = None if row["step"] is None else _eta(row)
    metadata = json.loads(row["metadata"] or "{}")
    return record_of(
        ListedJob,
        row,
        progress=_position(row).model_copy(update={"loss": row["loss"], "eta_seconds": eta}),
        metadata={name: value for name, value in metadata.items() if name != RESERVED},
        members=tuple(map(JobState, row["members"].split(","))) if row["members"] else (),
    )


def _position(row: sqlite3.Row) -> JobProgress:
    return JobProgress(step=row["step"] or 0, total_steps=row["total_steps"])


def _progress(row: sqlite3.Row) -> JobProgress:
    if row["step"] is None:
        return JobProgress()
    values = json.loads(row["progress"])
    return JobProgress(**{**values, "step": row["step"], "total_steps": row["total_steps"], "eta_seconds": _eta(row)})


def _eta(row: sqlite3.Row) -> float | None:
    """Seconds left at the mean pace of this attempt; None before its first step."""
    left = pace(row).seconds_left
    return None if left is None else max(0.0, left)


def pace(row: sqlite3.Row) -> StepPace:
    """The mean pace of an attempt; of its row, or of none."""
    if row["prepared_at"] is None or row["stepped_at"] is None or row["step"] == row["start_step"]:
        return StepPace()
    step_seconds = (row["stepped_at"] - row["prepared_at"]) / (row["step"] - row["start_step"])
    found = StepPace(row["total_steps"] - row["step"], step_seconds, row["stepped_at"])
    return found if math.isfinite(found.seconds_left or 0.0) else StepPace()


def waiting_job(row: sqlite3.Row) -> WaitingJob:
    after = frozenset(row["after"].split(",")) if row["after"] else frozenset()
    return WaitingJob(Queued(*row[: len(Queued._fields)]), row["not_before"], pace(row), after)


def running_job(row: sqlite3.Row) -> RunningJob:
    job = Queued(*row[: len(Queued._fields)])
    return RunningJob(job.job_uuid, JobState(row["state"]), pace(row), job, row["attempt"], row["launched_at"])


def task_record(row: sqlite3.Row) -> NodeTaskRecord:
    run_dir = Path(row["run_dir"]) if "run_dir" in row.keys() else None  # noqa: SIM118, a row has no `in` for its columns
    return record_of(
        NodeTaskRecord, row, places=tuple(row["places"].split(",")), order=row["task_order"], run_dir=run_dir
    )


def point_record(row: sqlite3.Row) -> PointRecord:
    return PointRecord(row["kind"], row["step"], row["epoch"], _utc(row["time"]), json.loads(row["metrics"]))


def samples_record(row: sqlite3.Row) -> SamplesRecord:
    answers = tuple(Answer.model_validate(answer) for answer in json.loads(row["answers"]))
    return SamplesRecord(row["kind"], row["step"], row["epoch"], _utc(row["time"]), answers)


def _utc(seconds: float) -> datetime:
    """A stored time. In a damaged database it may be any number: one beyond the calendar is shown as its end."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), LAST_TIME), UTC)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "state": JobState,
    "reason": Reason,
    "position": json.loads,
    **dict.fromkeys(("finished", "gone"), bool),
    **dict.fromkeys(("run_dir", "path", "resume_from"), Path),
    **dict.fromkeys(("scheduled_at", "created_at", "launched_at", "started_at", "completed_at", "ended_at"), _utc),
    **dict.fromkeys(("joined_at", "seen_at"), _utc),
}
"""Column -> what makes a record's value of its own, which is not NULL; the value of every other column is its own."""


def record_of[Record](kind: type[Record], row: sqlite3.Row, **given: Any) -> Record:
    """A record whose fields are the columns of a row of their names, but for those that are given."""
    for name, decode in _columns(kind):  # type: ignore[arg-type]  # mypy takes a type for unhashable
        if name not in given:
            value = row[name]
            given[name] = value if decode is None or value is None else decode(value)
    return kind(**given)


@cache
def _columns(kind: Any) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """The names of a record's fields, with their decoders."""
    return tuple((field.name, _DECODERS.get(field.name)) for field in fields(kind))

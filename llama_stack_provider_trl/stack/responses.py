"""The answers of the calls: Llama Stack's response models, with null allowed where no true value exists.

Llama Stack's own `PostTrainingMetric` demands a validation loss. A job without validation data has none, and an
invented one would be wrong. Clients of every release accept null there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from ..jobs.decisions.search import NOT_SEARCHED, Searched, Trial, best_trial
from ..jobs.decisions.training_signs import NOTHING_WATCHED, Watched, signs_of
from ..jobs.store.records import NO_CHAIN, AttemptRecord, Chain, ChainedJob, CheckpointRecord, ExportRecord, JobRecord
from ..jobs.supervision.verdict import has_shrunk, shrunk_settings
from ..system.files import RunDir

_NOT_SHOWN: Any = {"search": {"submitted"}}
"""Of a job's specification: the request of a search is that of its first trial, but for the searched fields."""


class PostTrainingJob(BaseModel):
    job_uuid: str


class ListPostTrainingJobsResponse(BaseModel):
    data: list[PostTrainingJob]


class PostTrainingMetric(BaseModel):
    epoch: int
    train_loss: float | None
    validation_loss: float | None
    perplexity: float | None


class Checkpoint(BaseModel):
    identifier: str
    created_at: datetime
    epoch: int
    post_training_job_id: str
    path: str
    training_metrics: PostTrainingMetric | None


class PostTrainingJobStatusResponse(BaseModel):
    job_uuid: str
    status: str
    scheduled_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    resources_allocated: dict[str, Any]
    """Everything that Llama Stack's schema has no field for; docs/reference/api.md lists the keys."""
    checkpoints: list[Checkpoint]


class PostTrainingJobArtifactsResponse(BaseModel):
    job_uuid: str
    checkpoints: list[Checkpoint]


def status_response(
    job: JobRecord,
    checkpoints: Sequence[CheckpointRecord],
    attempts: Sequence[AttemptRecord] = (),
    exports: Sequence[ExportRecord] = (),
    chain: Chain = NO_CHAIN,
    searched: Searched = NOT_SEARCHED,
    watched: Watched = NOTHING_WATCHED,
    config: bool = True,
) -> PostTrainingJobStatusResponse:
    return PostTrainingJobStatusResponse(
        job_uuid=job.job_uuid,
        status=job.status,
        scheduled_at=job.scheduled_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        resources_allocated=resources(job, attempts, exports, chain, searched, watched, config),
        checkpoints=[checkpoint_response(job, checkpoint) for checkpoint in checkpoints],
    )


def artifacts_response(job: JobRecord, checkpoints: Sequence[CheckpointRecord]) -> PostTrainingJobArtifactsResponse:
    shown = [checkpoint_response(job, checkpoint) for checkpoint in checkpoints]
    return PostTrainingJobArtifactsResponse(job_uuid=job.job_uuid, checkpoints=shown)


def resources(
    job: JobRecord,
    attempts: Sequence[AttemptRecord] = (),
    exports: Sequence[ExportRecord] = (),
    chain: Chain = NO_CHAIN,
    searched: Searched = NOT_SEARCHED,
    watched: Watched = NOTHING_WATCHED,
    config: bool = True,
) -> dict[str, Any]:
    """Resources of the job: device, progress, the reason of its failure; with `config` its effective configuration."""
    return {
        "state": job.state.value,
        "age": job.age,
        "detail": job.detail or (job.message if job.reason is None else ""),
        "after": [_chained(one) for one in chain.after],
        "before": [_chained(one) for one in chain.before],
        "search": _search(job, searched),
        "trial": _trial(searched),
        "created_by": job.created_by or None,
        "device": job.device,
        "attempt": job.attempt,
        "retries_used": job.retries_used,
        "attempts": [_attempt(attempt, _trained(job, attempts[:number])) for number, attempt in enumerate(attempts)],
        "progress": job.progress.shown(),
        "result": job.result,
        "warnings": [*job.warnings, *signs_of(job.spec, watched, job.progress.total_steps)],
        **({"effective_config": _effective(job)} if config else {}),
        "log_path": str(job.log_path) if job.log_path else None,
        "trackers": {export.tracker: _tracker(export) for export in exports},
        "error": _error(job),
    }


def _effective(job: JobRecord) -> dict[str, Any]:
    return {**job.spec.flat(exclude=_NOT_SHOWN), "dtype": job.dtype, "recipe": job.effective}


def checkpoint_response(job: JobRecord, checkpoint: CheckpointRecord) -> Checkpoint:
    return Checkpoint(
        identifier=_identifier(job, checkpoint),
        created_at=checkpoint.created_at,
        epoch=checkpoint.epoch,
        post_training_job_id=job.job_uuid,
        path=str(checkpoint.path),
        training_metrics=PostTrainingMetric.model_validate(checkpoint, from_attributes=True),
    )


def _identifier(job: JobRecord, checkpoint: CheckpointRecord) -> str:
    suffix = f"checkpoint-{checkpoint.step}" if checkpoint.kind == "step" else checkpoint.kind
    return f"{job.spec.output_name}-{suffix}"


def _trained(job: JobRecord, before: Sequence[AttemptRecord]) -> dict[str, Any]:
    """Settings of the attempt after `before` that differ from the job's own configuration."""
    smaller = job.spec.in_smaller_parts() if has_shrunk(before) else None
    return {} if smaller is None else {name: smaller.value(name) for name in shrunk_settings(job.spec, smaller)}


def _attempt(attempt: AttemptRecord, trained: dict[str, Any]) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "device": attempt.device,
        "started_at": None if attempt.started_at is None else attempt.started_at.isoformat(),
        "ended_at": None if attempt.ended_at is None else attempt.ended_at.isoformat(),
        "resumed_from": None if attempt.resume_from is None else str(attempt.resume_from),
        "start_step": attempt.start_step,
        "step": attempt.step,
        "reason": attempt.reason,
        "message": attempt.message,
        "log_path": str(RunDir(attempt.run_dir).log),
        **trained,
    }


def _search(job: JobRecord, searched: Searched) -> dict[str, Any] | None:
    """The table of a search's trials; None: the job is no search."""
    search = job.spec.search
    if search is None:
        return None
    best = best_trial(search, searched.trials)
    return {
        "method": search.method,
        "objective": search.objective,
        "direction": search.direction,
        "steps": sum(one.step for one in searched.trials),
        "best": best and {"job_uuid": best.job_uuid, "value": best.result(search.objective), "values": best.values},
        "trials": [
            {
                "number": one.number,
                "job_uuid": one.job_uuid,
                "state": one.state.value,
                "values": one.values,
                "step": one.step,
                "total_steps": one.total_steps,
                "value": one.result(search.objective),
                "pruned": one.pruned or None,
            }
            for one in searched.trials
        ],
    }


def _trial(searched: Searched) -> dict[str, Any] | None:
    """The part of a trial in its search; None: the job is no trial."""
    own: Trial | None = searched.trial
    if own is None:
        return None
    return {"search": searched.search, "number": own.number, "values": own.values, "pruned": own.pruned or None}


def _chained(job: ChainedJob) -> dict[str, Any]:
    return {"job_uuid": job.job_uuid, "state": job.state and job.state.value}


def _tracker(export: ExportRecord) -> dict[str, Any]:
    return {
        "state": "up_to_date" if export.up_to_date else "behind",
        "behind": export.behind,
        "step": export.step if export.step >= 0 else None,
        "project": export.project,
        "run": export.run,
        "error": export.error or None,
    }


def _error(job: JobRecord) -> dict[str, Any] | None:
    if job.reason is None:
        return None
    log_path = str(job.log_path) if job.log_path else None
    return {"reason": job.reason.value, "message": job.advised, "log_path": log_path}

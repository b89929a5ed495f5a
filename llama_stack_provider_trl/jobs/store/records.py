"""Records that the store returns: jobs, checkpoints, metric points and more. Plain values, true when they were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...specs.events import Answer, Failed, ProgressValues, Reason
from ...specs.job import Dtype, JobSpec
from ...system.files import RunDir
from ..decisions.states import REASONS, JobState, shown

UNSTORED = 2**62
"""Age of a job that is not stored yet: it is younger than all that are."""
NodeMode = Literal["open", "cordoned", "draining"]


class JobProgress(ProgressValues):
    """How far the current attempt is; None: not known yet."""

    step: int = 0
    """Optimizer steps done."""
    total_steps: int | None = None
    eta_seconds: float | None = None
    """Seconds of training left at the pace so far, counted from the last metric point."""

    @property
    def percent(self) -> float | None:
        return 100.0 * self.step / self.total_steps if self.total_steps else None

    def shown(self) -> dict[str, Any]:
        """The `progress` of a status: the position in the job, then every value of the last metric point."""
        position = {"step": self.step, "total_steps": self.total_steps, "percent": self.percent}
        return {
            **position,
            "eta_seconds": self.eta_seconds,
            **self.model_dump(include=set(ProgressValues.model_fields)),
        }


@dataclass(frozen=True)
class JobRecord:
    """The record of one job. Times are UTC."""

    spec: JobSpec
    """The effective configuration."""
    state: JobState
    attempt: int
    """Number of the current attempt; 0: none yet."""
    retries_used: int
    scheduled_at: datetime
    started_at: datetime | None = None
    """Time at which the first attempt reported `started`."""
    completed_at: datetime | None = None
    """Time at which the job completed, failed or was cancelled."""
    device: str | None = None
    """The concrete device of the current attempt; several with commas between them."""
    run_dir: Path | None = None
    """Directory of the current attempt."""
    detail: str = ""
    """The cause of the wait, such as a device and its holder."""
    reason: Reason | None = None
    message: str = ""
    """Why it failed: what was found and what was expected."""
    progress: JobProgress = field(default_factory=JobProgress)
    effective: dict[str, Any] | None = None
    """The recipe's report at the beginning of training: rows, parameters, and its own decisions beyond the spec."""
    warnings: tuple[str, ...] = ()
    created_by: str = ""
    """Name of the token that submitted it; empty: not known, as with the inline provider."""
    age: int = UNSTORED
    """Its place in the order of submission, which no other job gets: the lower, the older."""

    @property
    def job_uuid(self) -> str:
        return self.spec.job_uuid

    @property
    def result(self) -> dict[str, Any] | None:
        """What a job that does not train has found or made; None: it trains, or has not finished."""
        return (self.effective or {}).get("result")

    @property
    def devices(self) -> tuple[str, ...]:
        """The concrete devices of the current attempt; empty while it waits."""
        return tuple(self.device.split(",")) if self.device else ()

    @property
    def dtype(self) -> Dtype:
        """The dtype of the current attempt; before the first one, that of the spec."""
        return (
            self.spec.on(self.devices[0].rpartition("/")[2]).compute.dtype if self.devices else self.spec.compute.dtype
        )

    @property
    def status(self) -> str:
        """Llama Stack's name of the state."""
        return shown(self.state)

    @property
    def log_path(self) -> Path | None:
        return RunDir(self.run_dir).log if self.run_dir else None

    @property
    def advice(self) -> str:
        """The remedy for the failure, as a sentence; empty where there is none."""
        return REASONS[self.reason].advice if self.reason else ""

    @property
    def advised(self) -> str:
        """The message, and below it the remedy of a failure."""
        if not self.message or not self.advice:
            return self.message or self.advice
        end = "" if self.message.endswith((".", "?", "!")) else "."
        return f"{self.message}{end}\n{self.advice}"


class ChainedJob(NamedTuple):
    """A job before or after another one."""

    job_uuid: str
    state: JobState | None
    """None: it was deleted."""


class Chain(NamedTuple):
    """The jobs before and after a job."""

    after: tuple[ChainedJob, ...] = ()
    """It comes after these."""
    before: tuple[ChainedJob, ...] = ()
    """These come after it, as far as they are listed."""


NO_CHAIN = Chain()


@dataclass(frozen=True)
class JobSummary:
    """The record of a job in a list. Times are UTC."""

    job_uuid: str
    state: JobState
    algorithm: str | None
    """This and `model`: None where the record is damaged."""
    model: str | None
    priority: int
    progress: JobProgress
    """Metric points with steps only."""
    detail: str
    message: str
    scheduled_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    created_by: str = ""


ListOrder = Literal[
    "", "match", "name", "state", "method", "model", "loss", "eval", "progress", "duration", "created", "owner"
]
"""What a list of jobs is sorted by; empty: the order in which they run."""


@dataclass(frozen=True)
class ListedJob(JobSummary):
    """A job of a list, with what the list compares."""

    reason: Reason | None = None
    """Of its failure."""
    eval_loss: float | None = None
    """Of its last evaluation."""
    model_job: str | None = None
    """The job whose checkpoint it reads as its model, or as an adapter on that; None: its model is of no job."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    members: tuple[JobState, ...] = ()
    """States of the jobs that are folded under it."""
    root: str | None = None
    """The job under which it is folded, itself where it has others; None: it stands alone, or nothing is folded."""
    search: str | None = None
    """The search that it is a trial of."""
    best_loss: float | None = None
    """This and `best_eval_loss`: of a search, the lowest of its trials."""
    best_eval_loss: float | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that is complete on disk."""

    job_uuid: str
    attempt: int
    kind: Literal["step", "final", "merged"]
    step: int
    epoch: int
    """1-based."""
    path: Path
    created_at: datetime
    train_loss: float | None
    validation_loss: float | None
    perplexity: float | None


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt at a job. Times are UTC."""

    attempt: int
    run_dir: Path
    device: str
    launched_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    resume_from: Path | None
    """The checkpoint that it resumed from; None: it began at step 0."""
    start_step: int
    step: int
    reason: Reason | None
    """The reason for its end; None: it finished, or was cancelled or paused."""
    message: str


@dataclass(frozen=True)
class PointRecord:
    """Metrics after one optimizer step."""

    kind: Literal["train", "validation"]
    step: int
    epoch: float
    time: datetime
    metrics: dict[str, float]


@dataclass(frozen=True)
class SamplesRecord:
    """The model's answers to the prompts of a job's `samples`, after optimizer step `step`."""

    kind: Literal["before", "checkpoint", "after"]
    step: int
    epoch: float
    time: datetime
    answers: tuple[Answer, ...]
    """In the order of the prompts."""


@dataclass(frozen=True)
class ExportRecord:
    """What a tracker has of a job's points."""

    job_uuid: str
    tracker: str
    project: str
    run: str
    key: str
    """Random: the tracker's copy carries it, and no other job's does."""
    generation: int
    """Number of the copy, from 1: one is begun again when points in it were superseded by a later attempt."""
    attempt: int
    """The last attempt whose resume point was compared with this cursor."""
    sent_step: int
    """It may have points up to this step."""
    step: int
    """It has accepted all points up to this step; -1: none yet."""
    position: dict[str, Any]
    """The cursor in the tracker's own terms."""
    finished: bool
    """Whether the job has ended and it has all of it."""
    error: str
    """Why the last try failed; empty: it did not."""
    state: JobState
    scheduled_at: datetime
    behind: int
    """Points that it lacks, counted to 10,000; without those of the newest step of a job that has not ended."""

    @property
    def up_to_date(self) -> bool:
        return not self.behind and not self.error


@dataclass(frozen=True)
class Outcome:
    """The report of an attempt's event file about its end, and the position up to which it has been read."""

    offset: int
    """Bytes of `events.jsonl` that are in the store."""
    finished: bool
    failed: Failed | None
    paused_at_step: int | None = None
    """Optimizer steps that were saved when it paused."""


@dataclass(frozen=True)
class NodeRecord:
    """A machine that has joined."""

    name: str
    machine_id: str
    boot_id: str
    report: str
    """Its description of itself, as JSON."""
    joined_at: datetime
    seen_at: datetime
    """Time of its last call, to a few seconds."""
    mode: NodeMode
    revision: int
    """Revision of its orders."""


@dataclass(frozen=True)
class CredentialRecord:
    """A credential with which a node authenticates."""

    node: str
    used: bool
    """Whether the node has called with it."""
    revoked: bool
    """Whether the node was removed."""


@dataclass(frozen=True)
class NodeTaskRecord:
    """The order for one node of an attempt, and its last report."""

    task_id: str
    node: str
    job_uuid: str
    attempt: int
    node_rank: int
    places: tuple[str, ...]
    """Its devices, in the form of the attempt's record."""
    stage: str
    """The stage that was ordered."""
    order: str
    """JSON; `jobs` reads neither this, `report` nor `ending`: they are for `service.cluster`."""
    report: str | None
    ending: str | None
    """The ending of the attempt, once it is decided."""
    gone: bool
    """Whether nothing of it is left on the node."""
    run_dir: Path | None = None
    """Of the attempt; only `NodeTasks.current` returns it."""


@dataclass(frozen=True)
class EventFile:
    """The events of one attempt, as far as the store has ingested them."""

    attempt: int
    run_dir: Path
    end: int
    """Bytes of `events.jsonl` that count."""

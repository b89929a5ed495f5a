"""Records that the store returns: jobs, checkpoints, metric points and more. Plain values, true when they were read."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ..specs.events import Failed, ProgressValues, Reason
from ..specs.job import JobSpec
from ..system.files import RunDir
from .states import REASONS, JobState, shown

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
    """One job as it stands. Times are UTC."""

    spec: JobSpec
    """The effective configuration."""
    state: JobState
    attempt: int
    """Number of the current attempt; 0: none yet."""
    retries_used: int
    scheduled_at: datetime
    started_at: datetime | None = None
    """When the first attempt reported `started`."""
    completed_at: datetime | None = None
    """When the job completed, failed or was cancelled."""
    device: str | None = None
    """The concrete device of the current attempt; several with commas between them."""
    run_dir: Path | None = None
    """Directory of the current attempt."""
    detail: str = ""
    """What the job waits for, such as a device and who holds it."""
    reason: Reason | None = None
    message: str = ""
    """Why it failed: what was found and what was expected."""
    progress: JobProgress = field(default_factory=JobProgress)
    effective: dict[str, Any] | None = None
    """What the recipe reported when training began: rows, parameters, and what it decided beyond the spec."""
    warnings: tuple[str, ...] = ()
    created_by: str = ""
    """Name of the token that submitted it; empty: not known, as with the inline provider."""

    @property
    def job_uuid(self) -> str:
        return self.spec.job_uuid

    @property
    def devices(self) -> tuple[str, ...]:
        """The concrete devices of the current attempt; none while it waits for some."""
        return tuple(self.device.split(",")) if self.device else ()

    @property
    def status(self) -> str:
        """Llama Stack's word for the state."""
        return shown(self.state)

    @property
    def log_path(self) -> Path | None:
        return RunDir(self.run_dir).log if self.run_dir else None

    @property
    def advice(self) -> str:
        """What to do about the failure, as a sentence; empty where there is none."""
        return REASONS[self.reason].advice if self.reason else ""


@dataclass(frozen=True)
class JobSummary:
    """What a list shows of a job. Times are UTC."""

    job_uuid: str
    state: JobState
    algorithm: str | None
    """This and `model`: None where the record is damaged."""
    model: str | None
    priority: int
    progress: JobProgress
    """Steps only."""
    detail: str
    message: str
    scheduled_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    created_by: str = ""


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
    """One try at a job. Times are UTC."""

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
    """Why it ended; None: it finished, or was cancelled or paused."""
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
class Outcome:
    """What the event file of an attempt reports about its end so far, and how far it has been read."""

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
    """To a few seconds."""
    mode: NodeMode
    revision: int
    """Revision of its orders."""


@dataclass(frozen=True)
class CredentialRecord:
    """What a node authenticates with."""

    node: str
    used: bool
    """The node has called with it."""
    revoked: bool
    """The node was removed."""


@dataclass(frozen=True)
class NodeTaskRecord:
    """What one node of an attempt is ordered to do, and its last report."""

    task_id: str
    node: str
    job_uuid: str
    attempt: int
    node_rank: int
    places: tuple[str, ...]
    """Its devices, as the attempt writes them."""
    stage: str
    """The stage that it is to reach."""
    order: str
    """As JSON; nothing in `jobs` reads this, `report` and `ending`: they are for `service.cluster`."""
    report: str | None
    ending: str | None
    """How the attempt ends, once that is decided."""
    gone: bool
    """Nothing of it is left on the node."""
    run_dir: Path | None = None
    """Of the attempt; only `NodeTasks.current` returns it."""


@dataclass(frozen=True)
class EventFile:
    """The events of one attempt, as far as the store has ingested them."""

    attempt: int
    run_dir: Path
    end: int
    """Bytes of `events.jsonl` that count."""

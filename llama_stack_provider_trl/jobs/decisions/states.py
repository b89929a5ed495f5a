"""Job states, their transitions, and the remedy for each reason of a failure. Pure functions."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ...specs.events import Reason


class JobState(StrEnum):
    scheduled = "scheduled"
    """Waits for a device, or for the jobs that it comes after."""
    launching = "launching"
    """Has an attempt and a device; no rank has reported yet."""
    in_progress = "in_progress"
    """Rank 0 has reported `started`."""
    pausing = "pausing"
    """Saves a checkpoint and releases its device."""
    paused = "paused"
    """Holds a checkpoint and no device."""
    cancelling = "cancelling"
    """The cancel is recorded; processes may still exist."""
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"


TERMINAL = frozenset({JobState.completed, JobState.failed, JobState.cancelled})
ACTIVE = frozenset({JobState.launching, JobState.in_progress, JobState.pausing, JobState.cancelling})
"""States in which a task of the job may exist: the supervisor polls these in every pass."""

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.scheduled: frozenset({JobState.launching, JobState.paused, JobState.cancelled, JobState.failed}),
    JobState.launching: frozenset(
        # completed: a short job may start and finish between two polls. scheduled: retried
        {
            *(JobState.in_progress, JobState.scheduled, JobState.pausing, JobState.cancelling),
            *(JobState.completed, JobState.failed, JobState.paused),  # paused: at a rung of its search
        }
    ),
    JobState.in_progress: frozenset(
        {
            *(JobState.pausing, JobState.scheduled, JobState.cancelling, JobState.completed, JobState.failed),
            JobState.paused,  # at a rung of its search
        }
    ),
    JobState.pausing: frozenset({JobState.paused, JobState.cancelling, JobState.completed, JobState.failed}),
    JobState.paused: frozenset({JobState.scheduled, JobState.cancelled}),
    # completed: `finished` wins over a late cancel. failed: an error of the supervisor while cancelling
    JobState.cancelling: frozenset({JobState.cancelled, JobState.completed, JobState.failed}),
    JobState.completed: frozenset(),
    JobState.failed: frozenset(),
    JobState.cancelled: frozenset(),
}

_SHOWN = {
    JobState.launching: "scheduled",
    JobState.paused: "scheduled",
    JobState.pausing: "in_progress",
    JobState.cancelling: "in_progress",
}


def shown(state: JobState) -> str:
    """The state as Llama Stack names it: scheduled, in_progress, completed, failed or cancelled."""
    return _SHOWN.get(state, state.value)


class Remedy(NamedTuple):
    """The remedy for a reason."""

    backoff: float | None
    """Seconds before a retry, doubled with each attempt; None: a retry cannot succeed."""
    advice: str
    """What the user can do next, as a full sentence."""

    @property
    def retryable(self) -> bool:
        return self.backoff is not None


_AGAIN = "submit it again under another job_uuid"
"""A job that has ended keeps its name."""
REASONS: dict[Reason, Remedy] = {
    Reason.invalid_dataset: Remedy(None, f"Change the setting or the rows that the message names and {_AGAIN}."),
    Reason.invalid_model: Remedy(
        None, "Repair the model as the message describes, or name another one: a local directory or a hub id."
    ),
    Reason.invalid_request: Remedy(None, f"Change the request as the message describes and {_AGAIN}."),
    Reason.launch_failed: Remedy(
        10.0,
        f"Correct what the message names (interpreter, data directory, the ports from master_port on) and {_AGAIN}.",
    ),
    Reason.rank_failed: Remedy(1.0, f"Read the end of the log file (log_path), then {_AGAIN}."),
    Reason.out_of_memory: Remedy(
        None, "Lower batch_size or max_seq_length, switch gradient_checkpointing on, or train with LoRA."
    ),
    Reason.does_not_fit: Remedy(
        None, "Change the request as the message describes; the provider option preflight=warn tries it all the same."
    ),
    Reason.diverged: Remedy(
        None,
        "Lower the learning rate, add warmup steps, or use dtype fp32 if it was not, and check the rows if it happens "
        "again.",
    ),
    Reason.not_sharded: Remedy(None, "This is a bug: report it with the job's log file and versions."),
    Reason.export_failed: Remedy(
        10.0, "Check the disk that checkpoints are written to; if it happens again, report it as a bug."
    ),
    Reason.not_promoted: Remedy(
        None, "Train or evaluate again, or change promote_if, and submit the export under another job_uuid."
    ),
    Reason.disk_full: Remedy(30.0, f"Free disk space where checkpoints and jobs are written, then {_AGAIN}."),
    Reason.hung: Remedy(2.0, "Read the end of the log file (log_path); if it hangs again, report it as a bug."),
    Reason.timed_out: Remedy(
        None, "Raise max_duration, or train less: fewer epochs, a lower max_steps_per_epoch. Its checkpoints are kept."
    ),
    Reason.node_lost: Remedy(
        2.0, f"The machine restarted or the training processes were killed from outside: {_AGAIN}."
    ),
    Reason.predecessor_failed: Remedy(
        None,
        "Correct the job that it waited for and submit that one again under another job_uuid, then this one with "
        "the new name in `after`.",
    ),
    Reason.no_trial_completed: Remedy(
        None, "Read why its trials ended (their own status), correct the request and submit it under another job_uuid."
    ),
    Reason.no_proposal: Remedy(
        None,
        "Correct what the message names (such as the extra `search`, which installs Optuna) and submit it again under "
        "another job_uuid.",
    ),
    Reason.no_result: Remedy(
        None, "The training process ended early by itself: read the end of the log file (log_path)."
    ),
    Reason.internal: Remedy(None, "This is a bug: report it with the server's log and the job's log file."),
}

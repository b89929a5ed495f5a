"""Decides how a job ended, from its event file and the observation of its processes. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...errors import InvalidRequest, InvalidRows, JobConflict, JobFailure
from ...launch.base import Ended, Observation
from ...specs.chat_templates import UNENDED
from ...specs.events import Failed, Reason
from ...specs.job import JobSpec
from ...specs.search import rung_steps
from ...system.cpu_timer import ENDED_BY
from ..decisions.states import REASONS, JobState
from ..store.records import AttemptRecord, JobRecord, Outcome

_TRACEBACK_LINES = 12
_LOST_LINES = 3
"""Lines of the log in the message of a lost node: the log does not show why the node is gone."""


class Verdict(NamedTuple):
    state: JobState
    reason: Reason | None = None
    message: str = ""


def failed(reason: Reason, message: str) -> Verdict:
    """The end of a job that cannot go on."""
    return Verdict(JobState.failed, reason, message)


def unstarted(error: JobConflict | InvalidRequest | JobFailure) -> Verdict:
    """The end of a job whose attempt cannot start, since what it reads or writes is not as it was at POST."""
    match error:
        case JobFailure():
            return failed(Reason(error.reason), error.message)
        case JobConflict():
            return failed(Reason.invalid_request, str(error))
        case InvalidRows():
            return failed(Reason.invalid_dataset, str(error))
    return failed(Reason.invalid_model, str(error))


def verdict(
    state: JobState, outcome: Outcome, seen: Observation, log_tail: str, node: str = "", log_file: str = ""
) -> Verdict:
    """Decide on a job all of whose processes are gone and all of whose events are read.

    The event file comes first, since an exit code is ambiguous: a trainer may crash during its exit after it has
    finished, and one that was cancelled may exit with any code.

    Args:
        state: the job's state; `cancelling` makes everything but `finished` a cancel, `pausing` everything that
            another attempt can repair a pause.
        log_tail: the last lines that the training process printed.
        log_file: the file that has all of them.
        node: of the rank that reported the failure; empty: the job ran on the service's machine only.
    """
    if outcome.finished:
        return Verdict(JobState.completed)
    if state is JobState.cancelling:
        return Verdict(JobState.cancelled)
    failure = _failure(outcome, seen, log_tail, node, log_file)
    if state is JobState.pausing and (failure.reason is None or REASONS[failure.reason].retryable):
        return Verdict(JobState.paused)  # however it ended: it resumes from its last checkpoint
    return failure


def may_shrink(job: JobRecord, attempts: Sequence[AttemptRecord], reason: Reason | None) -> bool:
    """Whether a job whose attempt has just failed is tried again in less memory: with a smaller batch, and with no more
    than any job takes for additions in a fixed order.

    Not before its first step: then the batch is not what needs too much memory.
    """
    if reason is not Reason.out_of_memory or not job.spec.lifecycle.oom_retry or job.state is not JobState.in_progress:
        return False
    if job.effective is None or has_shrunk(attempts):
        return False
    effective, smaller = job.effective.get("effective") or {}, job.spec.in_smaller_parts()
    if smaller is None or "accumulator_bytes" in effective:
        return "accumulator_bytes" in effective
    has_changed = "merged_micro_steps" in effective or effective.get("kept_attention") == "used"
    return has_changed or not {"merge_micro_batches", "keep_attention"}.issuperset(shrunk_settings(job.spec, smaller))


def is_at_rung(job: JobRecord, outcome: Outcome) -> bool:
    """Whether a trial has ended at a step where its search compares it with the others."""
    planned = job.progress.total_steps
    return planned is not None and outcome.paused_at_step in rung_steps(job.spec.pruning, planned)


def has_shrunk(attempts: Iterable[AttemptRecord]) -> bool:
    """Whether the attempts that follow these train with a smaller batch: one of them ran out of memory."""
    return any(tried.reason is Reason.out_of_memory for tried in attempts)


def shrunk_settings(spec: JobSpec, smaller: JobSpec) -> tuple[str, ...]:
    """The fields in which a job differs from the same one in less memory (`JobSpec.in_smaller_parts`)."""
    if smaller.data.batch_size != spec.data.batch_size:
        return ("batch_size", "gradient_accumulation_steps")
    names = ("gradient_sync", "merge_micro_batches", "keep_attention")
    return tuple(name for name in names if smaller.value(name) != spec.value(name))


def _failure(outcome: Outcome, seen: Observation, log_tail: str, node: str, log_file: str) -> Verdict:
    if outcome.failed is not None:
        return failed(outcome.failed.reason, _reported(outcome.failed, node))
    if seen.ended is Ended.timed_out:
        saved = f" at step {outcome.paused_at_step}" if outcome.paused_at_step is not None else ""
        return failed(Reason.timed_out, f"max_duration was reached{saved}.")
    if seen.ended is Ended.hung:
        stacks = _with_lines("no progress for hang_timeout seconds.", "What its ranks were doing", seen.stacks)
        return failed(Reason.hung, _with_lines(stacks, "Last lines of its log", log_tail))
    if seen.ended is Ended.out_of_memory:
        return failed(Reason.out_of_memory, f"the training was ended: {seen.detail}.")
    if seen.ended is Ended.too_many_processes:
        return failed(Reason.rank_failed, f"the training was ended: {seen.detail}.")
    if outcome.paused_at_step is not None:
        return Verdict(JobState.paused)
    if seen.launch_error:
        return failed(Reason.launch_failed, seen.launch_error)
    reason, message = _unexplained(seen)
    if reason is Reason.node_lost:
        lines = "\n".join(log_tail.splitlines()[-_LOST_LINES:])
        title = f"Last lines of its log ({log_file})" if log_file else "Last lines of its log"
        return failed(reason, _with_lines(message, title, lines))
    return failed(reason, _with_lines(message, "Last lines of its log", log_tail))


def _reported(event: Failed, node: str) -> str:
    lines = event.traceback.strip().splitlines()[-_TRACEBACK_LINES:]
    who = " on ".join(filter(None, [f"rank {event.rank}" if event.rank else "", f"node {node}" if node else ""]))
    message = f"{who}: {event.message}" if who else event.message
    return _with_lines(message, "End of the traceback", "\n".join(lines))


def _unexplained(seen: Observation) -> tuple[Reason, str]:
    """Reason and message for an end without an event."""
    if seen.exit_code is None:
        why = f"{seen.detail}: " if seen.detail else ""
        return Reason.node_lost, f"{why}the training process is gone and its exit status is unknown."
    who = "the training process" if seen.rank is None else f"rank {seen.rank}"
    if seen.exit_code == 0:
        return Reason.no_result, f"{who} exited with 0 but never reported a result."
    if seen.exit_code > 0:
        return Reason.rank_failed, f"{who} exited with {seen.exit_code} and no explanation."
    if seen.exit_code == -ENDED_BY:
        return Reason.invalid_model, f"{who} was ended: {UNENDED}."
    message = f"{who} was killed by {_signal_name(-seen.exit_code)}."
    if seen.exit_code == -signal.SIGKILL:
        message += (
            " The likely cause is the kernel's out-of-memory killer (check with `dmesg | grep -i oom`):"
            " lower batch_size or max_seq_length, or train with LoRA."
        )
    return Reason.rank_failed, message


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _with_lines(message: str, title: str, lines: str) -> str:
    return f"{message}\n{title}:\n{lines}" if lines else message

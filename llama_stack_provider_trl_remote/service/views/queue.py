"""Jobs as lists show them: in the order in which they run, filtered by state and name."""

from __future__ import annotations

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.records import JobSummary
from llama_stack_provider_trl.jobs.states import JobState, shown
from llama_stack_provider_trl.jobs.store import Store

from ..http.bodies import JobRow, QueueResponse


def queue_page(store: Store, state: JobState | None, search: str | None, limit: int, offset: int) -> QueueResponse:
    """One page of the queue, and how many jobs there are.

    Args:
        state: None: any.
        search: part of the names of jobs, in any case; None or empty: all.
        offset: jobs before this page.
    """
    with store.snapshot():
        jobs, matching = store.queue_page(state, search, limit, offset)
        counts = store.count()
    return QueueResponse(
        data=[job_row(job) for job in jobs],
        matching=matching,
        counts={state: counts[state] for state in JobState if state in counts},
    )


def states_named(text: str) -> list[JobState]:
    """The states that a state of Llama Stack, or one of ours, stands for. Raises InvalidRequest."""
    if text in (JobState.launching, JobState.pausing, JobState.paused, JobState.cancelling):
        return [JobState(text)]
    states = [state for state in JobState if shown(state) == text]
    if not states:
        raise InvalidRequest("status", text, f"expected one of {', '.join(JobState)}")
    return states


def job_row(job: JobSummary) -> JobRow:
    """One job of a list."""
    return JobRow(
        job_uuid=job.job_uuid,
        status=shown(job.state),
        state=job.state,
        algorithm=job.algorithm,
        model=job.model,
        priority=job.priority,
        step=job.progress.step,
        total_steps=job.progress.total_steps,
        percent=job.progress.percent,
        detail=job.detail or job.message.partition("\n")[0] or None,
        created_by=job.created_by or None,
        scheduled_at=job.scheduled_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
    )

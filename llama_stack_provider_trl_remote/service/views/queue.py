"""Jobs as lists show them: in the order in which they run, filtered by state and name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.placement import Node, Obtainable
from llama_stack_provider_trl.jobs.decisions.prediction import PredictedStart, predict
from llama_stack_provider_trl.jobs.decisions.states import JobState, shown
from llama_stack_provider_trl.jobs.store.records import JobSummary
from llama_stack_provider_trl.jobs.store.store import Store

from ..http.bodies import JobRow, QueueResponse, QueueRow

_AHEAD = 200
"""Waiting jobs whose start is predicted, the first of the queue: more would take longer than the page itself."""


def queue_page(
    store: Store,
    state: JobState | None,
    search: str | None,
    limit: int,
    offset: int,
    nodes: Sequence[Node] = (),
    now: float | None = None,
    obtainable: Sequence[Obtainable] = (),
    *,
    preempts: bool = False,
) -> QueueResponse:
    """One page of the queue, and how many jobs there are.

    Args:
        state: None: any.
        search: part of the names of jobs, in any case; None or empty: all.
        offset: jobs before this page.
        nodes: on which they run, the service's own machine first; empty: not known here.
        now: seconds since the epoch; None: the present.
        obtainable: what pools may give.
        preempts: whether critical jobs have others save and wait.
    """
    with store.snapshot():
        jobs, matching = store.queue_page(state, search, limit, offset)
        counts = store.count()
        starts = _starts(store, jobs, nodes, time.time() if now is None else now, obtainable, preempts)
    return QueueResponse(
        data=[_queue_row(job, starts) for job in jobs],
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


def _starts(
    store: Store,
    jobs: Sequence[JobSummary],
    nodes: Sequence[Node],
    now: float,
    obtainable: Sequence[Obtainable],
    preempts: bool,
) -> Mapping[str, PredictedStart]:
    """The starts of the first waiting jobs, where any of `jobs` waits."""
    if not nodes or not any(job.state is JobState.scheduled for job in jobs):
        return {}
    waiting, running = store.ahead.waiting(_AHEAD), store.ahead.running()
    return predict(waiting, nodes, store.holders(), running, now, obtainable, preempts=preempts)


def _queue_row(job: JobSummary, starts: Mapping[str, PredictedStart]) -> QueueRow:
    values: dict[str, Any] = dict(job_row(job))
    if job.state is JobState.scheduled and starts:
        start = starts.get(job.job_uuid, PredictedStart(None, f"more than {_AHEAD} jobs are before it"))
        values["predicted_start"] = None if start.at is None else datetime.fromtimestamp(start.at, UTC)
        values["unpredicted"] = start.why or None
    return QueueRow(**values)


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

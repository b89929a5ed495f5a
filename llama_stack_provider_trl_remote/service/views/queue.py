"""Jobs as lists show them: in the order in which they run, filtered by state and name."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from llama_stack_provider_trl.jobs.decisions.placement import Node, Obtainable
from llama_stack_provider_trl.jobs.decisions.prediction import PredictedStart, predict
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState, shown
from llama_stack_provider_trl.jobs.store.records import JobRecord, JobSummary, ListedJob, ListOrder
from llama_stack_provider_trl.jobs.store.store import Store

from ..http.bodies import JobRow, QueueResponse, QueueRow

Sort = Literal[
    "",
    "match",
    "name",
    "-name",
    "state",
    "-state",
    "method",
    "-method",
    "model",
    "-model",
    "loss",
    "-loss",
    "eval",
    "-eval",
    "progress",
    "-progress",
    "duration",
    "-duration",
    "created",
    "-created",
    "owner",
    "-owner",
]
"""What a list is sorted by: a column, with a minus the largest first; empty: the order in which jobs run. match: names
that begin with what is searched, names that have it, then all others."""
MOST_MEMBERS = 200
"""Jobs of a family that are shown under its first one."""
MOST_TOGETHER = 1000
"""Jobs of all families of a page: each is a row, and 10,000 rows take seconds and 13 MiB."""
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
    owner: str | None = None,
    sort: Sort = "",
    folded: bool = False,
) -> QueueResponse:
    """One page of the queue, and how many jobs there are.

    Args:
        search: part of the names of jobs, of their models or of their metadata, in any case; None or empty: all.
        nodes: on which they run, the service's own machine first; empty: not known here.
        now: seconds since the epoch; None: the present.
        obtainable: what pools may give.
        preempts: whether critical jobs have others save and wait.
        owner: name of the token that submitted them; None: any.
        sort: a column, with a minus the largest first; empty: the order in which they run.
        folded: of trials and chains only the first job.
    """
    order, descending = order_of(sort)
    with store.snapshot():
        jobs, matching = store.queue_page(
            *(state, search, limit, offset), owner=owner, order=order, descending=descending, folded=folded
        )
        counts = store.count()
        starts = _starts(store, jobs, nodes, time.time() if now is None else now, obtainable, preempts)
    return QueueResponse(
        data=[_queue_row(job, starts) for job in jobs],
        matching=matching,
        counts={state: counts[state] for state in JobState if state in counts},
    )


def members_of(store: Store, roots: Sequence[str], opened: Sequence[str], sort: Sort) -> list[QueueRow]:
    """The jobs that stand under some jobs of a folded page: of those in `opened` all, of others what runs. Of each
    at most `MOST_MEMBERS`, and of all `MOST_TOGETHER`, what runs before all others."""
    if not roots:
        return []
    found = store.families(roots, opened, *order_of(sort), MOST_MEMBERS, MOST_TOGETHER)
    return [_queue_row(job, {}) for job in found]


def order_of(sort: Sort) -> tuple[ListOrder, bool]:
    """The column that a list is sorted by, and whether the largest comes first."""
    column: Any = sort.removeprefix("-")
    return column, sort.startswith("-")


def start_of(
    store: Store,
    job_uuid: str,
    nodes: Sequence[Node],
    obtainable: Sequence[Obtainable],
    *,
    preempts: bool,
    now: float | None = None,
) -> QueueRow:
    """The name of a job with its predicted start, as the list has it, where it waits. Raises JobNotFound."""
    with store.snapshot():
        job = store.get(job_uuid)
        starts = _starts(store, [job], nodes, time.time() if now is None else now, obtainable, preempts)
    return QueueRow(job_uuid=job_uuid, **_start(job_uuid, starts))


def _starts(
    store: Store,
    jobs: Sequence[ListedJob | JobRecord],
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


def _queue_row(job: ListedJob, starts: Mapping[str, PredictedStart]) -> QueueRow:
    values: dict[str, Any] = dict(job_row(job))
    loss, eval_loss = job.progress.loss, job.eval_loss
    values |= {"loss": _finite(job.best_loss if loss is None else loss), "reason": job.reason}
    values |= {"eval_loss": _finite(job.best_eval_loss if eval_loss is None else eval_loss)}
    values |= {
        "metadata": job.metadata,
        "search": job.search,
        "root": job.root,
        "model_job": job.model_job,
        "members": Counter(job.members),
    }
    if job.state not in TERMINAL:
        values["eta_seconds"] = job.progress.eta_seconds
    if job.state is JobState.scheduled:
        values |= _start(job.job_uuid, starts)
    return QueueRow(**values)


def _start(job_uuid: str, starts: Mapping[str, PredictedStart]) -> dict[str, Any]:
    """The fields of a row that have the start of a waiting job; empty: nothing predicts any."""
    if not starts:
        return {}
    start = starts.get(job_uuid, PredictedStart(None, f"more than {_AHEAD} jobs are before it"))
    at = None if start.at is None else datetime.fromtimestamp(start.at, UTC)
    return {"predicted_start": at, "unpredicted": start.why or None}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


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

"""Cancels of jobs: recorded in the database, or kept beside it while that cannot be written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ..errors import DamagedRecord, JobConflict, JobNotFound, StoreError, shortage_of
from ..specs.events import Reason
from .cancel_orders import CancelOrder, CancelOrders
from .records import JobRecord
from .states import ACTIVE, TERMINAL, JobState


class CancellableJobs(Protocol):
    """What of a store is used here."""

    cancels: CancelOrders

    def get(self, job_uuid: str) -> JobRecord: ...

    def transition(
        self,
        job_uuid: str,
        attempt: int,
        source: JobState,
        target: JobState,
        reason: Reason | None = None,
        message: str = "",
    ) -> bool: ...


def request_cancel(jobs: CancellableJobs, job_uuid: str, message: str) -> JobRecord:
    """See `Store.request_cancel`."""
    try:
        return _record(jobs, job_uuid, message)
    except StoreError as error:
        if shortage_of(error) is None:
            raise
        return _keep(jobs, job_uuid, message, error)


def record_kept(jobs: CancellableJobs) -> None:
    """See `Store.record_kept_cancels`."""
    for order in jobs.cancels.pending():
        try:
            with suppress(JobNotFound, JobConflict):
                if jobs.get(order.job_uuid).scheduled_at.timestamp() == order.scheduled_at:
                    _record(jobs, order.job_uuid, order.message)
        except DamagedRecord:
            continue  # logged; it holds up no other job, and its cancel stays in case it is repaired
        jobs.cancels.remove(order)


def _keep(jobs: CancellableJobs, job_uuid: str, message: str, error: StoreError) -> JobRecord:
    job = jobs.get(job_uuid)
    if job.state in TERMINAL:
        raise error
    if not jobs.cancels.add(CancelOrder(job_uuid, job.scheduled_at.timestamp(), message)):
        raise StoreError(
            f"the cancel of job {job_uuid!r} is in memory only ({error}): its training is being ended, but the "
            "next start would begin it again; repeat the cancel when the disk can be written"
        ) from error
    return replace(job, state=JobState.cancelling if job.state in ACTIVE else JobState.cancelled)


def _record(jobs: CancellableJobs, job_uuid: str, message: str) -> JobRecord:
    while True:
        job = jobs.get(job_uuid)
        if job.state in (JobState.cancelling, JobState.cancelled):
            return job
        if job.state in TERMINAL:
            raise JobConflict(
                f"job {job_uuid!r} is {job.state} already: only a job that has not ended can be cancelled"
            )
        target = JobState.cancelling if job.state in ACTIVE else JobState.cancelled
        # Not applied if the job has changed its state in the meantime: read it again.
        jobs.transition(job_uuid, job.attempt, job.state, target, None, message)

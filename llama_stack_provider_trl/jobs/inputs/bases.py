"""Finds the job that a request names as its base, and checks its checkpoint when the job starts."""

from __future__ import annotations

from ...errors import InvalidRequest, JobNotFound
from ...requests.bases import Base, NamedJob, base_job_of
from ...requests.settings import Request
from ...specs.job import JobSpec
from ...system.files import is_whole
from ..decisions.states import JobState
from ..store.store import Store


def find_base(request: Request, store: Store) -> NamedJob | None:
    """The job that `model` names as `job:NAME`; None: it names none, or there is no such job.

    Raises:
        InvalidRequest: that is no name of a job, or of a search that has not completed.
    """
    job_uuid = base_job_of(request)
    if job_uuid is None:
        return None
    try:
        job = store.get(job_uuid)
    except JobNotFound:
        return None
    if job.spec.search is not None:
        best = store.searches.best(job_uuid, job.spec.search) if job.state is JobState.completed else None
        if best is None:
            hint = f"job {job_uuid!r} is a search and is {job.state}: its best trial is known once it has completed"
            raise InvalidRequest("model", request.model, hint)
        job_uuid, job = best, store.get(best)
    names = tuple(checkpoint.path.name for checkpoint in store.checkpoints(job_uuid))
    return NamedJob(job.spec, job.state is JobState.completed, names)


def check_base(spec: JobSpec) -> None:
    """Return if the checkpoint that a job begins with is complete on disk.

    Raises:
        InvalidRequest: names the job and the checkpoint.
    """
    for directory in Base(spec.source.model, adapter=spec.adapter, jobs=spec.bases).checkpoints():
        if not is_whole(directory):
            named = spec.bases[0]
            value = f"job:{named.job_uuid}/{named.checkpoint}"
            hint = f"{directory} is damaged or gone: train job {named.job_uuid!r} again, or name another checkpoint"
            raise InvalidRequest("model", value, hint)

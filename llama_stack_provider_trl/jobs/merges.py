"""What the models of a request to merge are, and the jobs that make them."""

from __future__ import annotations

from pathlib import Path

from ..errors import InvalidRequest, StoreError
from ..requests.bases import Base, resolve_base
from ..requests.kinds import NO_ROWS, MergeRequest, for_work
from ..requests.options import ProviderOptions
from ..requests.settings import Settings
from ..specs.beginnings import BaseJob
from ..specs.job import DatasetRef, JobSpec
from ..specs.kinds import MergeWork
from ..system.files import is_whole, put_lines
from .bases import find_base
from .store import Store


def merged_bases(request: MergeRequest, settings: Settings, store: Store) -> list[Base]:
    """What each model of a request is.

    Raises:
        InvalidRequest: one of them cannot be used; names its field.
    """
    found = []
    for field, model in request.named():
        one = request.as_training(model)
        try:
            named = find_base(one, store)
            found.append(resolve_base(one, *for_work(one, ProviderOptions(), settings, named), named))
        except InvalidRequest as error:
            raise InvalidRequest(field, model, error.hint) from error
    return found


def after_all(spec: JobSpec, found: list[Base]) -> JobSpec:
    """The job, which comes after all jobs that make one of its models, and needs their checkpoints."""
    jobs: dict[BaseJob, None] = dict.fromkeys(base.jobs[0] for base in found if base.jobs)
    names = [job.job_uuid for job in jobs]
    return spec.model_copy(
        update={"bases": tuple(jobs), "after": tuple(dict.fromkeys([*names, *spec.after]))},
    )


def no_rows(directory: Path) -> DatasetRef:
    """The dataset of a job that reads no rows. Raises StoreError."""
    try:
        blob = put_lines(directory, ())
    except OSError as error:
        raise StoreError(f"{directory} cannot be written: {error}") from error
    return DatasetRef(dataset_id=NO_ROWS, path=blob.path, sha256=blob.sha256, num_rows=0)


def check_merged(work: MergeWork) -> None:
    """Return if the checkpoints of jobs that are merged are complete on disk. Raises InvalidRequest."""
    for path in work.from_jobs:
        if not is_whole(path):
            hint = "this checkpoint is damaged or gone: train its job again, or name another checkpoint"
            raise InvalidRequest("models", str(path), hint)

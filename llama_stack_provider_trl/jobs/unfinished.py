"""What jobs that have not ended will write: which models they train, in which way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..specs.job import JobSpec
from .database import Database


class Unfinished(NamedTuple):
    """Jobs that have not ended, and whose checkpoints are alike."""

    job_uuid: str
    """Of one of them."""
    model: str
    revision: str | None
    dtype: str
    is_adapter: bool
    merges: bool
    """Besides the adapter, the merged model is written."""
    work: str | None
    """What they do in place of training."""
    directory: str
    """In which the directories of their checkpoints lie."""


def unfinished(database: Database) -> Sequence[Unfinished]:
    """The kinds of jobs that have not ended. Raises StoreError."""
    return [
        Unfinished(*row)._replace(is_adapter=bool(row["is_adapter"]), merges=bool(row["merges"]))
        for row in database.select("select_unfinished", {})
    ]


def unfinished_job(spec: JobSpec) -> Unfinished:
    """The same of one job, which has not ended."""
    return Unfinished(
        *(spec.job_uuid, spec.model, spec.revision, spec.dtype, spec.lora is not None, spec.merge_adapter),
        work=None if spec.work is None else spec.work.kind,
        directory=f"{spec.checkpoint_dir.parent}/",
    )

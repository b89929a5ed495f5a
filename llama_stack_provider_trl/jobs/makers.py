"""Names of datasets that jobs are to make. A job keeps its name from the transaction that stores it until it has ended.

So no second job, and no client, takes it meanwhile: the job would fail after all its answers were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import InvalidRequest
from ..specs.job import JobSpec
from ..specs.kinds import GenerateSpec
from .database import Database, Execute

FIELD = "output.dataset_id"


def refuse_promised_name(execute: Execute, spec: JobSpec) -> None:
    """Refuse a job that is to make a dataset which another one is to make, in the transaction that stores the job.

    Raises:
        InvalidRequest: names the other job.
    """
    if not isinstance(spec.work, GenerateSpec):
        return
    dataset_id = spec.work.output_dataset_id
    if (maker := _maker(execute, dataset_id, spec.job_uuid)) is not None:
        hint = f"job {maker!r} is to make a dataset of this name: choose another one"
        raise InvalidRequest(FIELD, dataset_id, hint)


@contextmanager
def no_new_maker(database: Database, dataset_id: str) -> Iterator[str | None]:
    """Yields the job that is to make a dataset of this name, if there is one. No job is stored in the block, a write
    transaction, which must be quick. May raise StoreError."""
    with database.transaction() as execute:
        yield _maker(execute, dataset_id)


def _maker(execute: Execute, dataset_id: str, other_than: str = "") -> str | None:
    row = execute("select_maker", {"dataset_id": dataset_id, "other_than": other_than}).fetchone()
    return None if row is None else str(row["job_uuid"])

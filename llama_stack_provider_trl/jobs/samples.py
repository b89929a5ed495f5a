"""Reads the model's answers to the prompts of a job's `samples`."""

from __future__ import annotations

from collections.abc import Sequence

from .reader import JobReader
from .records import SamplesRecord
from .row_mapping import samples_record


def read_samples(
    jobs: JobReader, job_uuid: str, limit: int = -1, offset: int = 0
) -> tuple[Sequence[SamplesRecord], int]:
    """Sets of answers in the order in which they were taken, and their number without `limit` and `offset`."""
    rows = jobs.database.select("select_samples", {"job_uuid": job_uuid, "limit": limit, "offset": offset})
    (count,) = jobs.database.select("count_samples", {"job_uuid": job_uuid})
    return [samples_record(row) for row in rows], count["sets"]

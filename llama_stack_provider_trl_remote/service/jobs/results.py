"""Keeps what jobs make for further ones."""

from __future__ import annotations

from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.specs.work import ROWS

from ..datasets.registry import DatasetRegistry


def keep_result(datasets: DatasetRegistry, job: JobRecord) -> None:
    """Register the dataset that a job has made, before the job counts as completed.

    Raises:
        InvalidRequest, JobConflict, StoreError.
    """
    if (dataset_id := job.spec.does.made_dataset) is not None:
        datasets.register_made(
            dataset_id,
            job.spec.checkpoint_dir / ROWS,
            (job.result or {}).get("dataset") or {},
            job.job_uuid,
            job.created_by,
        )

"""Finds the rows that a request names: registered, uploaded, or those that another job is to make; and keeps those that
a job has made."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from llama_stack_provider_trl.jobs.inputs.made_rows import promised_rows
from llama_stack_provider_trl.jobs.inputs.merges import no_rows
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import Datasets
from llama_stack_provider_trl.requests.data import rows_job_of
from llama_stack_provider_trl.specs.job import DataFormat, DatasetRef, RowNames, RowUse
from llama_stack_provider_trl.specs.work import ROWS
from llama_stack_provider_trl.system.offload import in_work_thread

from ..datasets.blobs import Blobs
from ..datasets.registry import DatasetRegistry
from ..space import Space, Use


class RowSources:
    """Makes the sources of rows that submissions read."""

    def __init__(self, datasets: DatasetRegistry, blobs: Blobs, space: Space) -> None:
        self._datasets, self._blobs, self._space = datasets, blobs, space

    def of(self, digests: Mapping[str, str] | None, store: Store) -> Datasets:
        """The source of the rows for a body's dataset ids.

        Args:
            digests: dataset id -> digest of an uploaded blob.
            store: the jobs that may make rows.
        """
        uploaded = digests or {}

        async def rows(
            dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
        ) -> tuple[DatasetRef, list[str]]:
            if rows_job_of(dataset_id) and (promised := await in_work_thread(promised_rows, dataset_id, use, store)):
                return promised, []
            if dataset_id in uploaded:
                found = await self._datasets.fetch_blob(dataset_id, uploaded[dataset_id], use, data_format, names)
            else:
                found = await self._datasets.fetch(dataset_id, use, data_format, names)
            # A job writes its rows again, as parts of them or as tokens.
            with suppress(FileNotFoundError):  # rows of a dataset that is deleted now: the store says so
                size = found[0].path.stat().st_size
                await in_work_thread(self._space.require, Use.ordered, self._blobs.directory, size)
            return found

        return rows

    async def none(
        self, dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
    ) -> tuple[DatasetRef, list[str]]:
        """The rows of a job that reads none."""
        await in_work_thread(self._space.require, Use.ordered, self._blobs.directory)
        return await in_work_thread(no_rows, self._blobs.directory), []


def keep_result(datasets: DatasetRegistry, job: JobRecord) -> None:
    """Register the dataset that a job has made, before the job counts as completed. Raises InvalidRequest, JobConflict,
    StoreError."""
    if (dataset_id := job.spec.does.made_dataset) is not None:
        datasets.register_made(
            dataset_id,
            job.spec.checkpoint_dir / ROWS,
            (job.result or {}).get("dataset") or {},
            job.job_uuid,
            job.created_by,
        )

"""`inline::trl`: Llama Stack's six post-training calls on the job engine.

No `from __future__ import annotations` here: Llama Stack up to 0.4 builds its HTTP schema from these annotations, and
strings would turn every POST into a 500.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from .compat import Api, NeedsRequestProviderData, read_rows, to_http
from .config import TrlConfig
from .devices import usable_devices
from .errors import InvalidRows, StoreError, TrlError
from .files import put_rows
from .jobs.store import DATABASE, Store
from .jobs.supervisor import Supervisor
from .launch.local import LocalLauncher
from .options import ProviderOptions
from .recipes.rows import check_rows
from .recipes.spec import Algorithm, DataFormat, DatasetRef
from .requests import PreferenceOptimizeRequest, SupervisedFineTuneRequest, TrainingConfig
from .resolve import Request, Settings, resolve
from .responses import (
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobStatusResponse,
    artifacts_response,
    status_response,
)


def answers_clearly[Answer](
    method: Callable[..., Coroutine[Any, Any, Answer]],
) -> Callable[..., Coroutine[Any, Any, Answer]]:
    """Turn our errors into those that Llama Stack maps to a status code and a readable text."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Answer:
        try:
            return await method(*args, **kwargs)
        except TrlError as error:
            raise to_http(error) from error

    return call


class TrlPostTraining(NeedsRequestProviderData):
    """The provider object inside Llama Stack. Training happens in processes of its own; this imports no torch."""

    def __init__(self, config: TrlConfig, deps: dict[Any, Any]) -> None:
        self.datasets, self.datasetio = deps[Api.datasets], deps[Api.datasetio]
        devices = usable_devices(config.device)
        self.settings = Settings(
            data_dir=config.data_dir,
            devices=tuple(devices),
            max_seq_length=config.max_seq_length,
            checkpoint_roots=tuple(config.checkpoint_roots),
            save_steps=config.save_steps,
            keep_last=config.keep_last,
            retries=config.retries,
            max_duration=config.max_duration,
            priority=config.priority,
            min_free_bytes=config.min_free_disk_mb << 20,
        )
        self.store = Store(config.data_dir / DATABASE)
        self.supervisor = Supervisor(
            self.store, LocalLauncher(), devices, config.data_dir, hang_timeout=config.hang_timeout
        )

    async def initialize(self) -> None:
        """Start supervising. A thread, not a task: the event loop of this call is closed before the first request."""
        self.supervisor.start()

    async def shutdown(self) -> None:
        """Stop supervising; trainings go on and are taken up at the next start."""
        await asyncio.to_thread(self.supervisor.stop)
        self.store.close()

    @answers_clearly
    async def supervised_fine_tune(
        self,
        job_uuid: str,
        training_config: TrainingConfig,
        hyperparam_search_config: dict[str, Any] | None = None,
        logger_config: dict[str, Any] | None = None,
        model: str | None = None,
        checkpoint_dir: str | None = None,
        algorithm_config: dict[str, Any] | None = None,
    ) -> PostTrainingJob:
        """Queue a supervised fine-tuning job; docs/api.md says what every field does."""
        request = SupervisedFineTuneRequest(
            job_uuid=job_uuid,
            training_config=training_config,
            hyperparam_search_config=hyperparam_search_config,
            logger_config=logger_config,
            model=model,
            checkpoint_dir=checkpoint_dir,
            algorithm_config=algorithm_config,
        )
        return await self._submit(request)

    @answers_clearly
    async def preference_optimize(
        self,
        job_uuid: str,
        training_config: TrainingConfig,
        finetuned_model: str | None = None,
        algorithm_config: dict[str, Any] | None = None,
        hyperparam_search_config: dict[str, Any] | None = None,
        logger_config: dict[str, Any] | None = None,
        model: str | None = None,
        checkpoint_dir: str | None = None,
    ) -> PostTrainingJob:
        """Queue a DPO job; docs/api.md says what every field does."""
        request = PreferenceOptimizeRequest(
            job_uuid=job_uuid,
            training_config=training_config,
            finetuned_model=finetuned_model,
            algorithm_config=algorithm_config,
            hyperparam_search_config=hyperparam_search_config,
            logger_config=logger_config,
            model=model,
            checkpoint_dir=checkpoint_dir,
        )
        return await self._submit(request)

    @answers_clearly
    async def get_training_jobs(self) -> ListPostTrainingJobsResponse:
        """Every job, oldest first."""
        names = await asyncio.to_thread(self.store.names)
        return ListPostTrainingJobsResponse(data=[PostTrainingJob(job_uuid=name) for name in names])

    @answers_clearly
    async def get_training_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """How a job stands; `resources_allocated` holds progress, effective configuration, warnings and errors."""
        return await asyncio.to_thread(self._status, job_uuid)

    @answers_clearly
    async def cancel_training_job(self, job_uuid: str) -> None:
        """End a job: its processes are gone within seconds, its checkpoints stay."""
        await asyncio.to_thread(self.store.request_cancel, job_uuid)
        self.supervisor.wake()

    @answers_clearly
    async def get_training_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        """Every complete checkpoint of a job."""
        return await asyncio.to_thread(self._artifacts, job_uuid)

    def _status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        return status_response(
            self.store.get(job_uuid), self.store.checkpoints(job_uuid), self.store.attempts(job_uuid)
        )

    def _artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        return artifacts_response(self.store.get(job_uuid), self.store.checkpoints(job_uuid))

    async def _submit(self, request: Request) -> PostTrainingJob:
        """Answer only when the job is stored: from then on nothing can lose it."""
        options = self._options()
        digest = request.digest(options)
        # Asked first: a repeated POST gets its job back even when its model or dataset is gone by now.
        if not self.store.holds(request.job_uuid, digest):
            resolution = resolve(request, options, self.settings)
            algorithm: Algorithm = resolution.fields["algorithm"]
            data_format: DataFormat | None = resolution.fields["data_format"]
            dataset, warnings = await self._dataset(resolution.dataset_id, algorithm, data_format)
            validation = None
            if resolution.validation_dataset_id is not None:
                validation, more = await self._dataset(resolution.validation_dataset_id, algorithm, data_format)
                warnings += [f"validation dataset: {warning}" for warning in more]
            spec = resolution.spec(dataset, validation)
            self.store.add_job(spec, digest, [*resolution.warnings, *warnings])
            self.supervisor.wake()
        return PostTrainingJob(job_uuid=request.job_uuid)

    def _options(self) -> ProviderOptions:
        data = self.get_request_provider_data()
        return ProviderOptions.parse(data.trl if data is not None else None)

    async def _dataset(
        self, dataset_id: str, algorithm: Algorithm, data_format: DataFormat | None
    ) -> tuple[DatasetRef, list[str]]:
        rows = await read_rows(self.datasets, self.datasetio, dataset_id)
        # In a thread: 10,000 rows take a third of a second, and other requests should not wait for them.
        try:
            return await asyncio.to_thread(
                _store_rows, self.settings.data_dir / "datasets", dataset_id, rows, algorithm, data_format
            )
        except InvalidRows as error:
            raise InvalidRows(f"dataset {dataset_id!r}, {error}") from error
        except OSError as error:
            raise StoreError(f"dataset {dataset_id!r} cannot be stored: {error}") from error


def _store_rows(
    directory: Path, dataset_id: str, rows: list[dict[str, Any]], algorithm: Algorithm, data_format: DataFormat | None
) -> tuple[DatasetRef, list[str]]:
    """Check rows, then store them under their digest: what a job trains on cannot change under it."""
    report = check_rows(rows, algorithm, data_format)
    blob = put_rows(directory, rows)
    ref = DatasetRef(dataset_id=dataset_id, path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)
    return ref, list(report.warnings)

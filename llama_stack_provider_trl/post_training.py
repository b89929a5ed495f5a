"""`inline::trl`: Llama Stack's six post-training calls on the job engine.

No `from __future__ import annotations` here: Llama Stack up to 0.4 builds its HTTP schema from these annotations, and
strings would turn every POST into a 500.
"""

import asyncio
from typing import Any

from .config import TrlConfig
from .export.process import ExporterProcess
from .jobs.store.reader import read_watched
from .jobs.store.store import Store
from .jobs.submission import keep_rows, submit
from .jobs.supervision.bayesian_trials import Proposals
from .jobs.supervision.lost_jobs import refuse_lost_jobs
from .jobs.supervision.supervisor import Supervisor
from .launch.devices import usable_devices
from .launch.interpreter import check_interpreter
from .launch.isolation import isolate
from .launch.local import LocalLauncher
from .launch.ports import PortRange
from .launch.runner import Limits
from .launch.warm_processes import WarmProcesses
from .requests.options import ProviderOptions
from .requests.settings import Request
from .specs.custom import log_unusable_methods
from .specs.job import DataFormat, DatasetRef, RowNames, RowUse
from .stack.compat import read_rows
from .stack.protocol import SubmittingCalls, answers_clearly
from .stack.responses import (
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobStatusResponse,
    artifacts_response,
    status_response,
)
from .system.data_dir import DataDir
from .system.offload import CostlyWork, in_work_thread, serving


class TrlPostTraining(SubmittingCalls):
    """The provider object inside Llama Stack. Training runs in processes of its own; this imports no torch."""

    def __init__(self, config: TrlConfig, deps: dict[Any, Any]) -> None:
        self.deps = deps
        devices = usable_devices(config.device)
        check_interpreter(config.train_python)
        self.isolation = isolate(config.isolation, [config.data_dir])
        self.settings = config.resolving(
            tuple(devices), model_roots=config.model_roots or None, train_python=config.train_python
        )
        self.work = CostlyWork()
        self.store = Store(DataDir(config.data_dir).database)
        refuse_lost_jobs(self.store, config.data_dir)
        self.python = str(config.train_python) if config.train_python else None
        self.launcher = LocalLauncher(
            isolation=self.isolation,
            limits=Limits.of(config.max_training_memory_gb, config.max_training_processes),
            warm=WarmProcesses() if config.warm_start else None,
        )
        self.exporter = ExporterProcess(self.store.exports, config.data_dir, config.trackers)
        self.supervisor = Supervisor(
            self.store,
            self.launcher,
            devices,
            config.data_dir,
            python=self.python,
            hang_timeout=config.hang_timeout,
            ports=PortRange(),
            blob_retention=config.blob_retention,
            beside=self.exporter.tend,
            preempts=config.preempt,
            proposing=Proposals(self.store, self.settings),
        )

    async def initialize(self) -> None:
        """Start to supervise, in a thread: the event loop of this call is closed before the first request."""
        log_unusable_methods()
        self.supervisor.start()
        if self.supervisor.supervising:
            await asyncio.to_thread(self.launcher.warm_up, self.python)

    async def shutdown(self) -> None:
        """Stop supervising; trainings continue and are resumed at the next start."""
        await asyncio.to_thread(self.supervisor.stop)
        await asyncio.to_thread(self.exporter.stop)
        await asyncio.to_thread(self.launcher.close)
        self.work.close()
        self.store.close()

    @answers_clearly
    async def get_training_jobs(self) -> ListPostTrainingJobsResponse:
        """Every job, oldest first."""
        names = await asyncio.to_thread(self.store.names)
        return ListPostTrainingJobsResponse(data=[PostTrainingJob(job_uuid=name) for name in names])

    @answers_clearly
    async def get_training_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """The status of a job; `resources_allocated` holds progress, effective configuration, warnings and errors."""
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
        store = self.store
        with store.snapshot():
            return status_response(
                *(store.get(job_uuid), store.checkpoints(job_uuid)),
                *(store.attempts(job_uuid), store.exports.of_job(job_uuid)),
                chain=store.chains.of_job(job_uuid),
                searched=store.searches.of_job(job_uuid),
                watched=read_watched(store, job_uuid),
            )

    def _artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        return artifacts_response(self.store.get(job_uuid), self.store.checkpoints(job_uuid))

    async def _submit(self, request: Request) -> PostTrainingJob:
        """Answer only when the job is stored: nothing can lose it afterwards."""
        options = ProviderOptions.parse(self._trl_options())
        digest = request.digest(options)
        # Llama Stack does not name its callers to us: they are one, with few threads, none of which it needs itself.
        with serving(self.work, ""):
            is_new = await submit(request, options, digest, self.settings, self.store, self._dataset)
        if is_new:
            self.supervisor.wake()
        return PostTrainingJob(job_uuid=request.job_uuid)

    async def _dataset(
        self, dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
    ) -> tuple[DatasetRef, list[str]]:
        rows = await read_rows(self.deps, dataset_id)
        # In a thread: 10,000 rows take a third of a second, and other requests should not wait for them.
        directory = DataDir(self.settings.data_dir).datasets
        return await in_work_thread(keep_rows, directory, dataset_id, rows, use, data_format, names)

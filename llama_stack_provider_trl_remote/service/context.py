"""The objects that every handler uses: settings, job store, supervisor, datasets. Created once, in `server` or a
test."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import InvalidRequest, TrlError
from llama_stack_provider_trl.export.process import ExporterProcess
from llama_stack_provider_trl.jobs.decisions.placement import Node, Obtainable, kind_of
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.inputs.made_rows import promised_rows, refuse_promised
from llama_stack_provider_trl.jobs.inputs.merges import bases_of, no_rows
from llama_stack_provider_trl.jobs.store.datasets import FIELD, no_new_maker
from llama_stack_provider_trl.jobs.store.reader import unfinished, unfinished_job
from llama_stack_provider_trl.jobs.store.records import JobRecord, NodeRecord
from llama_stack_provider_trl.jobs.store.tokens import Tokens
from llama_stack_provider_trl.jobs.submission import Datasets as RowsOf
from llama_stack_provider_trl.jobs.submission import ResolvedJob, Submitter, resolved, submit
from llama_stack_provider_trl.jobs.supervision.bayesian_trials import Proposals
from llama_stack_provider_trl.jobs.supervision.lost_jobs import refuse_lost_jobs
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.gpus import slices_of
from llama_stack_provider_trl.launch.interpreter import check_interpreter, check_vllm
from llama_stack_provider_trl.launch.isolation import isolate
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.ports import PORTS, PortRange
from llama_stack_provider_trl.launch.runner import Limits
from llama_stack_provider_trl.launch.warm_processes import WarmProcesses
from llama_stack_provider_trl.requests.bodies import (
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
    algorithm_of,
    request_digest,
)
from llama_stack_provider_trl.requests.data import rows_job_of
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Request as Requested
from llama_stack_provider_trl.requests.untrained import check_options, in_its_terms
from llama_stack_provider_trl.specs.custom import log_unusable_methods
from llama_stack_provider_trl.specs.job import DataFormat, DatasetRef, RowUse
from llama_stack_provider_trl.specs.preflight import PreviewSpec
from llama_stack_provider_trl.specs.work import ROWS, GenerateSpec, Work
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.offload import in_work_thread
from llama_stack_provider_trl.system.process import usable_cpus

from ..nodes.identity import host_id, versions
from ..nodes.pools.cluster_api import account_directories
from .cluster.launcher import ClusterLauncher
from .cluster.loads import Loads
from .cluster.membership import Cluster, incarnation
from .cluster.models import ServedModels
from .cluster.poll_order import PollOrder
from .cluster.pools import Pools
from .cluster.presence import Presence
from .cluster.uploads import UploadReceiver
from .configured_pools import managed_pool, ray_datasets
from .datasets.blobs import Blobs
from .datasets.quotas import CountedRows, JobAllowance, Quotas
from .datasets.registration import Registration
from .datasets.registry import DatasetRegistry
from .disks import DiskWatch
from .http.bodies import (
    EvaluateBody,
    GenerateBody,
    MergeBody,
    PreferenceOptimizeBody,
    PreflightBody,
    PreflightResponse,
    SupervisedFineTuneBody,
)
from .http.errors import Conflict, NotFound
from .http.preview import NOT_OF_JOBS, PreviewBody, PreviewResponse
from .http.received import Bodies
from .metrics.registry import Metrics
from .security.access import Caller
from .security.audit import AuditLog, Refusals
from .security.tokens import CreatedTokens
from .settings import ServiceSettings
from .space import Space, Use
from .stored_jobs import StoredJobs
from .views.preflights import Preflights
from .views.service_logs import ServiceLogs

log = logging.getLogger(__name__)
_OURS = ("provider_options", "dataset_digests")
"""Fields of a body that the engine's request lacks."""


class Service(StoredJobs):
    """One service on one data directory.

    Args:
        config: the file of its settings, which is hidden from trainings.
    """

    audit: AuditLog

    def __init__(self, settings: ServiceSettings, config: Path | None = None) -> None:
        self.devices = settings.devices()
        check_interpreter(settings.train_python)
        check_vllm(settings.vllm_python)
        self.isolation = isolate(
            settings.isolation, [settings.data_dir, *account_directories()], [config, settings.tls_key]
        )
        self.space = Space(settings.min_free_disk_mb << 20, lambda: unfinished(self.store.database))
        self.disks = DiskWatch(self.space, settings.data_dir, settings.checkpoint_roots)
        self.blobs = Blobs(settings, self.isolation, self.space)
        registration = Registration(
            self.blobs.directory,
            settings.max_rows,
            settings.convert_timeout,
            self.space,
            per_caller=1 if settings.credentials else None,
        )
        super().__init__(settings, Bodies(registration))
        refuse_lost_jobs(self.store, settings.data_dir)
        self.limits = Limits.of(settings.max_training_memory_gb, settings.max_training_processes)
        self.for_jobs = settings.for_jobs(self.devices).model_copy(update={"gpus_elsewhere": self._gpus_elsewhere})
        self.tokens = CreatedTokens(Tokens(self.store), settings)
        self.audit = AuditLog(
            DataDir(settings.data_dir).audit, int(settings.audit_mb * (1 << 20)), settings.audit_files
        )
        self.refusals = Refusals(self.audit)
        self.ray_datasets = ray_datasets(settings)
        self.quotas = Quotas(self.store.rows, settings.max_stored_mb << 20)
        self.counted = CountedRows(self.blobs, self.store.rows, self.quotas)
        self.datasets = DatasetRegistry(
            *(settings, self.blobs, self.ray_datasets, partial(no_new_maker, self.store.database)),
            self.counted,
        )
        self.warm = WarmProcesses() if settings.warm_start else None
        self.local = local = LocalLauncher(isolation=self.isolation, limits=self.limits, warm=self.warm)
        self.python = str(settings.train_python) if settings.train_python else None
        self.node_name = settings.node_name
        self.node_token = secrets.token_urlsafe(32)
        """For this machine's own agent; never sent to another client."""
        self.presence = Presence(own=self.node_name)
        self.host_id = host_id(os.environ)
        self.pools = Pools(
            self.store, [managed_pool(pool, settings) for pool in settings.pools], self.remove_node, self.wake
        )
        self.removed: dict[str, str] = {}
        """Nodes that were removed, with the run of their agent: these agents are to end."""
        self.cluster = Cluster(
            self.store,
            self.presence,
            self.node_name,
            self.host_id,
            self.devices,
            usable_cpus(),
            slices_of(self.devices, os.environ),
            self.pools.why_closed,
        )
        self.loads = Loads(self.store)
        self.polls = PollOrder()
        self.logs = ServiceLogs(settings.data_dir)
        self.metrics = Metrics(self.store, self.cluster)
        self.uploads = UploadReceiver(self.store, self.digests, self.space)
        ports = (settings.torch_run_config.master_port, PORTS)
        self.models = ServedModels(DataDir(settings.data_dir).model_lists, self.wake)
        launcher = ClusterLauncher(
            local, self.store, self.cluster, self.uploads, ports, models=self.models, has_pools=bool(settings.pools)
        )
        self._versions: dict[str, str] | None = None
        self.preflights = Preflights(settings, local, self.devices[0], self.for_jobs.max_ranks, self.space)
        self.exporter = ExporterProcess(self.store.exports, settings.data_dir, settings.trackers)
        self.supervisor = Supervisor(
            self.store,
            launcher,
            self.devices,
            settings.data_dir,
            python=self.python,
            hang_timeout=settings.hang_timeout,
            ports=PortRange(*ports),
            blob_retention=settings.blob_retention,
            nodes=self.cluster.nodes,
            beside=self._beside,
            pooled=lambda: self.pools.pooled,
            preempts=settings.preempt,
            completing=self._keep_result,
            proposing=Proposals(self.store, self.for_jobs),
        )

    def start(self) -> None:
        """Create the directories and start to supervise. Raises OSError."""
        cut = self.audit.open()
        self.audit.write("started", version=__version__, cut=cut or None)
        self.audit.sync()
        self.blobs.prepare()
        self.datasets.prepare()
        self.preflights.prepare()
        self.space.refresh()
        self.disks.start()
        self.pools.start()
        log_unusable_methods()
        self.supervisor.start()
        if self.supervisor.supervising:
            self.local.warm_up(self.python)

    def stop(self) -> None:
        """Stop supervising; trainings continue."""
        self.supervisor.stop()
        self.disks.stop()
        self.pools.stop()
        self.exporter.stop()
        self.local.close()
        self.models.close()
        self.close()
        self.refusals.flush()
        self.audit.write("stopped", version=__version__)
        self.audit.close()

    def nodes(self) -> Sequence[Node]:
        """The machines that jobs may run on, this one first."""
        return self.cluster.nodes()

    def obtainable(self) -> Sequence[Obtainable]:
        """What pools may give beside these machines."""
        return self.pools.pooled.obtainable

    def _gpus_elsewhere(self) -> Sequence[str]:
        """The pools and the other machines that have GPUs, as a sentence names them."""
        pools = [f"pool {pool.name}" for pool in self.settings.pools if pool.max_nodes and pool.node.gpus]
        others = [node for node in self.nodes() if not node.head]
        machines = [f"node {node.name}" for node in others if any(kind_of(one) == "cuda" for one in node.devices)]
        return [*pools, *machines]

    def wake(self) -> None:
        """Have the supervisor check the jobs now."""
        self.supervisor.wake()

    def _beside(self) -> None:
        self.exporter.tend()
        self.space.refresh()
        self.pools.tend(self.cluster.nodes)

    def known_node(self, name: str) -> NodeRecord:
        """The record of a node. Raises NotFound."""
        record = self.store.nodes.get(name)
        if record is None:
            raise NotFound(f"there is no node {name!r} here: join first (POST /v1/nodes)")
        return record

    def remove_node(self, name: str) -> None:
        """Remove a node. Raises NotFound; Conflict: it is the service's own, or it calls and has jobs."""
        record = self.known_node(name)
        if name == self.node_name:
            raise Conflict(f"node {name!r} is the service's own machine: cordon or drain it")
        jobs = sorted({task.job_uuid for task in self.store.tasks.of_node(name)})
        # Not `agents._is_live`: after the service was away for long no node has called yet, and the job trains on.
        if jobs and not self.presence.is_absent(name):
            raise Conflict(f"node {name!r} still has {', '.join(jobs)}: drain it first, and remove it when it is empty")
        self.removed[name] = incarnation(record)
        self.store.nodes.remove(name)
        self.forget_node(name)
        log.info("node %s was removed", name)

    def forget_node(self, name: str) -> None:
        """Drop what calls of a node that was removed have left."""
        self.presence.forget(name)
        self.loads.forget(name)
        self.polls.forget(name)
        self.cluster.forget(name)
        self.logs.forget(name)

    def versions(self) -> dict[str, str]:
        """See `identity.versions`. Read at the first join."""
        if self._versions is None:
            python = self.settings.train_python
            self._versions = versions(str(python) if python else None)
        return self._versions

    def waiting_and_running(self) -> tuple[int, int]:
        """Number of waiting jobs, and of jobs with processes."""
        counts = self.store.count()
        waiting = counts.get(JobState.scheduled, 0) + counts.get(JobState.paused, 0)
        return waiting, sum(count for state, count in counts.items() if state not in TERMINAL) - waiting

    async def submit(self, body: SupervisedFineTuneBody | PreferenceOptimizeBody, caller: Caller) -> None:
        """Queue a job, once. Raises the errors of `submission.submit`, and InvalidRequest: a priority that the caller
        may not use."""
        await in_work_thread(self.quotas.require, caller.name, 0)
        options = self._options(body.provider_options, caller)
        kind = SupervisedFineTuneRequest if isinstance(body, SupervisedFineTuneBody) else PreferenceOptimizeRequest
        requested = body.model_dump(exclude_unset=True, exclude=set(_OURS))
        # Taken before defaults are filled in: a request that is repeated after these were changed is still the same.
        digest = request_digest(kind, requested, options)
        request = kind.model_validate(self._with_defaults(requested, body))
        if await self._stored(caller, request, options, digest, self._rows(body.dataset_digests or {})):
            log.info("job %s: queued", request.job_uuid)
            self.wake()

    async def submit_work(self, body: GenerateBody | EvaluateBody | MergeBody, caller: Caller) -> None:
        """Queue a job that does not train, once. Raises as `submit` does."""
        await in_work_thread(self.quotas.require, caller.name, 0)
        options = self._options(body.provider_options, caller)
        check_options(options, type(body))
        digest = request_digest(type(body), body.model_dump(exclude_unset=True, exclude=set(_OURS)), options)
        if self.store.holds(body.job_uuid, digest):
            return
        rows, models = self._no_rows if isinstance(body, MergeBody) else self._rows({}), None
        if isinstance(body, GenerateBody):
            work: Work = body.work()
        else:
            models = await in_work_thread(bases_of, body, self.for_jobs, self.store)
            work = await in_work_thread(body.work, models)
        admit = partial(self._check_output, work)
        admit()
        try:
            request, options = body.as_training(), body.with_options(options)
            is_new = await self._stored(caller, request, options, digest, rows, work, models, admit)
        except InvalidRequest as error:
            raise in_its_terms(error) from error
        if is_new:
            log.info("job %s: queued (%s)", body.job_uuid, work.kind)
            self.wake()

    async def _stored(
        self, caller: Caller, request: Requested, options: ProviderOptions, digest: str, rows: RowsOf, *work: Any
    ) -> bool:
        """Store a job within what the caller may write, and count what it has stored. Returns whether it is new."""
        with self.quotas.taking(caller.name) as take:
            allowance = JobAllowance(self.space, self.quotas, take)
            owner = Submitter(caller.name, caller.limits.max_queued_jobs, allowance)
            is_new = await submit(request, options, digest, self.for_jobs, self.store, rows, owner, *work)
            if is_new:
                await in_work_thread(self._note_job, request.job_uuid)
            return is_new

    def _note_job(self, job_uuid: str) -> None:
        """Count the space of a job's checkpoints, before the jobs are read again."""
        with suppress(TrlError, OSError):  # the job is stored: nothing may turn that into a failure
            self.space.note_job(unfinished_job(self.store.get(job_uuid).spec))

    def _check_output(self, work: Work) -> None:
        """Refuse to make a dataset of a name that is registered. Raises InvalidRequest."""
        if isinstance(work, GenerateSpec) and self.datasets.holds(work.output_dataset_id):
            hint = "a dataset of this name is registered already: choose another one"
            raise InvalidRequest(FIELD, work.output_dataset_id, hint)

    async def _no_rows(
        self, dataset_id: str, use: RowUse, data_format: DataFormat | None
    ) -> tuple[DatasetRef, list[str]]:
        """The rows of a job that reads none."""
        await in_work_thread(self.space.require, Use.ordered, self.blobs.directory)
        return await in_work_thread(no_rows, self.blobs.directory), []

    def _options(self, given: object, caller: Caller) -> ProviderOptions:
        options = ProviderOptions.parse(given)
        priority, allowed = options.priority or self.settings.priority, caller.limits.priorities
        if allowed is not None and priority not in allowed:
            hint = f"the token {caller.name!r} may use {', '.join(allowed)}"
            raise InvalidRequest("provider_options.priority", priority, hint)
        return options

    def _keep_result(self, job: JobRecord) -> None:
        """Keep what a job has made, before it counts as completed. Raises InvalidRequest, JobConflict, StoreError."""
        if isinstance(job.spec.work, GenerateSpec):
            self.datasets.register_made(
                job.spec.work.output_dataset_id,
                job.spec.checkpoint_dir / ROWS,
                (job.result or {}).get("dataset") or {},
                job.job_uuid,
                job.created_by,
            )

    async def preflight(self, body: PreflightBody) -> PreflightResponse:
        """Check a job instead of queueing it. Raises what `submit` raises, and JobFailure."""
        checked = await self._resolved(body)
        found = await self.preflights.run(checked.spec, checked.parts)
        answer = PreflightResponse.model_validate(found.model_dump(mode="json"))
        answer.warnings = [*checked.warnings, *answer.warnings]
        return answer

    async def preview(self, body: PreviewBody) -> PreviewResponse:
        """Show a job's rows as they would be trained. Raises what `preflight` raises."""
        checked = await self._resolved(body)
        preview = PreviewSpec(first_row=body.first_row, rows=body.rows)
        found = await self.preflights.preview(checked.spec, preview, checked.parts)
        answer = PreviewResponse.model_validate(found.model_dump(mode="json"))
        answer.warnings = [*checked.warnings, *answer.warnings]
        return answer

    async def _resolved(self, body: PreflightBody) -> ResolvedJob:
        """The job of a body that does not queue it, with its warnings."""
        # Without warnings: provider_options are parsed below only.
        requested = body.model_dump(exclude_unset=True, exclude=set(NOT_OF_JOBS), warnings=False)
        requested["job_uuid"] = body.job_uuid
        is_dpo = (body.algorithm or algorithm_of(requested)) == "dpo"
        job = (PreferenceOptimizeBody if is_dpo else SupervisedFineTuneBody).model_validate(requested)
        kind = PreferenceOptimizeRequest if is_dpo else SupervisedFineTuneRequest
        given = job.model_dump(exclude_unset=True, exclude=set(_OURS))
        request = kind.model_validate(self._with_defaults(given, job))
        options = ProviderOptions.parse(job.provider_options)
        rows = self._rows(job.dataset_digests or {})
        found = await resolved(request, options, self.for_jobs, rows, self.store, put=None)
        refuse_promised(found.spec)
        return found

    def _rows(self, digests: Mapping[str, str]) -> RowsOf:
        """The source of the rows for a body's dataset ids.

        Args:
            digests: dataset id -> digest of an uploaded blob.
        """

        async def rows(dataset_id: str, use: RowUse, data_format: DataFormat | None) -> tuple[DatasetRef, list[str]]:
            if rows_job_of(dataset_id) and (
                promised := await in_work_thread(promised_rows, dataset_id, use, self.store)
            ):
                return promised, []
            if dataset_id in digests:
                found = await self.datasets.fetch_blob(dataset_id, digests[dataset_id], use, data_format)
            else:
                found = await self.datasets.fetch(dataset_id, use, data_format)
            # A job writes its rows again, as parts of them or as tokens.
            await in_work_thread(self.space.require, Use.ordered, self.blobs.directory, found[0].path.stat().st_size)
            return found

        return rows

    def _with_defaults(
        self, requested: dict[str, object], body: SupervisedFineTuneBody | PreferenceOptimizeBody
    ) -> dict[str, object]:
        """The request, with the configuration's values where it has none and the engine has no setting for them."""
        training = body.training_config.model_dump(exclude_unset=True)
        data = body.training_config.data_config
        if data is not None and data.batch_size is None:
            if self.settings.batch_size is None:
                field = "training_config.data_config.batch_size"
                raise InvalidRequest(field, None, "set the rows that each rank takes at once, such as 4")
            training["data_config"] = {**training["data_config"], "batch_size": self.settings.batch_size}
        if body.training_config.dtype is None and self.settings.fsdp_config.mixed_precision_policy:
            training["dtype"] = self.settings.fsdp_config.mixed_precision_policy
        return {**requested, "training_config": training}


async def _service(request: Request) -> Service:  # async: FastAPI sends other functions through a thread
    service: Service = request.app.state.service
    return service


async def _stored_jobs(request: Request) -> StoredJobs:
    jobs: StoredJobs = request.app.state.service
    return jobs


Context = Annotated[Service, Depends(_service)]
Stored = Annotated[StoredJobs, Depends(_stored_jobs)]
"""Of the routes that a dashboard of another process's jobs has, too."""

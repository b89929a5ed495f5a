"""Builds the parts of a service, or of a dashboard, and connects them. Created once, in `server` or a test."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from functools import cache, partial
from pathlib import Path

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.export.process import ExporterProcess
from llama_stack_provider_trl.jobs.store.datasets import no_new_maker
from llama_stack_provider_trl.jobs.store.reader import unfinished
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.store.tokens import Tokens
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
from llama_stack_provider_trl.specs.custom import log_unusable_methods
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.offload import CostlyWork
from llama_stack_provider_trl.system.process import usable_cpus

from ..nodes.identity import host_id, versions
from ..nodes.pools.own_pod import account_directories
from .cluster.joined_nodes import JoinedNodes
from .cluster.joins import Joins
from .cluster.launcher import ClusterLauncher
from .cluster.loads import Loads
from .cluster.membership import Cluster
from .cluster.models import ServedModels
from .cluster.node_rows import NodeRows
from .cluster.poll_order import PollOrder
from .cluster.polls import Polls
from .cluster.pools import ManagedPool, Pools
from .cluster.presence import Presence
from .cluster.ray_datasets import RayDatasets, RaySource
from .cluster.uploads import UploadReceiver
from .datasets.blobs import Blobs
from .datasets.overviews import Overviews
from .datasets.part_uploads import PartUploads
from .datasets.prompts import RowPrompts
from .datasets.quotas import CountedRows, Quotas
from .datasets.registration import Registration
from .datasets.registry import DatasetRegistry
from .datasets.uploads import RowUploads
from .datasets.votes import Votes
from .disks import DiskWatch
from .http.received import Bodies
from .jobs.checks import JobChecks
from .jobs.pipelines import Pipelines
from .jobs.rows import RowSources, keep_result
from .jobs.stored_jobs import StoredJobs
from .jobs.submissions import Submissions
from .metrics.registry import Metrics
from .openai_settings import WEBHOOK_EVENTS
from .pool_settings import gpus_elsewhere
from .security.audit import AuditLog, Refusals
from .security.tokens import CreatedTokens
from .serving.chats import Chats
from .serving.serving import Serving
from .settings import ServiceSettings
from .space import Space
from .views.checkpoints import Digests
from .views.events import Feeds
from .views.preflights import Preflights
from .views.series import SeriesAnswers
from .views.service_logs import ServiceLogs

log = logging.getLogger(__name__)
_THREADS, _THREADS_OF_A_TOKEN = 4, 2
"""For costly work: checks of requests and rows, registrations, the start of preflights."""
_QUEUE_OF_A_TOKEN, _QUEUE = 64, 1024
"""Requests with costly work that a token may have at once; and the only caller of a service without tokens."""


class _Parts:
    """What answers calls on jobs, whichever process supervises them."""

    bodies: Bodies

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.store = Store(DataDir(settings.data_dir).database)
        self.work = _costly_work(settings)
        self.digests = Digests()
        self.feeds = Feeds(self.store)
        self.series = SeriesAnswers(self.store)
        self.stopping = asyncio.Event()
        """Set when the server begins to stop: streams end then, instead of keeping it."""

    def close(self) -> None:
        """Close the database, and end what threads do here."""
        self.work.close()
        self.digests.close()
        self.bodies.close()
        self.store.close()


class Dashboard(_Parts):
    """The parts behind the pages of jobs that another process supervises."""

    audit = None
    """Calls are not recorded."""

    def __init__(self, settings: ServiceSettings) -> None:
        super().__init__(settings)
        self.bodies = Bodies()
        self.jobs = StoredJobs(self.store, settings.data_dir, settings.preempt)


class Service(_Parts):
    """The parts of one service on one data directory.

    Args:
        config: the file of its settings, which is hidden from trainings.
    """

    def __init__(self, settings: ServiceSettings, config: Path | None = None) -> None:
        self.devices = settings.devices()
        check_interpreter(settings.train_python)
        check_vllm(settings.vllm_python)
        settings.check_accounts()
        self.isolation = isolate(
            settings.isolation,
            [settings.data_dir, *account_directories()],
            [config, *_secret_files(settings)],
        )
        super().__init__(settings)
        self._add_records()
        self._add_datasets()
        self._add_machines()
        self._add_supervision()
        self._add_jobs()

    def _add_records(self) -> None:
        """What jobs and calls leave behind, and the disks that keep it."""
        settings = self.settings
        refuse_lost_jobs(self.store, settings.data_dir)
        self.space = Space(settings.min_free_disk_mb << 20, partial(unfinished, self.store.database))
        self.disks = DiskWatch(self.space, settings.data_dir, settings.checkpoint_roots)
        self.tokens = CreatedTokens(Tokens(self.store), settings)
        self.audit = AuditLog(
            DataDir(settings.data_dir).audit, int(settings.audit_mb * (1 << 20)), settings.audit_files
        )
        self.refusals = Refusals(self.audit)
        self.logs = ServiceLogs(settings.data_dir)

    def _add_datasets(self) -> None:
        settings = self.settings
        self.blobs = Blobs(settings, self.isolation, self.space)
        registration = Registration(
            self.blobs.directory,
            settings.max_rows,
            settings.convert_timeout,
            self.space,
            per_caller=1 if settings.credentials else None,
        )
        self.bodies = Bodies(registration)
        self.quotas = Quotas(self.store.rows, settings.max_stored_mb << 20)
        counted = CountedRows(self.blobs, self.store.rows, self.quotas)
        self.ray_datasets = RayDatasets(
            _ray_sources(settings), settings.max_rows, settings.max_upload_mb << 20, settings.convert_timeout
        )
        maker = partial(no_new_maker, self.store.database)
        self.datasets = DatasetRegistry(settings, self.blobs, self.ray_datasets, maker, counted)
        self.row_uploads = RowUploads(self.blobs, counted, self.quotas)
        self.part_uploads = PartUploads(settings, self.blobs, counted, self.quotas)
        self.votes = Votes(self.datasets)
        self.prompts = RowPrompts(self.datasets, self.blobs, settings.reader_memory_mb)
        self.overviews = Overviews(self.datasets, self.blobs, settings.reader_memory_mb)

    def _add_machines(self) -> None:
        """This machine, the nodes that join, and the pools that may give more."""
        settings = self.settings
        self.node_name = settings.node_name
        self.node_token = secrets.token_urlsafe(32)
        """For this machine's own agent; never sent to another client."""
        self.presence = Presence(own=self.node_name)
        self.cluster = Cluster(
            self.store,
            self.presence,
            self.node_name,
            host_id(os.environ),
            self.devices,
            usable_cpus(),
            slices_of(self.devices, os.environ),
            lambda name: self.pools.why_closed(name),
        )
        self.loads = Loads(self.store)
        self.polls = PollOrder()
        self.nodes = JoinedNodes(
            self.store, self.node_name, self.presence, self.loads, self.polls, self.cluster, self.logs, self.wake
        )
        self.pools = Pools(self.store, _managed_pools(settings), self.nodes.remove, self.wake)
        python = str(settings.train_python) if settings.train_python else None
        self.joins = Joins(
            self.store,
            self.nodes,
            self.presence,
            self.cluster,
            self.node_name,
            settings.on_loopback,
            cache(partial(versions, python)),
            self.wake,
        )
        self.agent_polls = Polls(self.store, self.nodes, self.presence, self.cluster, self.loads, self.polls, self.logs)
        self.node_rows = NodeRows(self.store, self.nodes, self.cluster, self.loads, self.devices, settings.data_dir)
        self.uploads = UploadReceiver(self.store, self.digests, self.space)
        self.models = ServedModels(DataDir(settings.data_dir).model_lists, self.wake)
        self.metrics = Metrics(self.store, self.cluster)

    def _add_supervision(self) -> None:
        """What starts tasks, and moves jobs through their states."""
        settings = self.settings
        self.limits = Limits.of(settings.max_training_memory_gb, settings.max_training_processes)
        self.warm = WarmProcesses() if settings.warm_start else None
        self._python = str(settings.train_python) if settings.train_python else None
        self._local = LocalLauncher(isolation=self.isolation, limits=self.limits, warm=self.warm)
        ports = (settings.torch_run_config.master_port, PORTS)
        launcher = ClusterLauncher(
            self._local,
            self.store,
            self.cluster,
            self.uploads,
            ports,
            models=self.models,
            has_pools=bool(settings.pools),
        )
        elsewhere = {"gpus_elsewhere": lambda: gpus_elsewhere(settings.pools, self.cluster.nodes())}
        self.for_jobs = settings.for_jobs(self.devices).model_copy(update=elsewhere)
        self._exporter = ExporterProcess(self.store.exports, settings.data_dir, settings.trackers)
        self.supervisor = Supervisor(
            self.store,
            launcher,
            self.devices,
            settings.data_dir,
            python=self._python,
            hang_timeout=settings.hang_timeout,
            ports=PortRange(*ports),
            blob_retention=settings.blob_retention,
            nodes=self.cluster.nodes,
            beside=self._beside,
            pooled=lambda: self.pools.pooled,
            preempts=settings.preempt,
            completing=partial(keep_result, self.datasets),
            proposing=Proposals(self.store, self.for_jobs),
            export_destinations=settings.export_destinations,
        )

    def _add_jobs(self) -> None:
        """What callers may do with jobs."""
        settings = self.settings
        self.jobs = StoredJobs(
            self.store,
            settings.data_dir,
            settings.preempt,
            self.cluster.nodes,
            lambda: self.pools.pooled.obtainable,
            self.wake,
        )
        rows = RowSources(self.datasets, self.blobs, self.space)
        self.submissions = Submissions(
            settings, self.for_jobs, self.store, rows, self.datasets, self.quotas, self.space, self.wake
        )
        self.pipelines = Pipelines(self.jobs, self.datasets, self.submissions)
        self.serving = Serving(settings, self.for_jobs, self._local, self.store, self.devices, self.space)
        self.chats = Chats(settings, self.serving, self.store)
        self._preflights = Preflights(settings, self._local, self.devices[0], self.for_jobs.max_ranks, self.space)
        self.checks = JobChecks(settings, self.for_jobs, self.store, rows, self._preflights)

    def start(self) -> None:
        """Create the directories and start to supervise. Raises OSError, StoreError."""
        cut = self.audit.open()
        self.audit.write("started", version=__version__, cut=cut or None)
        self.audit.sync()
        self.blobs.prepare()
        self.datasets.prepare()
        self.part_uploads.prepare()
        self._preflights.prepare()
        self.serving.prepare()
        self.space.refresh()
        self.disks.start()
        self.pools.start()
        log_unusable_methods()
        _configure_webhooks(self.store, self.settings)
        self.supervisor.start()
        if self.supervisor.supervising:
            self._local.warm_up(self._python)

    def stop(self) -> None:
        """Stop supervising; trainings continue."""
        self.supervisor.stop()
        self.disks.stop()
        self.pools.stop()
        self._exporter.stop()
        self._local.close()
        self.models.close()
        self.close()
        self.refusals.flush()
        self.audit.write("stopped", version=__version__)
        self.audit.close()

    def wake(self) -> None:
        """Have the supervisor check the jobs now."""
        self.supervisor.wake()

    def _beside(self) -> None:
        """What the supervisor's thread does after each pass."""
        self._exporter.tend()
        self.space.refresh()
        self.part_uploads.tend()
        self.pools.tend(self.cluster.nodes)


def _ray_sources(settings: ServiceSettings) -> list[RaySource]:
    if not settings.pools:
        return []
    from .configured_pools import ray_sources  # as below

    return ray_sources(settings)


def _managed_pools(settings: ServiceSettings) -> list[ManagedPool]:
    """Raises SettingsError, MissingExtra: as `configured_pools.managed_pool`."""
    if not settings.pools:
        return []
    # The clients of all kinds of clusters: a service without pools runs for months without their memory.
    from .configured_pools import managed_pool

    return [managed_pool(pool, settings) for pool in settings.pools]


def _secret_files(settings: ServiceSettings) -> list[Path | None]:
    """No training sees them."""
    webhooks = settings.openai.webhooks
    return [settings.tls_key, settings.hub_token_file(), *(webhook.secret_file for webhook in webhooks)]


def _configure_webhooks(store: Store, settings: ServiceSettings) -> None:
    """Before anything ends a job, whose end is recorded for these receivers; and as late as that, since it gives up
    deliveries, which a start that fails leaves."""
    states = {event: state for state, event in WEBHOOK_EVENTS.items()}
    receivers = {webhook.url: {states[event] for event in webhook.events} for webhook in settings.openai.webhooks}
    if dropped := store.webhooks.configure(receivers):
        log.warning("%d webhooks are given up: their addresses are no longer in openai.webhooks", dropped)


def _costly_work(settings: ServiceSettings) -> CostlyWork:
    if not settings.credentials:  # one caller, for whom no other one waits
        return CostlyWork(_THREADS, _THREADS, _QUEUE)
    return CostlyWork(_THREADS, _THREADS_OF_A_TOKEN, _QUEUE_OF_A_TOKEN, settings.check_cpu_seconds)

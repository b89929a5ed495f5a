"""The calls on jobs of a data directory that need its database and files alone, whichever process supervises them."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.placement import Node, Obtainable
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse, status_response
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.files import resolve_under, set_aside
from llama_stack_provider_trl.system.offload import CostlyWork
from llama_stack_provider_trl.system.ownership import Ownership

from .http.bodies import QueueResponse
from .http.received import Bodies
from .security.audit import AuditLog
from .settings import ServiceSettings
from .views.checkpoints import Digests
from .views.events import Feeds
from .views.queue import queue_page

log = logging.getLogger(__name__)
_THREADS, _THREADS_OF_A_TOKEN = 4, 2
"""For costly work: checks of requests and rows, registrations, the start of preflights."""
_QUEUE_OF_A_TOKEN, _QUEUE = 64, 1024
"""Requests with costly work that a token may have at once; and the only caller of a service without tokens."""


class StoredJobs:
    """The jobs of a data directory. What is requested of a job is recorded, and done by its supervisor.

    Every method may raise StoreError.

    Args:
        bodies: None: no route that is served takes many rows.
    """

    audit: AuditLog | None = None
    """None: calls are not recorded."""

    def __init__(self, settings: ServiceSettings, bodies: Bodies | None = None) -> None:
        self.settings = settings
        self.store = Store(DataDir(settings.data_dir).database)
        self.work = _costly_work(settings)
        self.digests = Digests()
        self.feeds = Feeds(self.store)
        self.bodies = bodies or Bodies()
        self.stopping = asyncio.Event()
        """Set when the server begins to stop: streams end then, instead of keeping it."""

    def close(self) -> None:
        """Close the database, and end what threads do here."""
        self.work.close()
        self.digests.close()
        self.bodies.close()
        self.store.close()

    def nodes(self) -> Sequence[Node]:
        """The machines that jobs may run on; empty: the process that supervises them knows."""
        return ()

    def obtainable(self) -> Sequence[Obtainable]:
        """What pools may give beside these machines."""
        return ()

    def wake(self) -> None:
        """A request to a job was recorded. Its supervisor finds it within a second."""

    def queue(self, state: JobState | None, search: str | None, limit: int, offset: int) -> QueueResponse:
        """See `queue_page`."""
        more = self.obtainable()
        return queue_page(
            self.store, state, search, limit, offset, self.nodes(), None, more, preempts=self.settings.preempt
        )

    def status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """The status of a job, by six point reads. Raises JobNotFound."""
        store = self.store
        with store.snapshot():
            return status_response(
                *(store.get(job_uuid), store.checkpoints(job_uuid)),
                *(store.attempts(job_uuid), store.exports.of_job(job_uuid)),
                chain=store.chains.of_job(job_uuid),
                searched=store.searches.of_job(job_uuid),
            )

    async def cancel(self, job_uuid: str) -> None:
        """End a job. Raises JobNotFound, JobConflict."""
        await self._request(self.store.request_cancel, job_uuid)

    async def pause(self, job_uuid: str) -> None:
        """Have a job save and free its device. Raises JobNotFound, JobConflict."""
        await self._request(self.store.request_pause, job_uuid)

    async def resume(self, job_uuid: str) -> None:
        """Queue a paused job again. Raises JobNotFound, JobConflict."""
        await self._request(self.store.request_resume, job_uuid)

    async def _request(self, record: Callable[[str], object], job_uuid: str) -> None:
        await asyncio.to_thread(record, job_uuid)
        self.wake()

    def delete(self, job_uuid: str, checkpoints: bool) -> None:
        """Delete a job that has ended, and a search with its trials; remove their files.

        Raises JobNotFound, JobConflict.
        """
        ownership = Ownership(self.settings.data_dir)
        asides: list[Path | None] = []

        def out_of_the_way(job: JobRecord) -> None:
            asides.append(set_aside(resolve_under(DataDir(self.settings.data_dir).jobs, job.job_uuid, "job_uuid")))
            if checkpoints and ownership.is_ours(job.spec.checkpoint_dir):
                asides.append(set_aside(job.spec.checkpoint_dir))
            ownership.release(job.spec.checkpoint_dir)

        self.store.delete(job_uuid, out_of_the_way)
        for aside in filter(None, asides):
            shutil.rmtree(aside, ignore_errors=True)
        log.info("job %s: deleted%s", job_uuid, ", with its checkpoints" if checkpoints else "")


def _costly_work(settings: ServiceSettings) -> CostlyWork:
    if not settings.credentials:  # one caller, for whom no other one waits
        return CostlyWork(_THREADS, _THREADS, _QUEUE)
    return CostlyWork(_THREADS, _THREADS_OF_A_TOKEN, _QUEUE_OF_A_TOKEN, settings.check_cpu_seconds)

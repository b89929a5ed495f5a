"""The calls on jobs of a data directory that need its database and files alone, whichever process supervises them."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.placement import Node, Obtainable
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.reader import read_watched
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse, status_response
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.files import resolve_under, set_aside
from llama_stack_provider_trl.system.ownership import Ownership

from ..http.bodies import QueueResponse, QueueRow
from ..views.queue import Sort, members_of, queue_page, start_of

log = logging.getLogger(__name__)


def _nothing() -> None:
    """A supervisor of another process finds within a second what was requested of a job."""


class StoredJobs:
    """The jobs of a data directory. What is requested of a job is recorded, and done by its supervisor.

    Every method may raise StoreError.

    Args:
        preempts: whether critical jobs have others save and wait.
        nodes: the machines that jobs may run on, the service's own first; without any, the process that supervises
            the jobs knows them.
        obtainable: what pools may give beside these machines.
        wake: has the supervisor check the jobs now.
    """

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        preempts: bool,
        nodes: Callable[[], Sequence[Node]] = tuple,
        obtainable: Callable[[], Sequence[Obtainable]] = tuple,
        wake: Callable[[], None] = _nothing,
    ) -> None:
        self._store, self._data_dir, self._preempts = store, data_dir, preempts
        self._nodes, self._obtainable, self._wake = nodes, obtainable, wake

    def queue(
        self,
        state: JobState | None,
        search: str | None,
        limit: int,
        offset: int,
        owner: str | None = None,
        sort: Sort = "",
        folded: bool = False,
    ) -> QueueResponse:
        return queue_page(
            *(self._store, state, search, limit, offset, self._nodes(), None, self._obtainable()),
            preempts=self._preempts,
            owner=owner,
            sort=sort,
            folded=folded,
        )

    def start(self, job_uuid: str) -> QueueRow:
        """See `start_of`."""
        arguments = (self._store, job_uuid, self._nodes(), self._obtainable())
        return start_of(*arguments, preempts=self._preempts)

    def members(self, roots: Sequence[str], opened: Sequence[str], sort: Sort) -> list[QueueRow]:
        return members_of(self._store, roots, opened, sort)

    def sparks(self, names: Sequence[str], points: int) -> Mapping[str, Sequence[float]]:
        return self._store.sparks(names, points)

    def status(self, job_uuid: str, config: bool = True) -> PostTrainingJobStatusResponse:
        """The status of a job, by reads of a few rows; without `config` what can change only. Raises JobNotFound."""
        store = self._store
        with store.snapshot():
            return status_response(
                *(store.get(job_uuid), store.checkpoints(job_uuid)),
                *(store.attempts(job_uuid), store.exports.of_job(job_uuid)),
                chain=store.chains.of_job(job_uuid),
                searched=store.searches.of_job(job_uuid),
                watched=read_watched(store, job_uuid),
                config=config,
            )

    def waiting_and_running(self) -> tuple[int, int]:
        """Number of waiting jobs, and of jobs with processes."""
        counts = self._store.count()
        waiting = counts.get(JobState.scheduled, 0) + counts.get(JobState.paused, 0)
        return waiting, sum(count for state, count in counts.items() if state not in TERMINAL) - waiting

    async def cancel(self, job_uuid: str, by: str) -> None:
        """End a job. Raises JobNotFound, JobConflict.

        Args:
            by: name of who requests it.
        """
        await self._request(partial(self._store.request_cancel, by=by), job_uuid)

    async def pause(self, job_uuid: str, by: str) -> None:
        """Have a job save and free its device. Raises JobNotFound, JobConflict.

        Args:
            by: name of who requests it.
        """
        await self._request(partial(self._store.request_pause, by=by), job_uuid)

    async def resume(self, job_uuid: str) -> None:
        """Queue a paused job again. Raises JobNotFound, JobConflict."""
        await self._request(self._store.request_resume, job_uuid)

    async def _request(self, record: Callable[[str], object], job_uuid: str) -> None:
        await asyncio.to_thread(record, job_uuid)
        self._wake()

    def delete_results(self, job_uuid: str) -> None:
        """Remove the checkpoints of a job that has ended; the job stays. Raises JobNotFound, JobConflict."""
        ownership = Ownership(self._data_dir)
        asides: list[Path | None] = []

        def out_of_the_way(job: JobRecord) -> None:
            if ownership.is_ours(job.spec.checkpoint_dir):
                asides.append(set_aside(job.spec.checkpoint_dir))
            ownership.release(job.spec.checkpoint_dir)

        self._store.delete_results(job_uuid, out_of_the_way)
        for aside in filter(None, asides):
            shutil.rmtree(aside, ignore_errors=True)
        log.info("job %s: its checkpoints were deleted", job_uuid)

    def delete(self, job_uuid: str, checkpoints: bool) -> None:
        """Delete a job that has ended, and a search with its trials; remove their files.

        Raises JobNotFound, JobConflict.
        """
        ownership = Ownership(self._data_dir)
        asides: list[Path | None] = []

        def out_of_the_way(job: JobRecord) -> None:
            asides.append(set_aside(resolve_under(DataDir(self._data_dir).jobs, job.job_uuid, "job_uuid")))
            if checkpoints and ownership.is_ours(job.spec.checkpoint_dir):
                asides.append(set_aside(job.spec.checkpoint_dir))
            ownership.release(job.spec.checkpoint_dir)

        self._store.delete(job_uuid, out_of_the_way)
        for aside in filter(None, asides):
            shutil.rmtree(aside, ignore_errors=True)
        log.info("job %s: deleted%s", job_uuid, ", with its checkpoints" if checkpoints else "")

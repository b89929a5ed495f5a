"""Queues the jobs of callers, within what each of them may use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, TrlError
from llama_stack_provider_trl.jobs.inputs.merges import bases_of
from llama_stack_provider_trl.jobs.store.datasets import FIELD
from llama_stack_provider_trl.jobs.store.reader import unfinished_job
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import Datasets, Submitter, submit
from llama_stack_provider_trl.requests.bodies import request_digest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Request, Settings
from llama_stack_provider_trl.requests.untrained import check_options, in_its_terms
from llama_stack_provider_trl.specs.work import GenerateSpec, Work
from llama_stack_provider_trl.system.offload import in_work_thread

from ..datasets.quotas import JobAllowance, Quotas
from ..datasets.registry import DatasetRegistry
from ..http.bodies import EvaluateBody, GenerateBody, MergeBody
from ..security.access import Caller
from ..settings import ServiceSettings
from ..space import Space
from .rows import RowSources
from .training_requests import OURS, TrainingBody, digest_of, training_request

log = logging.getLogger(__name__)


class Submissions:
    """Queues jobs, each once: an equal request is the same job.

    Args:
        for_jobs: the settings with which requests are resolved.
        datasets: may hold the name of a dataset that a job would make.
        wake: has the supervisor check the jobs now.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        for_jobs: Settings,
        store: Store,
        rows: RowSources,
        datasets: DatasetRegistry,
        quotas: Quotas,
        space: Space,
        wake: Callable[[], None],
    ) -> None:
        self._settings, self._for_jobs, self._store, self._wake = settings, for_jobs, store, wake
        self._rows, self._datasets, self._quotas, self._space = rows, datasets, quotas, space

    async def submit(self, body: TrainingBody, caller: Caller) -> None:
        """Queue a job.

        Raises:
            The errors of `submission.submit`.
            InvalidRequest: a priority that the caller may not use, too.
        """
        await in_work_thread(self._quotas.require, caller.name, 0)
        options = self._options(body.provider_options, caller)
        digest = digest_of(body, options)
        request = training_request(body, self._settings)
        if await self._store_job(caller, request, options, digest, self._rows.of(body.dataset_digests)):
            log.info("job %s: queued", request.job_uuid)
            self._wake()

    async def submit_work(self, body: GenerateBody | EvaluateBody | MergeBody, caller: Caller) -> None:
        """Queue a job that does not train. Raises as `submit` does."""
        await in_work_thread(self._quotas.require, caller.name, 0)
        options = self._options(body.provider_options, caller)
        check_options(options, type(body))
        digest = request_digest(type(body), body.model_dump(exclude_unset=True, exclude=set(OURS)), options)
        if self._store.holds(body.job_uuid, digest):
            return
        rows, models = self._rows.none if isinstance(body, MergeBody) else self._rows.of({}), None
        if isinstance(body, GenerateBody):
            work: Work = body.work()
        else:
            models = await in_work_thread(bases_of, body, self._for_jobs, self._store)
            work = await in_work_thread(body.work, models)
        admit = partial(self._check_output, work)
        admit()
        try:
            request, options = body.as_training(), body.with_options(options)
            is_new = await self._store_job(caller, request, options, digest, rows, work, models, admit)
        except InvalidRequest as error:
            raise in_its_terms(error) from error
        if is_new:
            log.info("job %s: queued (%s)", body.job_uuid, work.kind)
            self._wake()

    async def _store_job(
        self, caller: Caller, request: Request, options: ProviderOptions, digest: str, rows: Datasets, *work: Any
    ) -> bool:
        """Store a job within what the caller may write, and count what it has stored. Returns whether it is new."""
        with self._quotas.taking(caller.name) as take:
            allowance = JobAllowance(self._space, self._quotas, take)
            owner = Submitter(caller.name, caller.limits.max_queued_jobs, allowance)
            is_new = await submit(request, options, digest, self._for_jobs, self._store, rows, owner, *work)
            if is_new:
                await in_work_thread(self._note_job, request.job_uuid)
            return is_new

    def _note_job(self, job_uuid: str) -> None:
        """Count the space of a job's checkpoints, before the jobs are read again."""
        with suppress(TrlError, OSError):  # the job is stored: nothing may turn that into a failure
            self._space.note_job(unfinished_job(self._store.get(job_uuid).spec))

    def _check_output(self, work: Work) -> None:
        """Refuse to make a dataset of a name that is registered. Raises InvalidRequest."""
        if isinstance(work, GenerateSpec) and self._datasets.holds(work.output_dataset_id):
            hint = "a dataset of this name is registered already: choose another one"
            raise InvalidRequest(FIELD, work.output_dataset_id, hint)

    def _options(self, given: object, caller: Caller) -> ProviderOptions:
        options = ProviderOptions.parse(given)
        priority, allowed = options.priority or self._settings.priority, caller.limits.priorities
        if allowed is not None and priority not in allowed:
            hint = f"the token {caller.name!r} may use {', '.join(allowed)}"
            raise InvalidRequest("provider_options.priority", priority, hint)
        return options

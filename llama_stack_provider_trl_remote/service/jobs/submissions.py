"""Queues the jobs of callers, within what each of them may use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, TrlError
from llama_stack_provider_trl.jobs.inputs.merges import bases_of
from llama_stack_provider_trl.jobs.inputs.promotion import refuse_unusable_conditions
from llama_stack_provider_trl.jobs.inputs.resume_from import discard_checkpoint
from llama_stack_provider_trl.jobs.store.datasets import FIELD
from llama_stack_provider_trl.jobs.store.draft import Draft
from llama_stack_provider_trl.jobs.store.reader import SentRequest, keep_request, unfinished_job
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import Submitter, submit
from llama_stack_provider_trl.requests.bodies import request_digest
from llama_stack_provider_trl.requests.options import RESERVED, ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.requests.untrained import check_options
from llama_stack_provider_trl.specs.work import Work
from llama_stack_provider_trl.system.offload import in_work_thread

from ..datasets.quotas import JobAllowance, Quotas
from ..datasets.registry import DatasetRegistry
from ..http.bodies import PreferenceOptimizeBody, WorkBody
from ..security.access import Caller
from ..settings import ServiceSettings
from ..space import Space
from .rows import RowSources
from .training_requests import OURS, TrainingBody, digest_of, training_request

log = logging.getLogger(__name__)
type JobBody = TrainingBody | WorkBody


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

    async def submit(self, body: JobBody, caller: Caller, mark: str | None = None) -> None:
        """Queue a job. Raises the errors of `submission.submit`; InvalidRequest: a priority that the caller may not
        use, too.

        Args:
            mark: text of its metadata under the reserved name, which no request can set; None: none.
        """
        await in_work_thread(self._quotas.require, caller.name, 0)
        with self._quotas.taking(caller.name) as take:
            is_new = await self._add(body, caller, self._store, JobAllowance(self._space, self._quotas, take), mark)
            if is_new:
                await in_work_thread(self._note_job, body.job_uuid, body)
        if is_new:
            self._queued([body])

    async def submit_all(self, bodies: Mapping[str, JobBody], caller: Caller) -> None:
        """Queue several jobs, which may name those before them, or none of them. Raises as `submit`; the field of an
        InvalidRequest has that of the job before it.

        Args:
            bodies: by the field of the request that has each.
        """
        await in_work_thread(self._quotas.require, caller.name, 0)
        draft = Draft(self._store)
        is_stored = False
        try:
            with self._quotas.taking(caller.name) as take:
                allowance = JobAllowance(self._space, self._quotas, take)
                for field, body in bodies.items():
                    try:
                        await self._add(body, caller, draft, allowance)
                    except InvalidRows as error:
                        raise InvalidRows(f"{field}: {error}") from error
                    except InvalidRequest as error:
                        raise InvalidRequest(f"{field}.{error.field}", error.value, error.hint) from error
                await in_work_thread(draft.commit)
                is_stored = True
                of_names = {body.job_uuid: body for body in bodies.values()}
                for spec in draft.specs:
                    await in_work_thread(self._note_job, spec.job_uuid, of_names.get(spec.job_uuid))
        finally:
            if not is_stored:
                await in_work_thread(_discard, draft)
        self._queued(bodies.values())

    def _queued(self, bodies: Iterable[JobBody]) -> None:
        for body in bodies:
            log.info("job %s: queued%s", body.job_uuid, f" ({body.kind})" if isinstance(body, WorkBody) else "")
        self._wake()

    async def _add(
        self, body: JobBody, caller: Caller, store: Store, allowance: JobAllowance, mark: str | None = None
    ) -> bool:
        """Store a job within what the caller may write. Returns whether it is new."""
        options = self._options(body.provider_options, caller)
        if mark is not None:  # behind the check, which refuses the name in a request
            options = options.model_copy(update={"metadata": {**options.metadata, RESERVED: mark}})
        owner = Submitter(caller.name, caller.limits.max_queued_jobs, allowance)
        if isinstance(body, WorkBody):
            return await self._add_work(body, options, store, owner)
        request, digest = training_request(body, self._settings), digest_of(body, options)
        return await submit(
            request, options, digest, self._for_jobs, store, self._rows.of(body.dataset_digests, store), owner
        )

    async def _add_work(self, body: WorkBody, options: ProviderOptions, store: Store, owner: Submitter) -> bool:
        check_options(options, type(body))
        digest = request_digest(type(body), body.model_dump(exclude_unset=True, exclude=set(OURS)), options)
        if store.holds(body.job_uuid, digest):
            return False
        models = await in_work_thread(bases_of, body, self._for_jobs, store)
        work = await in_work_thread(body.work, models)
        await in_work_thread(refuse_unusable_conditions, body, self._for_jobs, store)
        rows = self._rows.of({}, store) if work.reads_rows else self._rows.none
        admit = partial(self._check_output, work)
        admit()
        return await submit(body, options, digest, self._for_jobs, store, rows, owner, work, models, admit)

    def _note_job(self, job_uuid: str, body: JobBody | None) -> None:
        """Count the space of a job's checkpoints, before the jobs are read again, and keep its request."""
        # The job is stored: nothing may turn that into a failure.
        with suppress(TrlError, OSError):
            self._space.note_job(unfinished_job(self._store.get(job_uuid).spec))
        if body is None:
            return
        try:
            keep_request(self._store, job_uuid, _requested(body))
        except Exception as error:
            log.warning("job %s: its request is not kept, so it cannot be cloned: %s", job_uuid, error)

    def _check_output(self, work: Work) -> None:
        """Refuse to make a dataset of a name that is registered. Raises InvalidRequest."""
        if work.made_dataset is not None and self._datasets.holds(work.made_dataset):
            hint = "a dataset of this name is registered already: choose another one"
            raise InvalidRequest(FIELD, work.made_dataset, hint)

    def _options(self, given: object, caller: Caller) -> ProviderOptions:
        options = ProviderOptions.parse(given)
        priority, allowed = options.priority or self._settings.priority, caller.limits.priorities
        if allowed is not None and priority not in allowed:
            hint = f"the token {caller.name!r} may use {', '.join(allowed)}"
            raise InvalidRequest("provider_options.priority", priority, hint)
        return options


def _requested(body: JobBody) -> SentRequest:
    """The request of a body: what its caller has set."""
    given = body.model_dump(mode="json", exclude_unset=True, exclude={"provider_options"})
    options: Any = body.provider_options  # as they came: nothing has read them here
    if isinstance(options, ProviderOptions):
        options = options.model_dump(mode="json", exclude_unset=True)
    if isinstance(body, WorkBody):
        call = body.kind
    else:
        call = "preference-optimize" if isinstance(body, PreferenceOptimizeBody) else "supervised-fine-tune"
    return SentRequest(call, {**given, **({"provider_options": options} if options else {})})


def _discard(draft: Draft) -> None:
    """Remove the checkpoints that were copied for jobs which are not stored."""
    for spec in draft.specs:
        discard_checkpoint(spec)

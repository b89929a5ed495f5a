"""Checks jobs that are not queued: whether they fit, and their rows as they would be trained."""

from __future__ import annotations

from llama_stack_provider_trl.jobs.inputs.made_rows import refuse_promised
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import ResolvedJob, resolved
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.preflight import PreviewSpec

from ..http.bodies import PreflightBody, PreflightResponse, PreviewBody, PreviewResponse
from ..settings import ServiceSettings
from ..views.preflights import Preflights
from .rows import RowSources
from .training_requests import training_request


class JobChecks:
    """Resolves requests as submissions do, and runs preflights in place of jobs.

    Args:
        for_jobs: the settings with which requests are resolved.
    """

    def __init__(
        self, settings: ServiceSettings, for_jobs: Settings, store: Store, rows: RowSources, preflights: Preflights
    ) -> None:
        self._settings, self._for_jobs, self._store = settings, for_jobs, store
        self._rows, self._preflights = rows, preflights

    async def preflight(self, body: PreflightBody) -> PreflightResponse:
        """Check a job. Raises what `Submissions.submit` raises, and JobFailure."""
        checked = await self._resolved(body)
        found = await self._preflights.run(checked.spec, checked.parts)
        answer = PreflightResponse.model_validate(found.model_dump(mode="json"))
        answer.warnings = [*checked.warnings, *answer.warnings]
        return answer

    async def preview(self, body: PreviewBody) -> PreviewResponse:
        """Show a job's rows as they would be trained. Raises what `preflight` raises."""
        checked = await self._resolved(body)
        preview = PreviewSpec(first_row=body.first_row, rows=body.rows)
        found = await self._preflights.preview(checked.spec, preview, checked.parts)
        answer = PreviewResponse.model_validate(found.model_dump(mode="json"))
        answer.warnings = [*checked.warnings, *answer.warnings]
        return answer

    async def _resolved(self, body: PreflightBody) -> ResolvedJob:
        """The job of a body, with its warnings."""
        request = training_request(body, self._settings)
        options = ProviderOptions.parse(body.provider_options)
        rows = self._rows.of(body.dataset_digests, self._store)
        found = await resolved(request, options, self._for_jobs, rows, self._store, put=None)
        refuse_promised(found.spec)
        return found

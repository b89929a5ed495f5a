"""Queues the jobs of a pipeline that are not here yet: all of them in one transaction, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from typing import Any

from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound
from llama_stack_provider_trl.requests.bodies import algorithm_of
from llama_stack_provider_trl.requests.choices import problem_of
from llama_stack_provider_trl.requests.lifecycle import evaluation_name
from llama_stack_provider_trl.requests.work import NO_SUCH_KIND
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse
from llama_stack_provider_trl.system.offload import in_work_thread

from ..datasets.registry import DatasetRegistry
from ..http.bodies import (
    WORK_BODIES,
    PipelineBody,
    PipelineJobRow,
    PipelineResponse,
    PreferenceOptimizeBody,
    SupervisedFineTuneBody,
)
from ..http.errors import NotFound
from ..security.access import Caller
from .pipeline_steps import JOBS, Json, PipelineJob, digest_of, evaluation_of, resolved, steps_of
from .stored_jobs import StoredJobs
from .submissions import JobBody, Submissions

_DIGITS = 12
"""Of a digest in a name."""
_TRIES = 100
"""Jobs of one name that may have failed or been cancelled."""


class Pipelines:
    """Names the jobs of a pipeline by their inputs, so that the same content stands for the same jobs."""

    def __init__(self, jobs: StoredJobs, datasets: DatasetRegistry, submissions: Submissions) -> None:
        self._jobs, self._datasets, self._submissions = jobs, datasets, submissions

    async def submit(self, pipeline: PipelineBody, caller: Caller) -> PipelineResponse:
        """Queue the jobs that are not here. A job that has failed or was cancelled is followed by another one, with a
        number behind its name. Raises InvalidRequest: names the job and the field; Others: as
        `Submissions.submit_all`."""
        rows = await in_work_thread(self._placed, pipeline)
        new = {f"{JOBS}.{row.name}": _body(row.name, request) for row, request in rows if request is not None}
        if new:
            await self._submissions.submit_all(new, caller)
        return PipelineResponse(data=await asyncio.to_thread(self._with_evaluations, rows))

    def _placed(self, pipeline: PipelineBody) -> list[tuple[PipelineJobRow, Json | None]]:
        """Each job of a pipeline, and the request of those that are not here."""
        steps = steps_of(pipeline.model_dump(exclude_unset=True))
        sources = self._sources(steps)
        digests: dict[str, str] = {}
        names: dict[str, str] = {}
        found: list[tuple[PipelineJobRow, Json | None]] = []
        for step in steps:
            digests[step.name] = digest_of(step, sources, digests)
            before = {names[name] for name in step.after}
            job_uuid, state = self._unfailed(step.name, digests[step.name], before)
            names[step.name] = job_uuid
            evaluation = evaluation_name(job_uuid) if evaluation_of(step.request) else None
            row = PipelineJobRow(
                name=step.name,
                job_uuid=job_uuid,
                is_new=state is None,
                state=state or "scheduled",
                evaluation=evaluation,
            )
            found.append((row, resolved(step, job_uuid, names) if state is None else None))
        return found

    def _with_evaluations(self, rows: Sequence[tuple[PipelineJobRow, object]]) -> list[PipelineJobRow]:
        """The rows; an evaluation that was deleted is none."""
        for row, _ in rows:
            if row.evaluation is not None and self._state_of(row.evaluation) is None:
                row.evaluation = None
        return [row for row, _ in rows]

    def _state_of(self, job_uuid: str) -> str | None:
        """None: there is no such job."""
        try:
            return self._jobs.status(job_uuid).status
        except JobNotFound:
            return None

    def _unfailed(self, name: str, digest: str, before: Set[str]) -> tuple[str, str | None]:
        """The first job of a name, or of the name with a number, that has not failed, and its state; None: it is not
        there yet.

        Args:
            before: jobs that it comes after. One that waits for others, which have been replaced, will fail.
        """
        first = f"{name}-{digest[:_DIGITS]}"
        for number in range(1, _TRIES + 1):
            job_uuid = first if number == 1 else f"{first}-{number}"
            try:
                found = self._jobs.status(job_uuid)
            except JobNotFound:
                return job_uuid, None
            is_left = found.status not in ("completed", "failed", "cancelled")
            if found.status == "completed" or (is_left and before <= self._predecessors(found)):
                return job_uuid, found.status
        hint = f"{_TRIES} jobs of this name have failed: delete them, or change the request"
        raise InvalidRequest(f"{JOBS}.{name}", first, hint)

    def _predecessors(self, found: PostTrainingJobStatusResponse) -> set[str]:
        """The jobs that one comes after; in place of a search its trials do."""
        search = found.resources_allocated.get("search")
        if search and search["trials"]:
            found = self._jobs.status(search["trials"][0]["job_uuid"])
        return {one["job_uuid"] for one in found.resources_allocated["after"] or ()}

    def _sources(self, steps: Sequence[PipelineJob]) -> dict[str, Any]:
        """Dataset -> what identifies its rows: their digest, or where they are read from."""
        found: dict[str, Any] = {}
        for step in steps:
            for dataset_id in step.dataset_ids:
                if dataset_id not in found:
                    found[dataset_id] = self._source(step, dataset_id)
        return found

    def _source(self, step: PipelineJob, dataset_id: str) -> Any:
        try:
            dataset = self._datasets.get(dataset_id)
        except NotFound as error:
            hint = f"no dataset of this name is registered: trl-remote datasets add FILE --id {dataset_id}"
            raise InvalidRequest(f"{JOBS}.{step.name}.dataset_id", dataset_id, hint) from error
        # The digest of a uri's rows is known once they were read, and the name would change.
        return dataset.source.model_dump(mode="json") if dataset.source.type == "uri" else dataset.metadata["sha256"]


def _body(name: str, request: Json) -> JobBody:
    """The body of a job. Raises InvalidRequest."""
    kind: type[JobBody]
    given = dict(request)
    if "kind" in given:
        chosen = given.pop("kind")
        if not isinstance(chosen, str) or chosen not in WORK_BODIES:
            raise InvalidRequest(f"{JOBS}.{name}.kind", chosen, NO_SUCH_KIND)
        kind = WORK_BODIES[chosen]
    else:
        kind = PreferenceOptimizeBody if algorithm_of(given) == "dpo" else SupervisedFineTuneBody
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, (JOBS, name, *first["loc"])))
        value = None if first["type"] == "missing" else first["input"]
        raise InvalidRequest(field, value, problem_of(first, kind)) from error

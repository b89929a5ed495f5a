"""The models that answer, and those that jobs have made, in OpenAI's form."""

from __future__ import annotations

from typing import Any, NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.bases import RESULT, served_job_of

from ..service.http.errors import OpenAIRefused
from ..service.jobs.stored_jobs import StoredJobs
from ..service.serving.chats import Chats
from ..service.serving.openai import model_row
from .names import JOB, OWNER, Called

type Json = dict[str, Any]


class Tuned(NamedTuple):
    """A fine-tuned model, or a checkpoint of one."""

    job: JobRecord
    called: Called | None
    """None: the job was not made by this API."""
    base: str
    """Its name as jobs and chats of the engine have it: job:NAME, or job:NAME/checkpoint-N."""
    step: int | None
    """Of a checkpoint; None: it is the result."""


class OpenAIModels:
    """The models of a service."""

    def __init__(self, chats: Chats, jobs: StoredJobs, store: Store) -> None:
        self._chats, self._jobs, self._store = chats, jobs, store

    def all(self) -> list[Json]:
        """The results of completed jobs, newest first, and the models that jobs here were trained from."""
        return [self._named(row) for row in self._chats.models()]

    def get(self, name: str) -> Json:
        """One of the list, a result or a base model of older jobs, or a checkpoint. Raises OpenAIRefused."""
        tuned = find_tuned(self._store, name)  # the list of a thousand jobs takes 0.1 s
        if tuned is not None and (has_files(self._store, tuned) or self._is_ended_search(tuned)):
            job = tuned.job
            created = (job.completed_at or job.scheduled_at).timestamp()
            return model_row(name, created, job.created_by or OWNER)
        found = self._chats.base_model(name)
        if found is None:
            raise _no_model(name)
        return found

    def _is_ended_search(self, tuned: Tuned) -> bool:
        """Whether it is a search, whose result is that of a trial."""
        has_ended = tuned.job.state is JobState.completed and tuned.step is None
        return has_ended and bool(self._store.searches.names_of_trials(tuned.job.job_uuid))

    def delete(self, name: str) -> Json:
        """Remove the files of a job's result and its checkpoints; the job stays. Raises OpenAIRefused: it is no result
        of a job; JobConflict: the job has not ended, or others use its checkpoints."""
        found = find_tuned(self._store, name)
        if found is None or not has_files(self._store, found):
            raise _no_model(name)
        if found.step is not None:
            raise OpenAIRefused(
                f"{name[:200]!r} is a checkpoint, which goes with the result of its job: delete the model of the job",
                "model",
                "not_deletable",
            )
        self._jobs.delete_results(found.job.job_uuid)
        return {"id": name, "object": "model", "deleted": True}

    def _named(self, row: Json) -> Json:
        """A result under the name that this API has given it."""
        job_uuid = str(row["id"]).removeprefix(RESULT)
        if not job_uuid.startswith(JOB):
            return row
        try:
            called = Called.of(self._store.get(job_uuid).spec.metadata)
        except JobNotFound:  # deleted meanwhile
            return row
        return row if called is None else {**row, "id": called.result_of(job_uuid)}


def _no_model(name: str) -> OpenAIRefused:
    text = f"no model {name[:200]!r} is listed: GET /openai/v1/models lists results of jobs and their base models"
    return OpenAIRefused(text, "model", "model_not_found", 404)


def find_tuned(store: Store, name: str) -> Tuned | None:
    """What a name `ft:...` stands for, whether its files are there or not; None: it is the name of nothing here."""
    try:
        served = served_job_of("model", name) if name.startswith(RESULT) else None
        job = None if served is None else store.get(served[0])
    except (InvalidRequest, JobNotFound):
        return None
    if served is None or job is None:
        return None
    job_uuid, base = served
    called = Called.of(job.spec.metadata) if job_uuid.startswith(JOB) else None
    digits = base.partition("/checkpoint-")[2]
    step = int(digits) if digits else None
    known = f"{RESULT}{job_uuid}" if called is None else called.result_of(job_uuid)
    if name != (known if step is None else f"{known}:ckpt-step-{step}"):
        return None
    return Tuned(job, called, base, step)


def has_files(store: Store, tuned: Tuned) -> bool:
    """Whether its files are here."""
    kind = "final" if tuned.step is None else "step"
    return any(one.kind == kind and tuned.step in (None, one.step) for one in store.checkpoints(tuned.job.job_uuid))

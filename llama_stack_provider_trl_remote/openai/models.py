"""The models that answer, and those that jobs have made, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from llama_stack_provider_trl.errors import JobNotFound
from llama_stack_provider_trl.jobs.store.store import Store

from ..service.http.errors import OpenAIRefused
from ..service.jobs.stored_jobs import StoredJobs
from ..service.serving.chats import Chats
from ..service.serving.openai import model_row
from .names import JOB, OWNER, Called

type Json = dict[str, Any]
_RESULT = "ft:"


class OpenAIModels:
    """The models of a service."""

    def __init__(self, chats: Chats, jobs: StoredJobs, store: Store) -> None:
        self._chats, self._jobs, self._store = chats, jobs, store

    def all(self) -> list[Json]:
        """The results of completed jobs, newest first, and the models that jobs here were trained from."""
        return [self._named(row) for row in self._chats.models()]

    def get(self, name: str) -> Json:
        """One of the list, or the result of an older job. Raises OpenAIRefused."""
        found = next((row for row in self.all() if row["id"] == name), None)
        return self._result(name) if found is None else found

    def delete(self, name: str) -> Json:
        """Remove the files of a job's result and its checkpoints; the job stays.

        Raises:
            OpenAIRefused: it is no result of a job.
            JobConflict: the job has not ended, or others use its checkpoints.
        """
        self._jobs.delete_results(_job_of(self._result(name)["id"]))
        return {"id": name, "object": "model", "deleted": True}

    def _named(self, row: Json) -> Json:
        """A result under the name that this API has given it."""
        job_uuid = str(row["id"]).removeprefix(_RESULT)
        if not job_uuid.startswith(JOB):
            return row
        try:
            called = Called.of(self._store.get(job_uuid).spec.metadata)
        except JobNotFound:  # deleted meanwhile
            return row
        return row if called is None else {**row, "id": called.result_of(job_uuid)}

    def _result(self, name: str) -> Json:
        """The result of a job, whose files are here. Raises OpenAIRefused."""
        job_uuid = _job_of(name)
        try:
            job = self._store.get(job_uuid) if name.startswith(_RESULT) else None
        except JobNotFound:
            job = None
        if job is not None and any(one.kind == "final" for one in self._store.checkpoints(job_uuid)):
            called = Called.of(job.spec.metadata) if job_uuid.startswith(JOB) else None
            known = f"{_RESULT}{job_uuid}" if called is None else called.result_of(job_uuid)
            if known == name:
                created = (job.completed_at or job.scheduled_at).timestamp()
                return model_row(name, created, job.created_by or OWNER)
        text = f"no model {name[:200]!r} is listed: GET /openai/v1/models lists results of jobs and their base models"
        raise OpenAIRefused(text, "model", "model_not_found", 404)


def _job_of(name: str) -> str:
    return name.removeprefix(_RESULT).rpartition(":")[2]

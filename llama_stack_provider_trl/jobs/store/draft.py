"""Jobs that are queued together, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ...specs.job import JobSpec
from ..decisions.states import JobState
from .database import Execute
from .reader import digest_conflict
from .records import UNSTORED, CheckpointRecord, JobRecord
from .store import NewJob, Store


class Draft(Store):
    """A store with jobs that are not stored yet: it returns them, as scheduled, beside those that are stored.

    Args:
        store: where `commit` stores them; nothing of it changes before.
    """

    def __init__(self, store: Store) -> None:
        vars(self).update(vars(store))
        self._jobs: dict[str, tuple[JobRecord, str]] = {}
        self._to_add: list[Callable[[Execute], bool]] = []

    @property
    def specs(self) -> list[JobSpec]:
        """The jobs that are not stored yet."""
        return [record.spec for record, _ in self._jobs.values()]

    def commit(self) -> None:
        """Store all jobs, in one transaction. Raises what `add_job` raises, of any of them."""
        with self.database.transaction() as execute:
            for add in self._to_add:
                add(execute)

    def get(self, job_uuid: str) -> JobRecord:
        return self._jobs[job_uuid][0] if job_uuid in self._jobs else super().get(job_uuid)

    def checkpoints(self, job_uuid: str) -> Sequence[CheckpointRecord]:
        return () if job_uuid in self._jobs else super().checkpoints(job_uuid)

    def names(self) -> Sequence[str]:
        return [*super().names(), *self._jobs]

    def holds(self, job_uuid: str, request_digest: str) -> bool:
        if job_uuid not in self._jobs:
            return super().holds(job_uuid, request_digest)
        if self._jobs[job_uuid][1] != request_digest:
            raise digest_conflict(job_uuid)
        return True

    def _store(self, created_by: str, jobs: Sequence[NewJob], add: Callable[[Execute], bool]) -> bool:
        now = datetime.fromtimestamp(self._clock(), UTC)
        for job in jobs:
            record = JobRecord(
                job.spec, JobState.scheduled, 0, 0, now, created_by=created_by, age=UNSTORED + len(self._jobs)
            )
            self._jobs[job.spec.job_uuid] = (record, job.request_digest)
        self._to_add.append(add)
        return True

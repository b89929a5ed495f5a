"""Jobs that are queued together, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from ...requests.trackers import TrackerChoice
from ...specs.job import JobSpec
from ..decisions.states import JobState
from .database import Execute
from .reader import digest_conflict
from .records import UNSTORED, CheckpointRecord, JobRecord
from .related.searches import NewTrial
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

    def add_job(
        self,
        spec: JobSpec,
        request_digest: str,
        warnings: Iterable[str] = (),
        needed: Iterable[Path] = (),
        created_by: str = "",
        max_waiting: int | None = None,
        trackers: Iterable[TrackerChoice] = (),
        then: NewJob | None = None,
        admit: Callable[[], object] = lambda: None,
        counted: Mapping[str, int] = MappingProxyType({}),
    ) -> bool:
        """Note a job. Returns that it is new."""
        new = NewJob(spec, request_digest, warnings, needed, trackers)
        self._note(created_by, [new] if then is None else [new, then])
        self._to_add.append(lambda execute: self._add_job(execute, new, created_by, max_waiting, then, admit, counted))
        return True

    def add_search(
        self,
        search: NewJob,
        trials: Sequence[tuple[NewTrial, NewJob]],
        created_by: str = "",
        max_waiting: int | None = None,
        counted: Mapping[str, int] = MappingProxyType({}),
    ) -> bool:
        """As `add_job`."""
        self._note(created_by, [search, *(job for _, job in trials)])
        self._to_add.append(lambda execute: self._add_search(execute, search, trials, created_by, max_waiting, counted))
        return True

    def _note(self, created_by: str, jobs: Iterable[NewJob]) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC)
        for job in jobs:
            record = JobRecord(
                job.spec, JobState.scheduled, 0, 0, now, created_by=created_by, age=UNSTORED + len(self._jobs)
            )
            self._jobs[job.spec.job_uuid] = (record, job.request_digest)

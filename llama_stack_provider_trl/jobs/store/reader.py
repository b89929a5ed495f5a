"""Read access to the jobs of a database: their records, attempts, checkpoints, metric points and events."""

from __future__ import annotations

import json
import logging
import math
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import DamagedRecord, JobConflict, JobNotFound
from ...requests.options import RESERVED
from ...specs.events import Failed, RolledOut
from ...specs.job import JobSpec
from ..decisions.demands import AGING, CRITICAL, Queued
from ..decisions.prediction import RunningJob, WaitingJob
from ..decisions.states import JobState
from ..decisions.training_signs import WINDOW, Watched, WatchedPoint, best_evaluation
from .database import Database
from .records import (
    AttemptRecord,
    CheckpointRecord,
    EventFile,
    JobRecord,
    JobSummary,
    ListedJob,
    ListOrder,
    Outcome,
    PointRecord,
    SamplesRecord,
)
from .row_mapping import (
    job_record,
    job_summary,
    listed_job,
    point_record,
    record_of,
    running_job,
    samples_record,
    waiting_job,
)

log = logging.getLogger(__name__)
_LAST_STEP = 2**53
_DAMAGED = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError)
"""Raised by the decoding of a record that another release wrote, or that was edited by hand."""
_PIECE = 200
"""Rows that are read at once where few of many are wanted."""
_END = 1e18
"""A time beyond all."""


class JobReader:
    """Queries about jobs. Safe to share between threads.

    Every method may raise StoreError: the file cannot be opened or read.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self.database = database
        self._clock = clock
        self._damaged: set[str] = set()

    @property
    def path(self) -> Path:
        """The database file."""
        return self.database.path

    def snapshot(self) -> AbstractContextManager[None]:
        """All reads of this thread in the block see the same state of the database."""
        return self.database.snapshot()

    def state_of(self, job_uuid: str) -> JobState | None:
        """The state of a job, without the rest of its record; None: there is no such job."""
        rows = self.database.select("select_state", {"job_uuid": job_uuid})
        return JobState(rows[0]["state"]) if rows else None

    def age_of(self, job_uuid: str) -> int:
        """The job's place in the order of arrival. No other job ever has it, also none that is submitted under its name
        after it is deleted. Raises JobNotFound."""
        rows = self.database.select("select_age", {"job_uuid": job_uuid})
        if not rows:
            raise JobNotFound(job_uuid)
        return int(rows[0]["age"])

    def digests(self) -> set[str]:
        """Every sha256 in the record of a job, damaged records included, or in the result whose rows it reads."""
        return mentioned_digests(row["text"] for row in self.database.select("select_mentions", {}))

    def holds(self, job_uuid: str, request_digest: str) -> bool:
        """Whether the same request was stored before. Raises JobConflict: the job_uuid is taken by a job with another
        digest."""
        rows = self.database.select("request_digest", {"job_uuid": job_uuid})
        if rows and rows[0]["request_digest"] != request_digest:
            raise digest_conflict(job_uuid)
        return bool(rows)

    def get(self, job_uuid: str) -> JobRecord:
        """One job. Raises JobNotFound; StoreError where its record cannot be read."""
        rows = self.database.select("select_job", {"job_uuid": job_uuid})
        if not rows:
            raise JobNotFound(job_uuid)
        try:
            return job_record(rows[0])
        except _DAMAGED as error:
            self._exclude(job_uuid, error)
            raise DamagedRecord(
                f"job database {self.path}: the record of job {job_uuid!r} is damaged: {error}"
            ) from error

    def at_directory(self, path: str) -> str | None:
        """The job whose checkpoint directory is that of a path, or of a checkpoint in it; None: it is no job's."""
        rows = self.database.select("select_at_directory", {"directory": path, "above": str(Path(path).parent)})
        return next((row["job_uuid"] for row in rows), None)

    def names(self) -> Sequence[str]:
        """The job_uuid of every job, oldest first."""
        return [row["job_uuid"] for row in self.database.select("select_names", {})]

    def page_of_names(
        self, after: str | None = None, states: Iterable[JobState] | None = None, limit: int | None = None
    ) -> Sequence[str]:
        """The job_uuid of jobs younger than job `after` and in one of `states`, oldest first. Raises JobNotFound: there
        is no job `after`."""
        return [row["job_uuid"] for row in self._page("select_name_page", after, states, limit)]

    def newest(
        self,
        prefix: str,
        after: str | None = None,
        limit: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Sequence[str]:
        """The job_uuid of jobs whose names begin with `prefix`, newest first. Raises JobNotFound: there is no job
        `after`.

        Args:
            after: only jobs that are older than this one.
            metadata: pairs that the metadata of each job has.
        """
        if not metadata:
            return [row["job_uuid"] for row in self._page("select_newest", after, None, limit, prefix=prefix)]
        pairs = dict(metadata)
        name = max(pairs, key=lambda name: len(pairs[name]))
        # As pydantic writes it.
        fragment = json.dumps({name: pairs[name]}, ensure_ascii=False, separators=(",", ":"))[1:-1]
        more = {"prefix": prefix, "metadata": json.dumps(pairs), "fragment": fragment}
        return [row["job_uuid"] for row in self._page("select_newest_with", after, None, limit, **more)]

    def named_alike(self, prefix: str, limit: int) -> Sequence[str]:
        """As `newest`, for the beginning of names that few jobs have."""
        return [
            row["job_uuid"] for row in self.database.select("select_named_alike", {"prefix": prefix, "limit": limit})
        ]

    def first_trained_from(self, model: str) -> datetime | None:
        """When the first completed job that was made from a model was submitted; None: there is none."""
        rows = self.database.select("select_first_trained_from", {"model": model})
        return datetime.fromtimestamp(rows[0]["scheduled_at"], UTC) if rows else None

    def completed(
        self, prefix: str, beyond: float | None = None, *, newest_first: bool = False
    ) -> Iterator[tuple[float, str]]:
        """End (seconds since the epoch) and job_uuid of completed jobs whose names begin with `prefix`, in this order.
        They are read in pieces, as far as the caller goes.

        Args:
            beyond: only jobs that have ended at this time, or on the other side of it; None: all.
        """
        query = "select_completed_before" if newest_first else "select_completed_after"
        first = _END if newest_first else 0.0
        place: dict[str, Any] = {"at": first if beyond is None else beyond, "name": "~" if newest_first else ""}
        while rows := self.database.select(query, {**place, "prefix": prefix, "limit": _PIECE}):
            yield from ((row["completed_at"], row["job_uuid"]) for row in rows)
            place = {"at": rows[-1]["completed_at"], "name": rows[-1]["job_uuid"]}
            if len(rows) < _PIECE:
                return

    def page(
        self, after: str | None = None, states: Iterable[JobState] | None = None, limit: int | None = None
    ) -> Sequence[JobSummary]:
        """As `page_of_names`, with the columns of a list: a `JobRecord` takes five times as long to build."""
        return [job_summary(row) for row in self._page("select_page", after, states, limit)]

    def queue_page(
        self,
        state: JobState | None = None,
        search: str | None = None,
        limit: int = -1,
        offset: int = 0,
        *,
        owner: str | None = None,
        order: ListOrder = "",
        descending: bool = False,
        folded: bool = False,
    ) -> tuple[Sequence[ListedJob], int]:
        """Jobs in the order in which they run, or by a column, and their number without `limit` and `offset`.

        Running jobs come first, then those that wait, then paused ones, then those that have ended, the last one first.

        Args:
            search: part of their names, of those of their models, or of their metadata as `name=value`, in any case (of
                ASCII letters).
            owner: `created_by` of all; None: any.
            order: those without a value come last, in any direction.
            folded: trials of a search, and jobs that come after others, are left out: the first of them has their
                states.
        """
        values: dict[str, Any] = {"state": state, "search": search or "", "owner": owner, "order": order}
        values |= {"descending": descending}
        values |= {"folded": folded, "families": None, "opened": None, "limit": limit, "offset": offset, "together": 0}
        rows = self._listed(values)
        # A page behind the last one has no row that has the number.
        counted = rows or (self._listed({**values, "limit": 1, "offset": 0}) if offset else rows)
        return [listed_job(row) for row in rows], counted[0]["matching"] if counted else 0

    def families(
        self,
        roots: Sequence[str],
        opened: Sequence[str],
        order: ListOrder,
        descending: bool,
        limit: int,
        together: int,
    ) -> Sequence[ListedJob]:
        """The jobs that `queue_page` has folded under some others: of those in `opened` all, of others what runs.

        Returns:
            Of each family at most `limit`, and of all together at most `together`, what runs before all others. Where
            `together` is reached, families with more members have equally many, up to one. Where `order` leaves it
            open, what runs comes first, then the newest trials, and then the jobs of a chain, the first one first. Each
            has its `root`.
        """
        values: dict[str, Any] = {"state": None, "search": "", "owner": None, "order": order, "folded": True}
        values |= {"descending": descending}
        values |= {"families": json.dumps([*roots]), "opened": json.dumps([*opened]), "limit": limit, "offset": 0}
        values |= {"together": together}
        return [listed_job(row) for row in self._listed(values)]

    def _listed(self, values: Mapping[str, Any]) -> Sequence[sqlite3.Row]:
        fixed = {"now": self._clock(), "aging": AGING, "highest": CRITICAL, "reserved": RESERVED}
        # What must be in a specification, as JSON writes it, before it is parsed.
        part = json.dumps(max(values["search"].split("="), key=len), ensure_ascii=False)[1:-1]
        return self.database.select("select_queue_page", {**values, "sort": values["order"], "part": part, **fixed})

    def sparks(self, names: Sequence[str], points: int) -> Mapping[str, Sequence[float]]:
        """Losses of each of some jobs at `points` steps or fewer, from its first to its last one, at even distances.

        Each takes `points` look-ups, whatever the number of its steps. Jobs without a loss are left out.
        """
        found: dict[str, list[float]] = {}
        for row in self.database.select("select_sparks", {"names": json.dumps([*names]), "points": points}):
            loss = None if row["metrics"] is None else json.loads(row["metrics"]).get("loss")
            if loss is not None and math.isfinite(loss):
                found.setdefault(row["job_uuid"], []).append(loss)
        return found

    def count(self) -> Mapping[JobState, int]:
        """The number of jobs in each state that has any."""
        return {JobState(row["state"]): row["jobs"] for row in self.database.select("count_states", {})}

    def list(self) -> Sequence[JobRecord]:
        """All jobs whose records can be read, oldest first."""
        return self._readable(self.database.select("select_jobs", {}))

    def active(self) -> Sequence[JobRecord]:
        """Jobs that may have processes (`states.ACTIVE`), oldest first."""
        return self._readable(self.database.select("select_active", {}))

    def active_run_dirs(self) -> frozenset[Path]:
        """Run directories in which processes may run, those of damaged records included."""
        return frozenset(Path(row["run_dir"]) for row in self.database.select("select_run_dirs", {}))

    def queue(self) -> Sequence[Queued]:
        """Jobs that wait for a device, oldest first, without those that wait for the time of their next attempt.

        A record that cannot be read is detected later, by `get` when the job is to start.
        """
        waiting = map(Queued._make, self.database.select("select_queue", {"now": self._clock()}))
        return [job for job in waiting if job.job_uuid not in self._damaged]

    def kinds_waiting(self) -> Sequence[Queued]:
        """The oldest job of each kind in the queue. Jobs of one kind have the same demand and the same `detail`.

        Kinds are few, whatever the number of jobs.
        """
        return list(map(Queued._make, self.database.select("select_kinds_waiting", {"now": self._clock()})))

    def attempts(self, job_uuid: str) -> Sequence[AttemptRecord]:
        """Every attempt at a job, the first one first."""
        return [
            record_of(AttemptRecord, row) for row in self.database.select("select_attempts", {"job_uuid": job_uuid})
        ]

    def seconds_trained(self, job_uuid: str) -> float:
        """Seconds of training in all attempts that have ended."""
        (row,) = self.database.select("select_seconds", {"job_uuid": job_uuid})
        return float(row["seconds"])

    def checkpoints(self, job_uuid: str) -> Sequence[CheckpointRecord]:
        """The listed checkpoints of a job, oldest first. Raises JobNotFound."""
        rows = self.database.select("select_checkpoints", {"job_uuid": job_uuid})
        if not rows:
            self.get(job_uuid)
        return [record_of(CheckpointRecord, row) for row in rows]

    def with_result(self, names: Iterable[str]) -> set[str]:
        """Those of some jobs that have a listed checkpoint `final`."""
        rows = self.database.select("select_with_result", {"names": json.dumps([*names])})
        return {row["job_uuid"] for row in rows}

    def points(self, job_uuid: str, after: int = -1, limit: int = -1) -> Sequence[PointRecord]:
        """Metric points beyond step `after`, by step; at most `limit`, where that is not negative. Raises
        JobNotFound."""
        self.get(job_uuid)
        values = {"job_uuid": job_uuid, "after": after, "limit": limit}
        return [point_record(row) for row in self.database.select("select_points", values)]

    def point_range(self, job_uuid: str, begin: int, end: int) -> tuple[int, int] | None:
        """The first and the last step from `begin` to `end` that have points; None: none has."""
        (row,) = self.database.select("select_point_range", {"job_uuid": job_uuid, "begin": begin, "end": end})
        return None if row["first"] is None else (row["first"], row["last"])

    def scan_points(self, job_uuid: str, begin: int, end: int) -> Iterator[sqlite3.Row]:
        """Kind, step, epoch, time (seconds) and metrics (JSON) of the points from step `begin` to `end`, by step."""
        return self.database.scan("scan_points", {"job_uuid": job_uuid, "begin": begin, "end": end})

    def points_together(self, job_uuid: str, begin: int, end: int) -> Mapping[str, tuple[Sequence[int], str]]:
        """Kind -> the steps of the points from step `begin` to `end`, by step, and their metrics, a JSON array."""
        (row,) = self.database.select("select_points_together", {"job_uuid": job_uuid, "begin": begin, "end": end})
        return {
            kind: ([*map(int, steps.split(","))], f"[{row[f'{kind}_metrics']}]")
            for kind in ("train", "validation")
            if (steps := row[f"{kind}_steps"]) is not None
        }

    def step_times(self, job_uuid: str, kind: str, steps: Iterable[int]) -> Mapping[int, tuple[float, float]]:
        """Step -> epoch and time (seconds) of the points of a kind at some steps."""
        values = {"job_uuid": job_uuid, "kind": kind, "steps": json.dumps([*steps])}
        return {row["step"]: (row["epoch"], row["time"]) for row in self.database.select("select_step_times", values)}

    def evaluations(self, job_uuid: str) -> Sequence[tuple[int, dict[str, float]]]:
        """Step and metrics of every evaluation, by step."""
        rows = self.database.select("select_evaluations", {"job_uuid": job_uuid})
        return [(row["step"], json.loads(row["metrics"])) for row in rows]

    def outcome(self, job_uuid: str, attempt: int) -> Outcome:
        """What the events of an attempt report about its end, and the cursor."""
        (row,) = self.database.select("select_outcome", {"job_uuid": job_uuid, "attempt": attempt})
        failed = None if row["failed"] is None else Failed.stored(row["failed"])
        return Outcome(row["event_offset"], bool(row["finished"]), failed, row["paused_at_step"])

    def event_files(self, job_uuid: str, first: int = 0) -> tuple[JobState, Sequence[EventFile]]:
        """The job's state, and where its events are from attempt `first` on, oldest first. Raises JobNotFound."""
        rows = self.database.select("select_event_files", {"job_uuid": job_uuid, "first": first})
        if not rows:
            raise JobNotFound(job_uuid)
        files = [EventFile(row["attempt"], Path(row["run_dir"]), row["event_offset"]) for row in rows if row["run_dir"]]
        return JobState(rows[0]["state"]), files

    def holders(self) -> Mapping[str, str]:
        """Place -> the job that holds it, until the node reports that the task is gone. A job whose record cannot be
        read holds none."""
        active = [row for row in self.database.select("select_places", {}) if row["job_uuid"] not in self._damaged]
        rows = [*self.database.select("select_taken", {}), *active]
        return {place: row["job_uuid"] for row in rows for place in row["places"].split(",")}

    def _page(
        self, name: str, after: str | None, states: Iterable[JobState] | None, limit: int | None, **more: str
    ) -> Sequence[sqlite3.Row]:
        if after is not None and not self.database.select("request_digest", {"job_uuid": after}):
            raise JobNotFound(after)
        wanted = None if states is None else json.dumps([state.value for state in states])
        values = {"after": after, "states": wanted, "limit": -1 if limit is None else limit, **more}
        return self.database.select(name, values)

    def _readable(self, rows: Sequence[sqlite3.Row]) -> Sequence[JobRecord]:
        """The jobs whose records can be decoded: a damaged one must not hide the others."""
        jobs = []
        for row in rows:
            try:
                jobs.append(job_record(row))
            except _DAMAGED as error:
                self._exclude(row["job_uuid"], error)
        return jobs

    def _exclude(self, job_uuid: str, error: Exception) -> None:
        """Give no device to a job whose record cannot be read, and log that once."""
        if job_uuid not in self._damaged:
            self._damaged.add(job_uuid)
            log.error(
                "job database %s: job %r gets no device, its record cannot be read: %s", self.path, job_uuid, error
            )


def mentioned_digests(texts: Iterable[str]) -> set[str]:
    """Every sha256 in some texts."""
    return {digest for text in texts for digest in re.findall(r"[0-9a-f]{64}", text)}


def digest_conflict(job_uuid: str) -> JobConflict:
    """The error for a job_uuid that another request has used."""
    return JobConflict(
        f"job {job_uuid!r} exists already and was made from a different request:"
        " choose another job_uuid, or send the same request to get the same job"
    )


def read_samples(
    jobs: JobReader, job_uuid: str, limit: int = -1, offset: int = 0
) -> tuple[Sequence[SamplesRecord], int]:
    """Sets of answers in the order in which they were taken, and their number without `limit` and `offset`."""
    rows = jobs.database.select("select_samples", {"job_uuid": job_uuid, "limit": limit, "offset": offset})
    (count,) = jobs.database.select("count_samples", {"job_uuid": job_uuid})
    return [samples_record(row) for row in rows], count["sets"]


def read_rollouts(jobs: JobReader, job_uuid: str, limit: int, offset: int) -> tuple[Sequence[RolledOut], int]:
    """The answers that train the model, each with its prompt, the newest first; and their number without `limit` and
    `offset`."""
    rows = jobs.database.select("select_rollouts", {"job_uuid": job_uuid, "limit": limit, "offset": offset})
    (count,) = jobs.database.select("count_rollouts", {"job_uuid": job_uuid})
    return [RolledOut.model_validate_json(row["answers"]) for row in rows], count["sets"]


def read_warnings(jobs: JobReader, job_uuid: str) -> Sequence[tuple[int, str]]:
    """Warnings that were reported while a job trained, in that order, each with the last step before it."""
    rows = jobs.database.select("select_warnings", {"job_uuid": job_uuid})
    return [(row["step"], row["message"]) for row in rows]


class SentRequest(NamedTuple):
    """What a caller requested of the service."""

    call: str
    """The last part of its path, such as supervised-fine-tune."""
    body: dict[str, Any]
    """The fields that were set."""


LONGEST_REQUEST = 4 << 20
"""Bytes of a request, as JSON, that is kept. The body of a call has at most 1 MiB, and JSON in ASCII at most three
times as many bytes as the same text in UTF-8."""


def read_request(jobs: JobReader, job_uuid: str) -> SentRequest | None:
    """The request of a job; None: it was not made by a call of the service."""
    rows = jobs.database.select("select_request", {"job_uuid": job_uuid})
    if not rows:
        return None
    text = zlib.decompressobj().decompress(rows[0]["body"], LONGEST_REQUEST)
    return SentRequest(rows[0]["call"], json.loads(text))


def keep_request(jobs: JobReader, job_uuid: str, requested: SentRequest) -> None:
    """Keep the request of a stored job, once. One of more than `LONGEST_REQUEST` bytes, which no call sends, is not
    kept."""
    body = json.dumps(requested.body).encode()
    if len(body) <= LONGEST_REQUEST:
        with jobs.database.transaction() as execute:
            execute("insert_request", {"job_uuid": job_uuid, "call": requested.call, "body": zlib.compress(body)})


_EVALUATIONS, _AT_BEST = 50, 5
"""The last evaluations in which the best one is looked for, and the training points before that one."""


def read_watched(jobs: JobReader, job_uuid: str) -> Watched:
    """The points that the signs of a training are read from: a few, whatever the number of its steps."""

    def points(name: str, limit: int, until: int = _LAST_STEP) -> list[WatchedPoint]:
        values = {"job_uuid": job_uuid, "limit": limit, "until": until}
        found = [WatchedPoint(row["step"], json.loads(row["metrics"])) for row in jobs.database.select(name, values)]
        return sorted(found, key=lambda one: one.step)

    evaluations = points("select_last_evaluations", _EVALUATIONS)
    best = best_evaluation(evaluations)
    return Watched(
        *(points("select_first_points", WINDOW), points("select_last_points", WINDOW), evaluations),
        () if best is None else points("select_last_points", _AT_BEST, best.step),
    )


class QueueAhead:
    """The queue of a job database, and what runs before it. Every method may raise StoreError."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock

    def waiting(self, limit: int) -> Sequence[WaitingJob]:
        """The first waiting jobs in the order of the queue, with those that wait for their next attempt."""
        values = {"limit": limit, "now": self._clock(), "aging": AGING, "highest": CRITICAL}
        return [waiting_job(row) for row in self._database.select("select_first_waiting", values)]

    def running(self) -> Sequence[RunningJob]:
        """The jobs that may have processes (`states.ACTIVE`)."""
        return [running_job(row) for row in self._database.select("select_paces", {})]


class Unfinished(NamedTuple):
    """Jobs that have not ended, and whose checkpoints are alike."""

    job_uuid: str
    """Of one of them."""
    model: str
    revision: str | None
    dtype: str
    is_adapter: bool
    merges: bool
    """Besides the adapter, the merged model is written."""
    work: str | None
    """What they do in place of training."""
    directory: str
    """In which the directories of their checkpoints lie."""


def unfinished(database: Database) -> Sequence[Unfinished]:
    """The kinds of jobs that have not ended. Raises StoreError."""
    return [
        Unfinished(*row)._replace(is_adapter=bool(row["is_adapter"]), merges=bool(row["merges"]))
        for row in database.select("select_unfinished", {})
    ]


def unfinished_job(spec: JobSpec) -> Unfinished:
    """The same of one job, which has not ended."""
    return Unfinished(
        *(
            spec.job_uuid,
            spec.source.model,
            spec.source.revision,
            spec.compute.dtype,
            spec.lora is not None,
            spec.train.merge_adapter,
        ),
        work=None if spec.work is None else spec.work.kind,
        directory=f"{spec.checkpoint_dir.parent}/",
    )

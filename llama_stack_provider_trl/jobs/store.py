"""The durable record of every job, in one sqlite file. Knows nothing of processes.

Several processes may have the file open: each write is one short transaction that names the state and the attempt it
assumes, and says whether it applied. The statements are in `queries.sql`, the tables in `schema.sql`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import JobConflict, JobNotFound, LimitReached, StoreError
from ..specs.events import (
    LAST_TIME,
    CheckpointDamaged,
    CheckpointSaved,
    Evaluated,
    Event,
    Failed,
    Finished,
    Paused,
    Prepared,
    Progress,
    Reason,
    Started,
    Warned,
)
from ..specs.job import JobSpec
from ..system.files import private_directory, touched
from ..system.process import FileLock
from .placement import Demand, Queued
from .records import (
    AttemptRecord,
    CheckpointRecord,
    CredentialRecord,
    EventFile,
    JobProgress,
    JobRecord,
    JobSummary,
    NodeMode,
    NodeRecord,
    NodeTaskRecord,
    Outcome,
    PointRecord,
)
from .states import ACTIVE, TERMINAL, TRANSITIONS, JobState

DATABASE = "jobs.sqlite3"
"""Its name in a data directory."""
SCHEMA_VERSION = 5
_PRIVATE = ("jobs", "datasets", "reference", "preflights")
_BEFORE_THE_DATABASE = {"llama-stack", "service.lock", "supervisor.lock"}
"""What there may be in a data directory of ours before its first job database."""
log = logging.getLogger(__name__)
_BUSY_SECONDS = 10.0
"""How long a writer waits for another. Transactions take about a millisecond."""
_REPLACED_SECONDS = 30.0
"""How long the credential of a node stays valid after its successor was used: calls with it may be under way."""
_REVOKED_SECONDS = 30 * 24 * 3600.0
"""How long the credential of a removed node is recognized as that."""
_UNUSED_CREDENTIALS = 4

_DAMAGED = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError)
"""What reading a record raises that was not written by this release, or was changed by hand."""

_DELETES = (
    *("delete_tasks", "delete_attempts", "delete_points", "delete_checkpoints", "delete_warnings"),
    "delete_job",  # last: the others refer to it
)


class _Connection(sqlite3.Connection):
    """A connection that a WeakSet can hold."""


class Store:
    """Jobs, attempts, metric points, checkpoints and warnings in `path`. Safe to share between threads.

    Every method may raise StoreError: the file cannot be opened, read or written.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._local = threading.local()
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._damaged: set[str] = set()
        self._create()

    def add_job(
        self,
        spec: JobSpec,
        request_digest: str,
        warnings: Iterable[str] = (),
        needed: Iterable[Path] = (),
        created_by: str = "",
        max_waiting: int | None = None,
    ) -> bool:
        """Queue a job, once: a POST that is repeated with the same digest changes nothing.

        Args:
            needed: rows that it trains on and the checkpoint that it begins with: they must be there still, and none
                is removed meanwhile.
            created_by: name of the caller's token.
            max_waiting: how many jobs of `created_by` may wait, this one included; None: any number.

        Returns:
            Whether the job is new.

        Raises:
            JobConflict: the job_uuid is taken by a job with another digest, or its checkpoint directory is another
                job's.
            LimitReached: `created_by` has `max_waiting` jobs that wait.
            StoreError: some of `needed` are gone.
        """
        key = {"job_uuid": spec.job_uuid}
        ours = str(spec.checkpoint_dir)
        here_or_above = json.dumps([ours, *map(str, spec.checkpoint_dir.parents)])
        row = {
            **{**key, "request_digest": request_digest, "spec": spec.model_dump_json(), "now": self._clock()},
            **{"wanted_device": spec.device, "priority": spec.priority, "ranks": spec.ranks, "checkpoint_dir": ours},
            **{"demand": Demand.of(spec).text(), "created_by": created_by},
        }
        with self._transaction() as execute:
            neighbour = execute("select_neighbour", {"ours": ours, "here_or_above": here_or_above}).fetchone()
            if neighbour is not None and neighbour["job_uuid"] != spec.job_uuid:
                raise JobConflict(
                    f"checkpoint_dir {str(spec.checkpoint_dir)!r} is in the way of job {neighbour['job_uuid']!r}, "
                    "whose checkpoints lie there: choose another checkpoint_dir"
                )
            created = execute("insert_job", row).rowcount == 1
            for path in needed if created else ():
                if not touched(path):
                    raise StoreError(f"{path} was removed while job {spec.job_uuid!r} was stored: send it again")
            if not created and execute("request_digest", key).fetchone()["request_digest"] != request_digest:
                raise _taken(spec.job_uuid)
            if created and max_waiting is not None and execute("count_waiting", row).fetchone()["jobs"] > max_waiting:
                raise LimitReached(
                    f"the token {created_by!r} has {max_waiting} jobs that wait, which is its limit (max_queued_jobs): "
                    "submit this one when one of them has started, or cancel one"
                )
            for message in warnings if created else ():
                execute("insert_warning", {**key, "message": message})
        return created

    def state_of(self, job_uuid: str) -> JobState | None:
        """The state of a job, without the rest of its record; None: there is no such job."""
        rows = self._select("select_state", {"job_uuid": job_uuid})
        return JobState(rows[0]["state"]) if rows else None

    def digests(self) -> set[str]:
        """Every sha256 that the record of a job mentions; a damaged record still counts."""
        return _digests(row["spec"] for row in self._select("select_specs", {}))

    @contextmanager
    def no_new_jobs(self) -> Iterator[set[str]]:
        """No job is added (or changes) in the block; yields `digests`. Nothing slow may happen in it."""
        with self._transaction() as execute:
            yield _digests(row["spec"] for row in execute("select_specs", {}))

    def holds(self, job_uuid: str, request_digest: str) -> bool:
        """Whether this very request was stored before.

        Raises:
            JobConflict: the job_uuid is taken by a job with another digest.
        """
        rows = self._select("request_digest", {"job_uuid": job_uuid})
        if rows and rows[0]["request_digest"] != request_digest:
            raise _taken(job_uuid)
        return bool(rows)

    def get(self, job_uuid: str) -> JobRecord:
        """Raises JobNotFound; StoreError where the job's record cannot be read."""
        rows = self._select("select_job", {"job_uuid": job_uuid})
        if not rows:
            raise JobNotFound(job_uuid)
        try:
            return _job(rows[0])
        except _DAMAGED as error:
            self._leave_alone(job_uuid, error)
            raise StoreError(f"job database {self.path}: the record of job {job_uuid!r} is damaged: {error}") from error

    def names(self) -> Sequence[str]:
        """The job_uuid of every job, oldest first."""
        return [row["job_uuid"] for row in self._select("select_names", {})]

    def page_of_names(
        self, after: str | None = None, states: Iterable[JobState] | None = None, limit: int | None = None
    ) -> Sequence[str]:
        """The job_uuid of jobs younger than job `after` and in one of `states`, oldest first.

        Raises:
            JobNotFound: there is no job `after`.
        """
        return [row["job_uuid"] for row in self._page("select_name_page", after, states, limit)]

    def page(
        self, after: str | None = None, states: Iterable[JobState] | None = None, limit: int | None = None
    ) -> Sequence[JobSummary]:
        """As `page_of_names`, with what a list shows: a `JobRecord` takes five times as long to make."""
        return [_summary(row) for row in self._page("select_page", after, states, limit)]

    def count(self) -> Mapping[JobState, int]:
        """How many jobs there are in each state that has any."""
        return {JobState(row["state"]): row["jobs"] for row in self._select("count_states", {})}

    def list(self) -> Sequence[JobRecord]:
        """All jobs whose records can be read, oldest first."""
        return self._readable(self._select("select_jobs", {}))

    def active(self) -> Sequence[JobRecord]:
        """Jobs of which processes may exist (`states.ACTIVE`), oldest first."""
        return self._readable(self._select("select_active", {}))

    def active_run_dirs(self) -> frozenset[Path]:
        """Run directories in which processes may be at work, those of damaged records included."""
        return frozenset(Path(row["run_dir"]) for row in self._select("select_run_dirs", {}))

    def queue(self) -> Sequence[Queued]:
        """Jobs that wait for a device, oldest first; those that wait for the time of their next try are left out.

        A record that cannot be read is found out when it is: by the `get` of whoever would start the job.
        """
        waiting = map(Queued._make, self._select("select_queue", {"now": self._clock()}))
        return [job for job in waiting if job.job_uuid not in self._damaged]

    def kinds_waiting(self) -> Sequence[Queued]:
        """The oldest job of each kind in the queue: those of a kind ask for the same, and have the same `detail`.

        They are few, however many wait.
        """
        return list(map(Queued._make, self._select("select_kinds_waiting", {"now": self._clock()})))

    def attempts(self, job_uuid: str) -> Sequence[AttemptRecord]:
        """Every try at a job, the first one first."""
        return [_attempt(row) for row in self._select("select_attempts", {"job_uuid": job_uuid})]

    def seconds_trained(self, job_uuid: str) -> float:
        """Over all attempts that have ended."""
        (row,) = self._select("select_seconds", {"job_uuid": job_uuid})
        return float(row["seconds"])

    def checkpoints(self, job_uuid: str) -> Sequence[CheckpointRecord]:
        """Oldest first. Raises JobNotFound."""
        rows = self._select("select_checkpoints", {"job_uuid": job_uuid})
        if not rows:
            self.get(job_uuid)
        return [_checkpoint(row) for row in rows]

    def points(self, job_uuid: str, after: int = -1) -> Sequence[PointRecord]:
        """Metric points beyond step `after`, by step. Raises JobNotFound."""
        self.get(job_uuid)
        return [_point(row) for row in self._select("select_points", {"job_uuid": job_uuid, "after": after})]

    def evaluations(self, job_uuid: str) -> Sequence[tuple[int, dict[str, float]]]:
        """Step and metrics of every evaluation, by step."""
        rows = self._select("select_evaluations", {"job_uuid": job_uuid})
        return [(row["step"], json.loads(row["metrics"])) for row in rows]

    def outcome(self, job_uuid: str, attempt: int) -> Outcome:
        """What the events of an attempt have said about its end, and the cursor."""
        (row,) = self._select("select_outcome", {"job_uuid": job_uuid, "attempt": attempt})
        failed = None if row["failed"] is None else _failed(row["failed"])
        return Outcome(row["event_offset"], bool(row["finished"]), failed, row["paused_at_step"])

    def event_files(self, job_uuid: str, first: int = 0) -> tuple[JobState, Sequence[EventFile]]:
        """The job's state, and where its events are from attempt `first` on, oldest first. Raises JobNotFound."""
        rows = self._select("select_event_files", {"job_uuid": job_uuid, "first": first})
        if not rows:
            raise JobNotFound(job_uuid)
        files = [EventFile(row["attempt"], Path(row["run_dir"]), row["event_offset"]) for row in rows if row["run_dir"]]
        return JobState(rows[0]["state"]), files

    def delete(self, job_uuid: str, set_aside: Callable[[JobRecord], object] = lambda job: None) -> JobRecord:
        """Forget a job that has ended; its files are the caller's to remove. Returns what it was.

        Args:
            set_aside: takes them out of the way, before the name is free for another job: quick, and only that.

        Raises:
            JobNotFound.
            JobConflict: the job has not ended.
        """
        key = {"job_uuid": job_uuid}
        with self._transaction() as execute:
            job = self.get(job_uuid)  # the connection is this thread's: as the transaction sees it
            if job.state not in TERMINAL:
                raise JobConflict(
                    f"job {job_uuid!r} is {job.state}: cancel it and wait until it has ended, then delete it"
                )
            if left := [row["node"] for row in execute("select_unfinished_tasks", key)]:
                raise JobConflict(
                    f"job {job_uuid!r} may still have processes on {', '.join(left)}: delete it once that node has "
                    "said that they are gone, or remove the node (DELETE /v1/nodes/NAME)"
                )
            set_aside(job)
            for name in (
                "delete_tasks",
                "delete_attempts",
                "delete_points",
                "delete_checkpoints",
                "delete_warnings",
                "delete_job",
            ):
                execute(name, key)
        return job

    def request_cancel(self, job_uuid: str) -> JobRecord:
        """Record that the job is to end: at once where it waits, `cancelling` where it runs, no change if cancelled.

        Raises:
            JobNotFound.
            JobConflict: the job has completed or failed.
        """
        while True:
            job = self.get(job_uuid)
            if job.state in (JobState.cancelling, JobState.cancelled):
                return job
            if job.state in TERMINAL:
                raise JobConflict(f"job {job_uuid!r} is {job.state} already: there is nothing left to cancel")
            target = JobState.cancelling if job.state in ACTIVE else JobState.cancelled
            # Not applied: the job moved on meanwhile, so look again.
            self.transition(job_uuid, job.attempt, job.state, target)

    def request_pause(self, job_uuid: str) -> JobRecord:
        """Record that the job is to save and give its device back: at once where it waits, `pausing` where it runs.

        Raises:
            JobNotFound.
            JobConflict: the job has ended, or is about to.
        """
        while True:
            job = self.get(job_uuid)
            if job.state in (JobState.pausing, JobState.paused):
                return job
            if job.state in TERMINAL or job.state is JobState.cancelling:
                raise JobConflict(f"job {job_uuid!r} is {job.state}: there is nothing left to pause")
            target = JobState.pausing if job.state in ACTIVE else JobState.paused
            self.transition(job_uuid, job.attempt, job.state, target)

    def request_resume(self, job_uuid: str) -> JobRecord:
        """Queue a paused job again; one that was not paused is left as it is.

        Raises:
            JobNotFound.
            JobConflict: the job has ended, or has not finished pausing.
        """
        while True:
            job = self.get(job_uuid)
            if job.state is JobState.pausing:
                raise JobConflict(f"job {job_uuid!r} is still saving its checkpoint: resume it when it is paused")
            if job.state in TERMINAL or job.state is JobState.cancelling:
                raise JobConflict(f"job {job_uuid!r} is {job.state}: submit it again under another job_uuid")
            if job.state is not JobState.paused:
                return job
            self.transition(job_uuid, job.attempt, job.state, JobState.scheduled)

    def transition(
        self,
        job_uuid: str,
        attempt: int,
        source: JobState,
        target: JobState,
        reason: Reason | None = None,
        message: str = "",
    ) -> bool:
        """Move a job on, if it still is in `source` and in this attempt. Returns whether it was."""
        assert target in TRANSITIONS[source], f"{source} -> {target}"
        row = {
            **{"job_uuid": job_uuid, "attempt": attempt, "source": source, "target": target},
            **{"reason": reason, "message": message},
            "completed_at": self._clock() if target in TERMINAL else None,
        }
        with self._transaction() as execute:
            moved = execute("change_state", row).rowcount == 1
            if moved and source in ACTIVE and target not in ACTIVE:
                execute("end_attempt", {**row, "now": self._clock()})
                execute("stop_tasks_of_attempt", row)
        return moved

    def retry(self, job: JobRecord, reason: Reason | None, message: str, wait: float, *, counts: bool = True) -> bool:
        """Queue a job whose attempt has ended once more, for `wait` seconds from now. Returns whether it was there.

        Args:
            reason: None: it did not fail, its node is wanted for something else.
            counts: as one of the job's `retries`.
        """
        now = self._clock()
        said = message.partition("\n")[0]
        detail = f"attempt {job.attempt} ended ({reason or 'moved'}); the next one starts in {wait:.0f} s: {said}"
        row = {
            **{"job_uuid": job.job_uuid, "attempt": job.attempt, "source": job.state, "reason": reason},
            **{"message": message, "not_before": now + wait, "now": now, "detail": detail, "used": int(counts)},
        }
        with self._transaction() as execute:
            moved = execute("retry_job", row).rowcount == 1
            if moved:
                execute("end_attempt", row)
                execute("stop_tasks_of_attempt", row)
        return moved

    def remove_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Stop listing a checkpoint."""
        with self._transaction() as execute:
            execute("delete_checkpoint", {"job_uuid": checkpoint.job_uuid, "path": str(checkpoint.path)})

    def warn(self, job_uuid: str, message: str) -> None:
        """Tell the user of a job something, once."""
        with self._transaction() as execute:
            execute("insert_warning", {"job_uuid": job_uuid, "message": message})

    def launch(
        self, job_uuid: str, attempt: int, device: str, run_dir: Path, resume: tuple[Path, int] | None = None
    ) -> bool:
        """Record the next attempt (`attempt`) of a scheduled job, which is `launching` then. Returns whether it was.

        Args:
            resume: the checkpoint that it goes on from, and its step; None: from the start.
        """
        row = {
            **{"job_uuid": job_uuid, "attempt": attempt, "device": device, "run_dir": str(run_dir)},
            "resume_from": None if resume is None else str(resume[0]),
            "resume_step": 0 if resume is None else resume[1],
        }
        with self._transaction() as execute:
            launched = execute("launch_job", row).rowcount == 1
            if launched:
                execute("insert_attempt", {**row, "now": self._clock()})
        return launched

    def note_detail(self, job_uuid: str, state: JobState, detail: str) -> None:
        """Record what a job waits for, if it still is in `state`."""
        with self._transaction() as execute:
            execute("change_detail", {"job_uuid": job_uuid, "state": state, "detail": detail})

    def note_waiting(self, details: Sequence[tuple[Queued, str]]) -> None:
        """Record what all jobs of some kinds (`kinds_waiting`) wait for."""
        with self._transaction() as execute:
            for kind, detail in details:
                row = {"wanted_device": kind.device, "ranks": kind.ranks, "said": kind.detail, "now": self._clock()}
                row |= {"demand": kind.demand, "tried": int(kind.tried), "detail": detail}
                execute("change_waiting", row)

    def apply_events(self, job_uuid: str, attempt: int, events: Sequence[Event], new_offset: int) -> bool:
        """Take in events and the cursor behind them, all or nothing; each counts once however often it comes.

        Returns:
            False, and nothing changes, where the attempt is not the current one or the events are known.
        """
        key = {"job_uuid": job_uuid, "attempt": attempt}
        with self._transaction() as execute:
            applied = execute("advance_cursor", {**key, "offset": new_offset}).rowcount == 1
            for event in events if applied else ():
                for name, row in _changes(event):
                    execute(name, {**key, **row})
        return applied

    def join(self, name: str, machine_id: str, boot_id: str, report: str, credential: str | None = None) -> None:
        """Record a node as it says it is. Where it is another machine than before, or has started anew since, nothing
        is left of the tasks that it had.

        Args:
            credential: sha256 of the one that this join issues.
        """
        row = {"name": name, "machine_id": machine_id, "boot_id": boot_id, "report": report, "now": self._clock()}
        with self._transaction() as execute:
            known = execute("select_node", row).fetchone()
            if known is not None and (known["machine_id"], known["boot_id"]) != (machine_id, boot_id):
                execute("note_tasks_gone", {"node": name})
            execute("upsert_node", row)
            if credential is not None:
                execute("insert_credential", {"sha256": credential, "node": name})
                execute("limit_unused_credentials", {"node": name, "most": _UNUSED_CREDENTIALS})

    def credential(self, sha256: str) -> CredentialRecord | None:
        """The credential of a node; None: there is none of this hash, or it has expired."""
        rows = self._select("select_credential", {"sha256": sha256, "now": self._clock()})
        return CredentialRecord(rows[0]["node"], bool(rows[0]["used"]), bool(rows[0]["revoked"])) if rows else None

    def has_used_credential(self, node: str) -> bool:
        """Whether a node has called with a credential that is valid."""
        return bool(self._select("select_used_credential", {"node": node, "now": self._clock()}))

    def note_credential_used(self, node: str, sha256: str) -> None:
        """Record that a node calls with this credential. Those that were issued before it expire soon."""
        now = self._clock()
        with self._transaction() as execute:
            if execute("use_credential", {"sha256": sha256}).rowcount:
                row = {"node": node, "sha256": sha256, "expires_at": now + _REPLACED_SECONDS}
                execute("expire_credentials_before", row)
                execute("delete_expired_credentials", {"now": now})

    def nodes(self) -> Sequence[NodeRecord]:
        """In the order in which they first joined."""
        return [_node(row) for row in self._select("select_nodes", {})]

    def node(self, name: str) -> NodeRecord | None:
        """None: there is none of this name."""
        rows = self._select("select_node", {"name": name})
        return _node(rows[0]) if rows else None

    def note_seen(self, name: str) -> None:
        with self._transaction() as execute:
            execute("note_seen", {"name": name, "now": self._clock()})

    def set_mode(self, name: str, mode: NodeMode) -> bool:
        """Returns whether there is such a node."""
        with self._transaction() as execute:
            return execute("change_mode", {"name": name, "mode": mode}).rowcount == 1

    def remove_node(self, name: str) -> None:
        """Forget a node and revoke its credentials; what it was asked to do counts as gone."""
        now = self._clock()
        with self._transaction() as execute:
            execute("note_tasks_gone", {"node": name})
            execute("delete_node", {"name": name})
            execute("revoke_credentials", {"node": name, "expires_at": now + _REVOKED_SECONDS})
            execute("delete_expired_credentials", {"now": now})

    def add_tasks(self, tasks: Iterable[NodeTaskRecord]) -> None:
        """Ask nodes to do their parts of an attempt; those that were asked before are left as they are."""
        with self._transaction() as execute:
            for task in tasks:
                execute("insert_task", {**asdict(task), "places": ",".join(task.places)})

    def tasks(self, task_id: str) -> Sequence[NodeTaskRecord]:
        """The parts of an attempt, rank 0's node first."""
        return [_task(row) for row in self._select("select_tasks", {"task_id": task_id})]

    def tasks_of(self, node: str) -> Sequence[NodeTaskRecord]:
        """What a node is asked to do."""
        return [_task(row) for row in self._select("select_tasks_of_node", {"node": node})]

    def current_task(self, task_id: str, node: str) -> NodeTaskRecord | None:
        """A node's part of an attempt; None: it is not current any more, or was told to stop."""
        rows = self._select("select_current_task", {"task_id": task_id, "node": node})
        return _task(rows[0]) if rows else None

    def has_current_task_of(self, node: str, job_uuid: str) -> bool:
        """Whether a node takes part in the current attempt of a job."""
        return bool(self._select("select_current_task_of_job", {"node": node, "job_uuid": job_uuid}))

    def has_current_task_with(self, node: str, sha256: str) -> bool:
        """Whether a node takes part in the current attempt of a job with these rows."""
        return bool(self._select("select_current_task_with_rows", {"node": node, "sha256": sha256}))

    @contextmanager
    def while_current(self, task_id: str, node: str) -> Iterator[bool]:
        """Yields whether a node's part of an attempt is current; it stays so in the block. Nothing slow may happen in
        it."""
        with self._transaction() as execute:
            row = {"task_id": task_id, "node": node}
            yield execute("select_current_task", row).fetchone() is not None

    def holders(self) -> Mapping[str, str]:
        """Place -> the job that has it (but not one whose record cannot be read), or of which a node has not yet said
        that its task is gone."""
        active = [row for row in self._select("select_places", {}) if row["job_uuid"] not in self._damaged]
        rows = [*self._select("select_taken", {}), *active]
        return {place: row["job_uuid"] for row in rows for place in row["places"].split(",")}

    def advance_tasks(self, tasks: Iterable[NodeTaskRecord], stage: str) -> None:
        """Ask for the next stage, with the orders that the tasks have now."""
        with self._transaction() as execute:
            for task in tasks:
                row = {"task_id": task.task_id, "node": task.node, "source": task.stage}
                execute("advance_task", {**row, "stage": stage, "order": task.order})

    def stop_tasks(self, task_id: str, ending: str) -> None:
        """Have every node end its part. The first `ending` of an attempt counts."""
        with self._transaction() as execute:
            execute("stop_tasks", {"task_id": task_id, "ending": ending})

    def note_tasks(self, node: str, reports: Mapping[str, str], gone: Iterable[str]) -> bool:
        """What a node says of its tasks: task_id -> report, and those of which nothing is left. Returns whether any of
        it is new."""
        with self._transaction() as execute:
            new = 0
            for task_id, report in reports.items():
                new += execute("note_task", {"task_id": task_id, "node": node, "report": report}).rowcount
            for task_id in gone:
                new += execute("note_task_gone", {"task_id": task_id, "node": node}).rowcount
        return new > 0

    def forget_tasks(self) -> None:
        """Drop what is known of attempts that have ended on every node."""
        with self._transaction() as execute:
            execute("forget_tasks", {})

    def _page(
        self, name: str, after: str | None, states: Iterable[JobState] | None, limit: int | None
    ) -> Sequence[sqlite3.Row]:
        if after is not None and not self._select("request_digest", {"job_uuid": after}):
            raise JobNotFound(after)
        wanted = None if states is None else json.dumps([state.value for state in states])
        return self._select(name, {"after": after, "states": wanted, "limit": -1 if limit is None else limit})

    def _readable(self, rows: Sequence[sqlite3.Row]) -> Sequence[JobRecord]:
        """One damaged record must not hide the other jobs."""
        jobs = []
        for row in rows:
            try:
                jobs.append(_job(row))
            except _DAMAGED as error:
                self._leave_alone(row["job_uuid"], error)
        return jobs

    def _leave_alone(self, job_uuid: str, error: Exception) -> None:
        """Give a job whose record cannot be read no device from here on, and say so once."""
        if job_uuid not in self._damaged:
            self._damaged.add(job_uuid)
            log.error("job database %s: job %r is left alone: %s", self.path, job_uuid, error)

    def close(self) -> None:
        """Close the connections of all threads. A later call opens a new one."""
        for connection in list(self._connections):
            connection.close()
        self._local = threading.local()

    def _select(self, name: str, values: Mapping[str, Any]) -> Sequence[sqlite3.Row]:
        with self._told():
            return self._connection().execute(_queries()[name], values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[Callable[[str, Mapping[str, Any]], sqlite3.Cursor]]:
        """One write transaction; yields a function that runs a named statement."""
        with self._told():
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield lambda name, values: connection.execute(_queries()[name], values)
                connection.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled it back already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    select, transaction = _select, _transaction
    """For the records that have a class of their own over the same file, such as `tokens.Tokens`."""

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While this is open, all that this thread reads is of one moment: no checkpoint of a job that has not begun.

        Only for reading; writers are not held up.
        """
        with self._told():
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                yield
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise  # wrong values or a wrong statement: our bug, and nothing is the matter with the file
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"job database {self.path}: {error}") from error

    def _connection(self) -> _Connection:
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            self._connections.add(connection)
        return connection

    def _connect(self) -> _Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=_BUSY_SECONDS,
            isolation_level=None,  # transactions are begun and ended by us
            check_same_thread=False,  # only so that close() may close every thread's
            factory=_Connection,
        )
        connection.row_factory = sqlite3.Row
        # What was answered must outlive a power cut: in WAL mode, NORMAL would not wait for the disk.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _create(self) -> None:
        """Make the tables, unless they are there."""
        with self._told():
            private_data_dir(self.path.parent)
            if not self.path.exists():  # sqlite would make it 0644
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = self._connection()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"job database {self.path} has schema version {version}, this program knows {SCHEMA_VERSION}:"
                    " it was written by a newer release; upgrade, or use another data directory"
                )
            if version < SCHEMA_VERSION:
                _use_wal(connection)
                with _lock(self.path):
                    (version,) = connection.execute("PRAGMA user_version").fetchone()
                    upgrades = range(version, SCHEMA_VERSION) if version else ()
                    try:
                        connection.executescript(_as_one([*(f"upgrade-{old}.sql" for old in upgrades), "schema.sql"]))
                    finally:
                        connection.rollback()  # does nothing once it is committed


def private_data_dir(data_dir: Path) -> None:
    """Make a data directory that no other user can enter. One that held other files before it was ours stays open, and
    what we make in it does not.

    Raises:
        OSError: it cannot be made.
    """
    if not data_dir.exists() or _is_ours(data_dir):
        return private_directory(data_dir)
    if data_dir.stat().st_mode & 0o077:
        log.warning("%s holds files of others and stays as it is: only what is written there is made private", data_dir)
        for name in _PRIVATE:
            private_directory(data_dir / name)


def _is_ours(data_dir: Path) -> bool:
    return (data_dir / DATABASE).exists() or {path.name for path in data_dir.iterdir()} <= _BEFORE_THE_DATABASE


def _digests(specs: Iterable[str]) -> set[str]:
    return {digest for spec in specs for digest in re.findall(r"[0-9a-f]{64}", spec)}


def _taken(job_uuid: str) -> JobConflict:
    return JobConflict(
        f"job {job_uuid!r} exists already and was made from a different request:"
        " choose another job_uuid, or send the same request to get the same job"
    )


@contextmanager
def _lock(database: Path) -> Iterator[None]:
    """Keeps two processes from upgrading a database at once."""
    lock = FileLock(database.with_name(f"{database.name}.upgrade"))
    deadline = time.monotonic() + _BUSY_SECONDS
    while not lock.acquire(f"pid {os.getpid()}") and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()


def _use_wal(connection: sqlite3.Connection) -> None:
    """Make the file one whose readers and writer do not wait for each other. The switch ignores the busy timeout."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _changes(event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
    """The statements that an event amounts to, each with its values."""
    row = {"time": event.time}
    match event:
        case Started():
            yield "note_started", row
            yield "note_attempt_started", row
        case Prepared():
            steps = {"total_steps": event.total_steps, "start_step": event.start_step}
            resumed_from = None if event.resumed_from is None else str(event.resumed_from)
            yield "note_prepared", {**row, **steps, "resumed_from": resumed_from, "event": event.model_dump_json()}
            yield "supersede_points", steps
        case Warned():
            yield "insert_warning", {"message": event.message}
        case Progress():
            yield "note_progress", {**row, **_pace(event)}
            yield "upsert_point", {**row, **_metrics(event), "kind": "train"}
        case Evaluated():
            yield "upsert_point", {**row, **_metrics(event), "kind": "validation"}
        case CheckpointSaved():
            yield "upsert_checkpoint", {**row, **event.model_dump(mode="json", exclude={"time", "type"})}
        case CheckpointDamaged():
            yield "delete_checkpoint", {"path": str(event.path)}
            yield "insert_warning", {"message": event.message}
        case Finished():
            yield "note_finished", {"step": event.step}
        case Paused():
            yield "note_paused", {"step": event.step}
        case Failed():
            yield "note_failed", {"event": event.model_dump_json()}


def _failed(text: str) -> Failed:
    try:
        return Failed.model_validate_json(text)
    except ValueError as error:  # stored by a release whose events had no bounds
        return Failed(reason=Reason.internal, message=f"its `failed` event cannot be read: {error}")


def _pace(event: Progress) -> dict[str, Any]:
    return {
        "step": event.step,
        "epoch": event.epoch,
        "loss": event.metrics.get("loss"),
        "tokens_per_second": event.metrics.get("tokens_per_second"),
        "peak_memory_bytes": event.peak_memory_bytes,
    }


def _metrics(event: Progress | Evaluated) -> dict[str, Any]:
    return {"step": event.step, "epoch": event.epoch, "metrics": json.dumps(event.metrics)}


def _job(row: sqlite3.Row) -> JobRecord:
    prepared = None if row["prepared"] is None else json.loads(row["prepared"])
    return JobRecord(
        spec=JobSpec.model_validate_json(row["spec"]),
        state=JobState(row["state"]),
        attempt=row["attempt"],
        retries_used=row["retries_used"],
        scheduled_at=_utc(row["scheduled_at"]),
        started_at=_utc_or_none(row["started_at"]),
        completed_at=_utc_or_none(row["completed_at"]),
        device=row["device"],
        run_dir=None if row["run_dir"] is None else Path(row["run_dir"]),
        detail=row["detail"],
        reason=None if row["reason"] is None else Reason(row["reason"]),
        message=row["message"],
        progress=_progress(row),
        effective=prepared and {name: prepared[name] for name in prepared if name not in ("type", "time")},
        warnings=tuple(json.loads(row["warnings"])),
        created_by=row["created_by"],
    )


def _summary(row: sqlite3.Row) -> JobSummary:
    return JobSummary(
        job_uuid=row["job_uuid"],
        state=JobState(row["state"]),
        algorithm=row["algorithm"],
        model=row["model"],
        priority=row["priority"],
        progress=JobProgress(row["step"] or 0, row["total_steps"]),
        detail=row["detail"],
        message=row["message"],
        scheduled_at=_utc(row["scheduled_at"]),
        started_at=_utc_or_none(row["started_at"]),
        completed_at=_utc_or_none(row["completed_at"]),
        created_by=row["created_by"],
    )


def _progress(row: sqlite3.Row) -> JobProgress:
    if row["step"] is None:
        return JobProgress()
    columns = ("step", "total_steps", "epoch", "loss", "tokens_per_second", "peak_memory_bytes")
    return JobProgress(**{name: row[name] for name in columns}, eta_seconds=_eta(row))


def _eta(row: sqlite3.Row) -> float | None:
    """Seconds left at the mean pace of this attempt; None before its first step."""
    done = row["step"] - row["start_step"]
    if row["prepared_at"] is None or row["stepped_at"] is None or not done:
        return None
    per_step = (row["stepped_at"] - row["prepared_at"]) / done
    left = float(per_step * (row["total_steps"] - row["step"]))
    return max(0.0, left) if math.isfinite(left) else None


def _checkpoint(row: sqlite3.Row) -> CheckpointRecord:
    return CheckpointRecord(**{**dict(row), "path": Path(row["path"]), "created_at": _utc(row["created_at"])})


def _attempt(row: sqlite3.Row) -> AttemptRecord:
    return AttemptRecord(
        attempt=row["attempt"],
        run_dir=Path(row["run_dir"]),
        device=row["device"],
        launched_at=_utc(row["launched_at"]),
        started_at=_utc_or_none(row["started_at"]),
        ended_at=_utc_or_none(row["ended_at"]),
        resume_from=None if row["resume_from"] is None else Path(row["resume_from"]),
        start_step=row["start_step"],
        step=row["step"],
        reason=None if row["reason"] is None else Reason(row["reason"]),
        message=row["message"],
    )


def _node(row: sqlite3.Row) -> NodeRecord:
    return NodeRecord(**{**dict(row), "joined_at": _utc(row["joined_at"]), "seen_at": _utc(row["seen_at"])})


def _task(row: sqlite3.Row) -> NodeTaskRecord:
    values = dict(row)
    run_dir = values.get("run_dir")
    return NodeTaskRecord(
        task_id=values["task_id"],
        node=values["node"],
        job_uuid=values["job_uuid"],
        attempt=values["attempt"],
        node_rank=values["node_rank"],
        places=tuple(values["places"].split(",")),
        stage=values["stage"],
        order=values["task_order"],
        report=values["report"],
        ending=values["ending"],
        gone=bool(values["gone"]),
        run_dir=None if run_dir is None else Path(run_dir),
    )


def _point(row: sqlite3.Row) -> PointRecord:
    return PointRecord(row["kind"], row["step"], row["epoch"], _utc(row["time"]), json.loads(row["metrics"]))


def _utc(seconds: float) -> datetime:
    """A stored time. Databases of earlier releases may hold any number: one beyond the calendar is shown as its end."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), LAST_TIME), UTC)


def _utc_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else _utc(seconds)


@cache
def _queries() -> dict[str, str]:
    """Name -> statement, from `queries.sql`."""
    parts = _sql("queries.sql").split("-- name: ")[1:]
    return {name.strip(): text for name, _, text in (part.partition("\n") for part in parts)}


def _as_one(names: Iterable[str]) -> str:
    """Scripts as one transaction: a process that is killed in between leaves the database as it was."""
    scripts = "".join(_sql(name) for name in names)
    return f"BEGIN IMMEDIATE;\n{scripts.replace('BEGIN IMMEDIATE;', '').replace('COMMIT;', '')}\nCOMMIT;\n"


def _sql(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()

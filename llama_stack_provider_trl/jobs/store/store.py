"""The durable record of every job, in one sqlite file. Independent of processes.

Each write is one short transaction that names the state and the attempt it assumes, and returns whether it applied.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ...errors import DamagedRecord, JobConflict, JobNotFound, LimitReached, StoreError, shortage_of
from ...requests.trackers import TrackerChoice
from ...specs.events import Event, Reason
from ...specs.job import JobSpec
from ...system.data_dir import DataDir
from ..decisions.demands import Demand, Queued
from ..decisions.placement import kind_of
from ..decisions.states import ACTIVE, TERMINAL, TRANSITIONS, JobState
from .database import Database, Execute
from .datasets import RowOwners, count_rows, refuse_promised_name, use_rows
from .machines import Allocations, Nodes, NodeTasks
from .monitoring.exports import Exports
from .monitoring.totals import WAIT, Totals, observed
from .monitoring.webhooks import Webhooks
from .reader import JobReader, QueueAhead, digest_conflict, mentioned_digests
from .records import CheckpointRecord, JobRecord
from .related.cancels import CancelOrder, CancelOrders
from .related.chains import Chains, insert_predecessors
from .related.searches import NewTrial, Searches, insert_trial, refuse_names_to_come
from .row_mapping import statements

_DELETE = (
    "delete_tasks",
    "delete_attempts",
    "delete_points",
    "delete_samples",
    "delete_checkpoints",
    "delete_warnings",
    "delete_request",
    "delete_exports",
    "delete_predecessors",
    "delete_job",
)
"""The statements that delete what is stored of a job."""


class NewJob(NamedTuple):
    """A job that is to be stored; see `Store.add_job`."""

    spec: JobSpec
    request_digest: str
    warnings: Iterable[str] = ()
    needed: Iterable[Path] = ()
    trackers: Iterable[TrackerChoice] = ()


class Store(JobReader):
    """The jobs in the database `path`, with their attempts, metric points, checkpoints and warnings. Safe to share
    between threads.

    Every method may raise StoreError: the file cannot be opened, read or written.

    Attributes:
        nodes: the machines that have joined.
        tasks: the parts of attempts that these machines run.
        exports: what trackers have of the points.
        totals: what monitoring reads.
        ahead: what the start of waiting jobs is predicted from.
        chains: jobs that come after others.
        searches: jobs that are searches, and their trials.
        rows: whose stored rows are.
        cancels: those that the database could not record.
        webhooks: ends of jobs that receivers are to be told.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(Database(path), clock)
        self.nodes = Nodes(self.database, clock)
        self.tasks = NodeTasks(self.database)
        self.exports = Exports(self.database)
        self.allocations = Allocations(self.database, clock)
        self.totals = Totals(self.database)
        self.ahead = QueueAhead(self.database, clock)
        self.chains = Chains(self.database, clock)
        self.searches = Searches(self.database, clock)
        self.rows = RowOwners(self.database)
        self.webhooks = Webhooks(self.database)
        self.cancels = CancelOrders(DataDir(path.parent).cancel_orders)

    def close(self) -> None:
        """Close the connections of all threads. A later call opens a new one."""
        self.database.close()

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
        """Queue a job. A repeated POST with the same digest changes nothing. Returns whether the job is new.

        Args:
            needed: rows that it trains on and the checkpoint that it begins with. They must still exist; none is
                removed in the meantime.
            max_waiting: limit for the waiting jobs of `created_by`, this one included; None: any number.
            then: a job that comes after it, queued with it or not at all.
            admit: called in the transaction if the job is new. What it raises refuses the job. It must be quick.
            counted: digest -> bytes of the rows that count for `created_by` with it.

        Raises:
            InvalidRequest: a job that it comes after does not exist, or can never complete; another job is to make the
                dataset that it is to make.
            JobConflict: the job_uuid is taken by a job with another digest, or its checkpoint directory is another
                job's.
            LimitReached: `created_by` has `max_waiting` waiting jobs.
            StoreError: some of `needed` are gone.
        """
        jobs = [NewJob(spec, request_digest, warnings, needed, trackers), *([] if then is None else [then])]

        def add(execute: Execute) -> bool:
            refuse_names_to_come(execute, [job.spec.job_uuid for job in jobs])
            if not self._add(execute, jobs[0], created_by, max_waiting):
                return False
            admit()
            if then is not None and not self._add(execute, then, created_by, max_waiting):
                raise digest_conflict(then.spec.job_uuid)
            use_rows(jobs)
            count_rows(execute, created_by, counted)
            return True

        return self._store(created_by, jobs, add)

    def add_search(
        self,
        search: NewJob,
        trials: Sequence[tuple[NewTrial, NewJob]],
        created_by: str = "",
        max_waiting: int | None = None,
        counted: Mapping[str, int] = MappingProxyType({}),
    ) -> bool:
        """Store a search and queue its trials, all or none of them. As `add_job`."""
        jobs = [search, *(job for _, job in trials)]

        def add(execute: Execute) -> bool:
            refuse_names_to_come(execute, [search.spec.job_uuid])
            if not self._add(execute, search, created_by, None):
                return False
            execute("start_search", {"job_uuid": search.spec.job_uuid, "now": self._clock()})
            for new, job in trials:
                if not self._add(execute, job, created_by, max_waiting):
                    raise digest_conflict(job.spec.job_uuid)
                insert_trial(execute, search.spec, job.spec, new)
            use_rows(jobs)
            count_rows(execute, created_by, counted)
            return True

        return self._store(created_by, jobs, add)

    def _store(self, created_by: str, jobs: Sequence[NewJob], add: Callable[[Execute], bool]) -> bool:
        """Store jobs of a token in one transaction, as `add` does. Returns whether they are new."""
        with self.database.transaction() as execute:
            return add(execute)

    def add_trials(self, search: JobRecord, trials: Sequence[tuple[NewTrial, NewJob]]) -> bool:
        """Queue further trials of a search, all or none of them. They count as waiting jobs of its owner, without a
        limit: one of their number was allowed when the search was stored. Raises InvalidRequest, JobConflict,
        StoreError: as `add_job`. Returns False, and nothing changes, if the search is not in progress, or has these
        trials."""
        with self.database.transaction() as execute:
            found = execute("count_trials", {"job_uuid": search.job_uuid}).fetchone()["trials"]
            if found != trials[0][0].number - 1:
                return False
            for new, job in trials:
                if not self._add(execute, job, search.created_by, None):
                    raise digest_conflict(job.spec.job_uuid)
                insert_trial(execute, search.spec, job.spec, new)
            use_rows([job for _, job in trials])
        return True

    def _add(self, execute: Execute, job: NewJob, created_by: str, max_waiting: int | None) -> bool:
        """See `add_job`."""
        spec, request_digest = job.spec, job.request_digest
        key = {"job_uuid": spec.job_uuid}
        checkpoint_dir = str(spec.checkpoint_dir)
        here_or_above = json.dumps([checkpoint_dir, *map(str, spec.checkpoint_dir.parents)])
        row = {
            **{**key, "request_digest": request_digest, "spec": spec.model_dump_json(), "now": self._clock()},
            **{
                "wanted_device": spec.device,
                "priority": spec.lifecycle.priority,
                "ranks": spec.ranks + spec.devices_of_vllm,
                "checkpoint_dir": checkpoint_dir,
            },
            **{"demand": Demand.of(spec).text(), "created_by": created_by, "blocked": int(bool(spec.after))},
        }
        neighbour = execute("select_neighbour", {"ours": checkpoint_dir, "here_or_above": here_or_above}).fetchone()
        if neighbour is not None and neighbour["job_uuid"] != spec.job_uuid:
            raise JobConflict(
                f"checkpoint_dir {str(spec.checkpoint_dir)!r} conflicts with job {neighbour['job_uuid']!r}, "
                "whose checkpoints lie there: choose another checkpoint_dir"
            )
        created = execute("insert_job", row).rowcount == 1
        if not created and execute("request_digest", key).fetchone()["request_digest"] != request_digest:
            raise digest_conflict(spec.job_uuid)
        if created:
            refuse_promised_name(execute, spec)
            insert_predecessors(execute, spec)
        if created and max_waiting is not None and execute("count_waiting", row).fetchone()["jobs"] > max_waiting:
            raise LimitReached(
                f"the token {created_by!r} has {max_waiting} waiting jobs, and max_queued_jobs allows no more: "
                "submit this one when one of them has started, or cancel one"
            )
        for message in job.warnings if created else ():
            execute("insert_warning", {**key, "message": message})
        for choice in job.trackers if created else ():
            execute("insert_export", {**key, **choice._asdict(), "key": secrets.token_hex(8)})
        return created

    @contextmanager
    def no_new_jobs(self) -> Iterator[set[str]]:
        """Yields `digests`; no job is added or changes in the block, a write transaction, which must be quick."""
        with self.database.transaction() as execute:
            yield mentioned_digests(row["text"] for row in execute("select_mentions", {}))

    def delete(self, job_uuid: str, set_aside: Callable[[JobRecord], object] = lambda job: None) -> JobRecord:
        """Delete the record of a job that has ended and return it; of a search, those of its trials too. The caller
        removes the files. Raises JobNotFound; JobConflict: the job has not ended, or others wait for it.

        Args:
            set_aside: renames the files of each of these jobs before its name is free for another. It must be quick.
        """
        with self.database.transaction() as execute:
            job = self.get(job_uuid)  # the connection is this thread's: as the transaction sees it
            if search := self.searches.search_of(job_uuid):
                raise JobConflict(
                    f"job {job_uuid!r} is a trial of the search {search!r}: delete that one, with its trials"
                )
            jobs = [job, *map(self.get, self.searches.names_of_trials(job_uuid))]
            for one in jobs:
                self._refuse_deletion(execute, one)
            for one in jobs:
                set_aside(one)
            execute("delete_trials", {"job_uuid": job_uuid})
            for one in reversed(jobs):
                for name in _DELETE:
                    execute(name, {"job_uuid": one.job_uuid})
        return job

    def delete_results(self, job_uuid: str, set_aside: Callable[[JobRecord], object] = lambda job: None) -> JobRecord:
        """Forget the checkpoints of a job that has ended, and return it. The caller removes the files. Raises
        JobNotFound; JobConflict: the job has not ended, or others wait for it.

        Args:
            set_aside: renames the directory of the checkpoints. It must be quick.
        """
        with self.database.transaction() as execute:
            job = self.get(job_uuid)
            self._refuse_deletion(execute, job)
            set_aside(job)
            for checkpoint in self.checkpoints(job_uuid):
                execute("delete_checkpoint", {"job_uuid": job_uuid, "path": str(checkpoint.path)})
        return job

    def _refuse_deletion(self, execute: Execute, job: JobRecord) -> None:
        job_uuid, key = job.job_uuid, {"job_uuid": job.job_uuid}
        if job.state not in TERMINAL:
            raise JobConflict(f"job {job_uuid!r} is {job.state}: cancel it and wait until it has ended, then delete it")
        if left := [row["node"] for row in execute("select_unfinished_tasks", key)]:
            raise JobConflict(
                f"job {job_uuid!r} may still have processes on {', '.join(left)}: delete it once that node has "
                "reported that they are gone, or remove the node (DELETE /v1/nodes/NAME)"
            )
        if waiting := [row["job_uuid"] for row in execute("select_needing", key)]:
            raise JobConflict(
                f"job {job_uuid!r} cannot be deleted while {', '.join(waiting[:3])}"
                f"{' and others' if len(waiting) > 3 else ''} wait for it or use its checkpoint: delete it once "
                "they have ended, or cancel them first"
            )

    def request_cancel(self, job_uuid: str, message: str = "", by: str = "") -> JobRecord:
        """Record a cancel: the job becomes `cancelled` if it waits and `cancelling` if it runs.

        While the database cannot be written, the cancel is kept in a file, and its supervisor ends the job all the
        same. Raises JobNotFound; JobConflict: the job has completed or failed; StoreError: the cancel is in the memory
        of this process only.

        Args:
            message: the reason, where the user has not requested it.
            by: name of the user; empty: not known.
        """
        message = message or self._when(by)
        try:
            return self._record_cancel(job_uuid, message)
        except StoreError as error:
            if shortage_of(error) is None:
                raise
            return self._keep_cancel(job_uuid, message, error)

    def record_kept_cancels(self) -> None:
        """Record the cancels that the database could not record before. Raises StoreError: it still cannot."""
        for order in self.cancels.pending():
            try:
                with suppress(JobNotFound, JobConflict):
                    if self.get(order.job_uuid).age == order.age:
                        self._record_cancel(order.job_uuid, order.message)
            except DamagedRecord:
                continue  # logged; it holds up no other job, and its cancel stays in case it is repaired
            self.cancels.remove(order)

    def _record_cancel(self, job_uuid: str, message: str) -> JobRecord:
        while True:
            job = self.get(job_uuid)
            if job.state in (JobState.cancelling, JobState.cancelled):
                return job
            if job.state in TERMINAL:
                raise JobConflict(
                    f"job {job_uuid!r} is {job.state} already: only a job that has not ended can be cancelled"
                )
            target = JobState.cancelling if job.state in ACTIVE else JobState.cancelled
            # Not applied if the job has changed its state in the meantime: read it again.
            self.transition(job_uuid, job.attempt, job.state, target, None, message)

    def _keep_cancel(self, job_uuid: str, message: str, error: StoreError) -> JobRecord:
        job = self.get(job_uuid)
        if job.state in TERMINAL:
            raise error
        if not self.cancels.add(CancelOrder(job_uuid, job.age, message)):
            raise StoreError(
                f"the cancel of job {job_uuid!r} is in memory only ({error}): its training is being ended, but the "
                "next start would begin it again; repeat the cancel when the disk can be written"
            ) from error
        return replace(job, state=JobState.cancelling if job.state in ACTIVE else JobState.cancelled)

    def request_pause(self, job_uuid: str, by: str = "") -> JobRecord:
        """Record a pause: the job becomes `paused` if it waits, and `pausing`, to save and release its device, if it
        runs. Raises JobNotFound; JobConflict: the job has ended, or is about to.

        Args:
            by: name of who requests it; empty: not known.
        """
        while True:
            job = self.get(job_uuid)
            if job.state in (JobState.pausing, JobState.paused):
                return job
            if job.state in TERMINAL or job.state is JobState.cancelling:
                raise JobConflict(f"job {job_uuid!r} is {job.state}: only a job that has not ended can be paused")
            if job.spec.search is not None:
                raise JobConflict(
                    f"job {job_uuid!r} is a search, which holds no device: pause its trials, or cancel it"
                )
            target = JobState.pausing if job.state in ACTIVE else JobState.paused
            message = f"until it is resumed, {self._when(by)}"
            self.transition(job_uuid, job.attempt, job.state, target, None, message)

    def _when(self, by: str) -> str:
        """By whom and when a job's state was requested; behind the word of the state on pages and in a shell."""
        at = datetime.fromtimestamp(self._clock(), UTC)
        return f"requested{f' by {by}' if by else ''} at {at:%Y-%m-%d %H:%M:%S} UTC"

    def request_resume(self, job_uuid: str) -> JobRecord:
        """Queue a paused job again; a job that was not paused does not change. Raises JobNotFound; JobConflict: the job
        has ended, or has not finished pausing."""
        while True:
            job = self.get(job_uuid)
            if job.state is JobState.pausing:
                raise JobConflict(f"job {job_uuid!r} is still saving its checkpoint: resume it when it is paused")
            if job.state in TERMINAL or job.state is JobState.cancelling:
                raise JobConflict(f"job {job_uuid!r} is {job.state}: submit it again under another job_uuid")
            if job.state is not JobState.paused:
                return job
            if (step := self.searches.compared_at(job)) is not None:
                hint = f"job {job_uuid!r} is a trial, which waits for the others to be compared at step {step}"
                raise JobConflict(f"{hint}: wait, or cancel it")
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
        """Change the state of a job from `source`, if it still is in it and in this attempt. Returns whether it was."""
        assert target in TRANSITIONS[source], f"{source} -> {target}"
        row = {
            **{"job_uuid": job_uuid, "attempt": attempt, "source": source, "target": target},
            **{"reason": reason, "message": message},
            "now": self._clock(),
        }
        with self.database.transaction() as execute:
            moved = execute("change_state", row).rowcount == 1
            if moved and source in ACTIVE and target not in ACTIVE:
                execute("end_attempt", row)
                execute("stop_tasks_of_attempt", row)
        return moved

    def retry(self, job: JobRecord, reason: Reason | None, message: str, wait: float, *, counts: bool = True) -> bool:
        """Queue a job again whose attempt has ended, with a start in `wait` seconds at the earliest. Returns whether
        the job was still in this state and attempt.

        Args:
            reason: None: it did not fail, its node is being drained.
            counts: as one of the job's `retries`.
        """
        now = self._clock()
        first_line = message.partition("\n")[0]
        detail = f"attempt {job.attempt} ended ({reason or 'moved'}); the next one starts in {wait:.0f} s: {first_line}"
        row = {
            **{"job_uuid": job.job_uuid, "attempt": job.attempt, "source": job.state, "reason": reason},
            **{"message": message, "not_before": now + wait, "now": now, "detail": detail, "used": int(counts)},
        }
        with self.database.transaction() as execute:
            moved = execute("retry_job", row).rowcount == 1
            if moved:
                execute("end_attempt", row)
                execute("stop_tasks_of_attempt", row)
        return moved

    def correct_waits(self, back: float, longest: float) -> int:
        """Have waiting jobs wait no longer than they were to, after the clock was set back. Returns the number of jobs
        whose times have changed.

        Args:
            back: seconds by which it was set back, as far as they are known.
            longest: seconds that a job waits at most before its next attempt.
        """
        row = {"back": back, "longest": longest, "now": self._clock()}
        with self.database.transaction() as execute:
            return int(execute("correct_waits", row).rowcount)

    def remove_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Remove a checkpoint from the list of its job."""
        with self.database.transaction() as execute:
            execute("delete_checkpoint", {"job_uuid": checkpoint.job_uuid, "path": str(checkpoint.path)})

    def warn(self, job_uuid: str, message: str) -> None:
        """Add a warning to a job, unless it has the same one."""
        with self.database.transaction() as execute:
            execute("insert_warning", {"job_uuid": job_uuid, "message": message})

    def launch(
        self, job_uuid: str, attempt: int, device: str, run_dir: Path, resume: tuple[Path, int] | None = None
    ) -> bool:
        """Record the next attempt of a scheduled job, which becomes `launching`. Returns whether it was scheduled.

        Args:
            resume: the checkpoint that it resumes from, and its step; None: it begins at step 0.
        """
        row = {
            **{"job_uuid": job_uuid, "attempt": attempt, "device": device, "run_dir": str(run_dir)},
            "kind": kind_of(device.split(",")[0]),
            "resume_from": None if resume is None else str(resume[0]),
            "resume_step": 0 if resume is None else resume[1],
        }
        with self.database.transaction() as execute:
            launched = execute("launch_job", row).rowcount == 1
            if launched:
                now = self._clock()
                execute("insert_attempt", {**row, "now": now})
                if attempt == 1:
                    waited = execute("select_wait", {"job_uuid": job_uuid, "now": now}).fetchone()["seconds"]
                    for values in observed(WAIT, max(0.0, waited)):
                        execute("count", values)
        return launched

    def set_detail(self, job_uuid: str, state: JobState, detail: str) -> None:
        """Record the reason for which a job waits, if it still is in `state`."""
        with self.database.transaction() as execute:
            execute("change_detail", {"job_uuid": job_uuid, "state": state, "detail": detail})

    def set_waiting_details(self, details: Sequence[tuple[Queued, str]]) -> None:
        """Record the reason for which all jobs of some kinds (`kinds_waiting`) wait."""
        with self.database.transaction() as execute:
            for kind, detail in details:
                row = {
                    "wanted_device": kind.device,
                    "ranks": kind.ranks,
                    "expected_detail": kind.detail,
                    "now": self._clock(),
                }
                row |= {"demand": kind.demand, "tried": int(kind.tried), "detail": detail}
                execute("change_waiting", row)

    def apply_events(self, job_uuid: str, attempt: int, events: Sequence[Event], new_offset: int) -> bool:
        """Store events and the cursor behind them in one transaction; a repeated event counts once. Returns False, and
        nothing changes, if the attempt is not the current one or the events are stored already."""
        key = {"job_uuid": job_uuid, "attempt": attempt}
        with self.database.transaction() as execute:
            applied = execute("advance_cursor", {**key, "offset": new_offset}).rowcount == 1
            for event in events if applied else ():
                for name, row in statements(event):
                    execute(name, {**key, **row})
        return applied

"""The loop that advances jobs: place, launch, poll, ingest events, decide. One per data directory.

It is a plain thread, since a provider may be constructed without an event loop. All state that must survive it is in
the store, in run directories, and in processes that outlive it: after a restart the next pass continues from there.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ... import faults
from ...errors import (
    InvalidRequest,
    JobConflict,
    JobFailure,
    JobNotFound,
    StoreError,
    is_exhausted,
    shortage_of,
)
from ...launch.base import Launcher, MasterPorts, Observation, TaskSpec, TaskState
from ...specs.events import CheckpointSaved, Reason, read_events
from ...system.data_dir import DataDir
from ...system.files import RunDir, can_write, tail
from ...system.process import FileLock
from ...system.wall_clock import WallClock
from ..decisions.graph import Blocked
from ..decisions.placement import Node, is_remote
from ..decisions.pools import Pooled
from ..decisions.states import ACTIVE, TERMINAL, JobState
from ..store.database import private_data_dir
from ..store.records import JobRecord
from ..store.related.searches import Proposing
from ..store.store import Store
from .attempts import Attempts
from .housekeeping import INTERVAL, remove_unused_rows
from .placing import Placing
from .retries import LONGEST_BACKOFF, Retries
from .step_checkpoints import accepted, delete_superfluous
from .verdict import failed, is_at_rung, unstarted, verdict

log = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two passes without a call of `wake`."""
_PAUSE = 2
"""A pass is followed by a pause of so many times its duration, but at most `TICK`: a supervisor that POSTs wake without
end takes a third of one processor, and their threads the rest."""
LOCK_RETRY = 1.0
"""Seconds between two attempts to lock while another process supervises this data directory."""
PATIENCE = 300
"""Passes in a row that may raise an error for a job before it fails: a minute, so that a file system may recover."""
_EVENT_BYTES = 1 << 20


class Supervisor:
    """Supervises the jobs of one data directory.

    Args:
        devices: concrete devices of this node, such as ["cpu"] or ["cuda:0", "cuda:1"]; the first is `auto`.
        data_dir: attempts live in `<data_dir>/jobs/<job_uuid>/attempts/<n>`; also holds `supervisor.lock`.
        python: interpreter that trains; None: this process's own.
        hang_timeout: seconds without progress after which a training is ended; None: never.
        ports: where the ranks of a job on this machine meet; None: every job has one rank.
        blob_retention: seconds for which unused rows are kept; None: forever.
        nodes: returns the machines at every pass, this one first; None: this one only.
        beside: called after every pass, by the process that supervises.
        pooled: returns what pools may give, and what was requested of them.
        preempts: whether critical jobs have others save and wait.
        completing: called before a job becomes completed, and again after a crash: keeps its result. InvalidRequest and
            JobConflict fail the job.
        proposing: adds the later trials of Bayesian searches; None: none is added.
        wall_clock: detects that the clock was set back; None: that of this machine.
        export_destinations: where exports may be sent, as the settings allow it now.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        devices: Sequence[str],
        data_dir: Path,
        *,
        python: str | None = None,
        tick: float = TICK,
        hang_timeout: float | None = None,
        ports: MasterPorts | None = None,
        blob_retention: float | None = None,
        nodes: Callable[[], Sequence[Node]] | None = None,
        beside: Callable[[], None] | None = None,
        pooled: Callable[[], Pooled] = Pooled,
        preempts: bool = False,
        completing: Callable[[JobRecord], object] | None = None,
        proposing: Proposing | None = None,
        wall_clock: WallClock | None = None,
        export_destinations: Sequence[str] = (),
    ) -> None:
        assert devices, "a node without a device cannot train"
        self._store = store
        self._launcher = launcher
        self._devices = tuple(devices)
        self._nodes = nodes or (lambda: [Node("", self._devices, head=True)])
        self._beside = beside or (lambda: None)
        self._placing = Placing(store, self._nodes, pooled, preempts)
        self._completing = completing or (lambda job: None)
        self._data_dir = data_dir.resolve()
        self._tick_seconds = tick
        self._attempts = Attempts(store, launcher, self._data_dir, python, hang_timeout, ports, export_destinations)
        self._retries = Retries(store, self._nodes)
        self._proposing = proposing
        self._wall_clock = wall_clock or WallClock()
        self._set_back: float | None = None
        """Seconds by which the clock was set back, for which times are not corrected yet."""
        self._blob_retention = blob_retention
        self._last_clean = -math.inf
        self._failed_passes: dict[str, int] = {}
        self._last_error = ""
        self._given_up: dict[str, tuple[Reason, str]] = {}
        """job_uuid -> reason and message of jobs that fail as soon as their processes have ended."""
        self._why_moved: dict[tuple[str, int], str] = {}
        """Job and attempt -> why it is to save and to leave its devices."""
        self._exhausted = False
        self._orphans_ended = False
        self._lock = FileLock(DataDir(self._data_dir).supervisor_lock)
        self._wakeup = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def supervising(self) -> bool:
        """Whether this process holds the lock; if not, another one supervises this data directory."""
        return self._lock.held

    def start(self) -> None:
        """Supervise in a daemon thread from now on. Has no effect if the thread runs. Raises OSError: the data
        directory cannot be written."""
        if self._thread is None:
            private_data_dir(self._data_dir)
            self._store.cancels.prepare()
            self._acquire()
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="trl-supervisor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop supervising. Trainings continue; the next supervisor finds them."""
        if self._thread is not None:
            self._stopping.set()
            self._wakeup.set()
            self._thread.join()
            self._thread = None
        if self._proposing is not None:
            self._proposing.end_others([])

    def wake(self) -> None:
        """Start the next pass now: a job was added or is to be cancelled."""
        self._wakeup.set()

    def tick(self) -> None:
        """One pass over all jobs. Raises StoreError where the database cannot be used."""
        if not self._orphans_ended:
            self._end_orphans()
        self._end_cancelled()
        self._store.record_kept_cancels()
        self._correct_waits()
        nodes = self._nodes()
        is_draining = any(node.draining for node in nodes)
        failed: StoreError | None = None
        active = self._store.active()
        attempts = {(job.job_uuid, job.attempt) for job in active}
        self._why_moved = {key: why for key, why in self._why_moved.items() if key in attempts}
        for job in active:
            try:
                self._guarded(job, partial(self._advance, job), ends_trouble=True)
                if is_draining or job.job_uuid in self._placing.victims:
                    self._guarded(job, partial(self._move_away, job, nodes))
            except StoreError as error:  # such as a result for which the disk has no space: others continue
                failed = failed or error
        self._store.chains.advance(self._end_blocked)
        self._store.searches.advance(self._store, self._proposing)
        self._place()
        if time.monotonic() - self._last_clean > INTERVAL:
            self._clean()
        if failed is not None:
            raise failed

    def _end_cancelled(self) -> None:
        """End the processes of cancelled jobs, before anything that needs to write: a full disk, or a database that is
        locked, must not keep a training from being ended."""
        named = {order.job_uuid: order.age for order in self._store.cancels.pending()}
        trials = {name for search in named for name in self._store.searches.names_of_trials(search)}
        for job in self._store.active():
            kept = named.get(job.job_uuid) == job.age or job.job_uuid in trials
            if job.spec.search is None and (kept or job.state is JobState.cancelling):
                with suppress(StoreError):  # ordered in memory all the same; recorded at a later pass
                    self._guarded(job, partial(self._launcher.cancel, self._attempts.task(job)))

    def _correct_waits(self) -> None:
        """Correct times of waiting jobs after the clock was set back. What cannot be stored now is stored later."""
        back = self._wall_clock.set_back()
        if back is None and self._set_back is None:
            return
        self._set_back = (self._set_back or 0.0) + (back or 0.0)
        corrected = self._store.correct_waits(self._set_back, LONGEST_BACKOFF)
        if self._set_back:
            log.warning(
                "the clock of this machine was set back by %.0f s; the times of %d waiting jobs are corrected",
                self._set_back,
                corrected,
            )
        self._set_back = None

    def _end_blocked(self, job: Blocked, state: JobState, reason: Reason | None, message: str) -> None:
        """End a job that waits for one that will never complete."""
        if self._store.transition(job.job_uuid, job.attempt, JobState.scheduled, state, reason, message):
            log.warning("job %s: scheduled -> %s: %s", job.job_uuid, state, message)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._pass()
            self._stopping.wait(min(_PAUSE * (time.monotonic() - began), self._tick_seconds))
            self._wakeup.wait(self._tick_seconds if self._lock.held else LOCK_RETRY)
            self._wakeup.clear()
        if self._lock.held:
            log.info("supervisor of %s stops; trainings continue and are found at the next start", self._data_dir)
            self._lock.release()

    def _pass(self) -> None:
        """One pass that catches every error and logs each once. The thread must survive, since a full disk or a missing
        data directory may be temporary, and without the thread no job advances."""
        try:
            if self._lock.held or self._acquire():
                try:
                    self.tick()
                finally:  # a job whose result cannot be stored must not stop pools and exports
                    self._beside()
            self._last_error = ""
        except Exception as error:
            if str(error) != self._last_error:
                expected = isinstance(error, StoreError)  # its message is complete; any other error is a bug
                log.error("supervisor: %s; the next pass tries again", error, exc_info=None if expected else error)
            self._last_error = str(error)

    def _acquire(self) -> bool:
        acquired = self._lock.acquire(f"supervisor (pid {os.getpid()})")
        if acquired:
            log.info("supervising %s on %s", self._data_dir, ", ".join(self._devices))
            self._orphans_ended = False
        return acquired

    def _end_orphans(self) -> None:
        """End trainings without a job: it was deleted with the database, or has ended before them. Done once after the
        lock is acquired."""
        for run_dir in self._launcher.sweep(DataDir(self._data_dir).jobs, self._store.active_run_dirs()):
            log.warning("ended the processes of %s: no job owns them", run_dir)
        self._orphans_ended = True

    def _clean(self) -> None:
        """Remove unused rows and records of tasks. Rows that cannot be removed now are tried again later."""
        self._last_clean = time.monotonic()
        self._store.tasks.delete_ended()
        try:
            remove_unused_rows(DataDir(self._data_dir).datasets, self._store, self._blob_retention)
        except OSError as error:
            log.warning("unused rows cannot be removed: %s", error)

    def _guarded(self, job: JobRecord, step: Callable[[], None], ends_trouble: bool = False) -> None:
        """Run a step of one job; an error in it does not stop the loop for the others.

        Args:
            ends_trouble: whether success of this step ends a row of failed passes. A cancel that is ordered once more
                does not show that its job can be handled.
        """
        try:
            if job.job_uuid in self._given_up:
                self._end(self._store.get(job.job_uuid), *self._given_up[job.job_uuid])
            else:
                step()
        except StoreError:
            raise
        except Exception as error:
            if is_exhausted(error) or (shortage_of(error) is not None and not can_write(self._data_dir)):
                self._log_exhausted(job, error)
                return
            self._failed_passes[job.job_uuid] = count = self._failed_passes.get(job.job_uuid, 0) + 1
            if count in (1, PATIENCE):
                log.exception("job %s: it could not be handled, %d passes in a row", job.job_uuid, count)
            if count == PATIENCE:
                self._give_up(job, error)
        else:
            if ends_trouble:
                self._exhausted = False
                self._failed_passes.pop(job.job_uuid, None)

    def _log_exhausted(self, job: JobRecord, error: Exception) -> None:
        """Log that this process has no descriptors or no memory left, or no disk to write to. The job is not at fault:
        it is handled again at every pass, and these passes do not count as `PATIENCE`."""
        if not self._exhausted:
            log.error("job %s: %s; it is handled again at the next pass, its processes continue", job.job_uuid, error)
        self._exhausted = True

    def _give_up(self, job: JobRecord, error: Exception) -> None:
        """Fail a job that cannot be handled, as soon as none of its processes is left."""
        self._fail(job, Reason.internal, f"the supervisor could not handle this job: {type(error).__name__}: {error}")

    def _fail(self, job: JobRecord, reason: Reason, message: str) -> None:
        """Fail a job as soon as none of its processes is left."""
        self._given_up[job.job_uuid] = (reason, message)
        self._guarded(job, lambda: None)

    def _end(self, job: JobRecord, reason: Reason, message: str) -> None:
        """End the processes of a job that was given up, and fail it when they are gone. Until then the record must hold
        its device, or another job would get it."""
        if job.state in ACTIVE:
            task = self._attempts.task(job)
            self._launcher.cancel(task)
            if self._launcher.poll(task).state is not TaskState.exited:
                self._set_detail(job, f"{message}; it is being ended")
                return
        if job.state not in TERMINAL:
            self._move(job, *failed(reason, message))
        del self._given_up[job.job_uuid]
        self._failed_passes.pop(job.job_uuid, None)

    def _advance(self, job: JobRecord) -> None:
        task = self._attempts.task(job)
        # Poll before reading: a process that has exited by now has written all its events.
        seen = self._launcher.poll(task)
        job = self._ingest_events(job)
        if job.state in TERMINAL:
            return  # another process has ended it since this pass began
        if seen.state is TaskState.exited:
            self._conclude(job, task, seen)
        elif job.state is JobState.cancelling:
            pass  # `_end_cancelled` has ended it, or does so in the next pass
        elif job.state is JobState.pausing:
            self._pause(job, task, seen)
        elif seen.state is not TaskState.unknown:
            try:
                self._attempts.check_destination(job.spec)
            except JobFailure as error:  # an earlier service, with other settings, has started it
                return self._fail(job, Reason(error.reason), error.message)
            self._set_detail(job, seen.detail)
        elif job.state is JobState.launching:
            self._launch(job, task)
        else:
            self._conclude(job, task, Observation(TaskState.exited, detail=f"{task.run_dir} was removed"))

    def _move_away(self, job: JobRecord, nodes: Sequence[Node]) -> None:
        """Pause a training on a node that is being drained, or whose devices a critical job gets. It is queued again
        once it has saved."""
        try:
            job = self._store.get(job.job_uuid)
        except JobNotFound:  # it has ended in this pass, and was deleted since
            return
        if job.state is JobState.in_progress and (why := self._why_moves(job, nodes)):
            # Once it has saved, the reason may be gone: its owner has left, or the critical job was cancelled.
            self._why_moved.setdefault((job.job_uuid, job.attempt), why)
            self._launcher.pause(self._attempts.task(job))

    def _why_moves(self, job: JobRecord, nodes: Sequence[Node]) -> str:
        """Why a training is to leave its devices; empty: it may stay."""
        if critical := self._placing.victims.get(job.job_uuid):
            return f"the critical job {critical} gets its devices"
        on = {place.rpartition("/")[0] or nodes[0].name for place in job.devices}
        return next((_why_drained(node) for node in nodes if node.draining and node.name in on), "")

    def _pause(self, job: JobRecord, task: TaskSpec, seen: Observation) -> None:
        """Let a training save and end. One that does not run yet has nothing to save and is ended."""
        if seen.state is not TaskState.running:
            return self._launcher.cancel(task)
        try:
            self._launcher.pause(task)
        except OSError as error:  # such as a full disk: the training continues until the next pass succeeds
            self._set_detail(job, f"the request to pause cannot be written: {error}")

    def _conclude(self, job: JobRecord, task: TaskSpec, seen: Observation) -> None:
        """Decide on a job none of whose processes is left."""
        outcome = self._store.outcome(job.job_uuid, job.attempt)
        paths = RunDir(task.run_dir)
        log_tail = tail(paths.rank_log(seen.rank or 0)) or tail(paths.launcher_log)
        node = self._node_of(job, outcome.failed.rank) if outcome.failed else ""
        decided = verdict(job.state, outcome, seen, log_tail, node, str(paths.rank_log(seen.rank or 0)))
        self._attempts.remove_leftovers(job)
        faults.reach("supervisor-concluding")
        if decided.state is JobState.paused and is_at_rung(job, outcome):
            if self._move(job, JobState.paused):
                detail = f"saved at step {outcome.paused_at_step}, where the trials of its search are compared"
                self._store.set_detail(job.job_uuid, JobState.paused, detail)
            return
        if decided.state is JobState.paused and job.state is not JobState.pausing:
            why = self._why_moved.get((job.job_uuid, job.attempt), "")
            # A service that was killed since may have ordered it.
            why = why or self._why_moves(job, self._nodes()) or "it was to leave its devices"
            message = f"saved at step {outcome.paused_at_step}: {why}"
            self._store.retry(job, None, message, 0.0, counts=False)
            return
        if decided.state is JobState.completed:
            try:
                self._completing(job)
            except (InvalidRequest, JobConflict) as error:
                decided = failed(Reason.invalid_request, str(error))
            faults.reach("supervisor-result-kept")
        if not self._retries.after(job, decided):
            self._move(job, *decided)

    def _node_of(self, job: JobRecord, rank: int) -> str:
        """The node that a rank ran on; empty if the job ran on the service's machine only."""
        if not is_remote(job.devices):
            return ""
        names = list(dict.fromkeys(place.rpartition("/")[0] for place in job.devices))
        return names[min(rank // job.spec.ranks_per_node, len(names) - 1)] or self._nodes()[0].name

    def _ingest_events(self, job: JobRecord) -> JobRecord:
        """Store new events to the end of the event file. Returns the job after that."""
        assert job.run_dir is not None
        offset = self._store.outcome(job.job_uuid, job.attempt).offset
        while True:
            events, after = read_events(RunDir(job.run_dir).events, offset, _EVENT_BYTES)
            if after == offset:
                return self._store.get(job.job_uuid)
            events = list(accepted(events, job.spec))
            self._store.apply_events(job.job_uuid, job.attempt, events, after)
            offset = after
            if any(isinstance(event, CheckpointSaved) for event in events):
                delete_superfluous(self._store, self._store.get(job.job_uuid))

    def _place(self) -> None:
        """Start the waiting jobs that get devices."""
        with self._placing.placed(time.time()) as placed:
            for job_uuid, places in placed.items():
                with suppress(JobNotFound):  # cancelled and deleted since the queue was read
                    job = self._store.get(job_uuid)
                    self._guarded(job, partial(self._begin_attempt, job, ",".join(places)))

    def _begin_attempt(self, job: JobRecord, device: str) -> None:
        """Record the next attempt, then start it."""
        if self._attempts.record(job, device):
            faults.reach("supervisor-attempt-recorded")
            self._advance(self._store.get(job.job_uuid))

    def _launch(self, job: JobRecord, task: TaskSpec) -> None:
        try:
            self._attempts.start(job, task)
        except (JobConflict, InvalidRequest, JobFailure) as error:
            self._move(job, *unstarted(error))
        except OSError as error:
            if is_exhausted(error):
                raise  # nothing was started; the next pass starts it
            reason = Reason.disk_full if error.errno in (errno.ENOSPC, errno.EDQUOT) else Reason.launch_failed
            message = f"the training process could not be started: {error}"
            if not self._retries.same(job, reason, message):
                self._move(job, *failed(reason, message))
        else:
            faults.reach("supervisor-task-started")

    def _set_detail(self, job: JobRecord, detail: str) -> None:
        if detail != job.detail:
            self._store.set_detail(job.job_uuid, job.state, detail)

    def _move(self, job: JobRecord, target: JobState, reason: Reason | None = None, message: str = "") -> bool:
        if target in (JobState.paused, JobState.cancelled):
            message = message or job.message  # who has requested it
        moved = self._store.transition(job.job_uuid, job.attempt, job.state, target, reason, message)
        if moved:
            log.info("job %s: %s -> %s %s", job.job_uuid, job.state, target, message.partition("\n")[0])
        return moved


def _why_drained(node: Node) -> str:
    return f"it was evicted from {node.name}, which its owner uses" if node.evicted else "its node is being drained"

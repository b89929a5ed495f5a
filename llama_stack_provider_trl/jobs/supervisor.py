"""The loop that moves jobs along: place, launch, look, take in events, decide. One per data directory.

A plain thread, since no event loop can be relied on when a provider is made. Everything that must survive it is in the
store, in run directories, and in processes that outlive it: after a restart the next pass goes on where this one was.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..files import RunDir, resolve_under, tail
from ..launch.base import Launcher, Observation, TaskSpec, TaskState
from ..process import FileLock
from ..recipes.events import Reason, read_events
from ..resolve import derive
from .placement import Queued, choose, why_waiting
from .records import JobRecord
from .states import JobState
from .store import Store
from .verdict import verdict

log = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two passes when nobody calls `wake`."""
LOCK_RETRY = 1.0
"""Seconds between two tries for the lock while another process supervises this data directory."""
PATIENCE = 300
"""Passes in a row that a job may give us trouble before it is failed: a minute, so that a file system may recover."""
_EVENT_BYTES = 1 << 20


class Supervisor:
    """Supervises the jobs of one data directory.

    Args:
        devices: concrete devices of this node, such as ["cpu"] or ["cuda:0", "cuda:1"]; the first is `auto`.
        data_dir: attempts live in `<data_dir>/jobs/<job_uuid>/attempts/<n>`; also holds `supervisor.lock`.
        python: interpreter that trains; None: this process's own.
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
    ) -> None:
        assert devices, "a node without a device cannot train"
        self._store = store
        self._launcher = launcher
        self._devices = tuple(devices)
        self._data_dir = data_dir.resolve()
        self._python = python
        self._tick_seconds = tick
        self._trouble: dict[str, int] = {}
        self._trouble_seen = ""
        self._lock = FileLock(self._data_dir / "supervisor.lock")
        self._wakeup = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def supervising(self) -> bool:
        """Whether this process holds the lock; another one supervises this data directory where it does not."""
        return self._lock.held

    def start(self) -> None:
        """Supervise from now on, in a daemon thread. Does nothing where it runs already.

        Raises:
            OSError: the data directory cannot be written.
        """
        if self._thread is None:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="trl-supervisor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop supervising. Trainings go on; whoever supervises next takes them up again."""
        if self._thread is not None:
            self._stopping.set()
            self._wakeup.set()
            self._thread.join()
            self._thread = None

    def wake(self) -> None:
        """Make the next pass now: a job was added or is to be cancelled."""
        self._wakeup.set()

    def tick(self) -> None:
        """One pass over all jobs. Raises StoreError where the database cannot be used."""
        for job in self._store.active():
            self._guarded(job, partial(self._advance, job))
        self._place()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._pass()
            self._wakeup.wait(self._tick_seconds if self._lock.held else LOCK_RETRY)
            self._wakeup.clear()
        if self._lock.held:
            log.info("supervisor of %s stops; trainings go on and are taken up at the next start", self._data_dir)
            self._lock.release()

    def _pass(self) -> None:
        """One turn of the loop. The thread must outlive anything: a full disk gets free again, a data directory comes
        back, and without it no job would ever move. Each kind of trouble is said once."""
        try:
            if self._lock.held or self._acquire():
                self.tick()
            self._trouble_seen = ""
        except Exception as error:
            if str(error) != self._trouble_seen:
                told = isinstance(error, StoreError)  # its sentence says it all; anything else is a bug to find
                log.error("supervisor: %s; trying again until it works", error, exc_info=None if told else error)
            self._trouble_seen = str(error)

    def _acquire(self) -> bool:
        acquired = self._lock.acquire(f"supervisor (pid {os.getpid()})")
        if acquired:
            log.info("supervising %s on %s", self._data_dir, ", ".join(self._devices))
        return acquired

    def _guarded(self, job: JobRecord, step: Callable[[], None]) -> None:
        """Keep one job's trouble from stopping the loop for the others."""
        try:
            step()
        except StoreError:
            raise
        except Exception as error:
            self._trouble[job.job_uuid] = count = self._trouble.get(job.job_uuid, 0) + 1
            if count in (1, PATIENCE):
                log.exception("job %s: trouble, %d passes in a row", job.job_uuid, count)
            if count >= PATIENCE:
                self._give_up(self._store.get(job.job_uuid), error)
        else:
            self._trouble.pop(job.job_uuid, None)

    def _give_up(self, job: JobRecord, error: Exception) -> None:
        message = f"the supervisor could not handle this job: {type(error).__name__}: {error}"
        if self._move(job, JobState.failed, Reason.internal, message) and job.run_dir:
            try:
                self._launcher.cancel(self._task(job))
            except OSError as failure:
                log.error("job %s: its processes may still run: %s", job.job_uuid, failure)

    def _advance(self, job: JobRecord) -> None:
        task = self._task(job)
        # First look, then read: what has exited by now has written all its events.
        seen = self._launcher.poll(task)
        job = self._take_in_events(job)
        if seen.state is TaskState.exited:
            self._conclude(job, task, seen)
        elif job.state is JobState.cancelling:
            self._launcher.cancel(task)
        elif seen.state is not TaskState.unknown:
            self._note_detail(job, seen.detail)
        elif job.state is JobState.launching:
            self._launch(job, task)
        else:
            self._conclude(job, task, Observation(TaskState.exited, detail=f"{task.run_dir} was removed"))

    def _conclude(self, job: JobRecord, task: TaskSpec, seen: Observation) -> None:
        outcome = self._store.outcome(job.job_uuid, job.attempt)
        self._move(job, *verdict(job.state, outcome, seen, tail(RunDir(task.run_dir).log)))

    def _take_in_events(self, job: JobRecord) -> JobRecord:
        """Read the event file to its end; returns the job as it stands then."""
        assert job.run_dir is not None
        offset = self._store.outcome(job.job_uuid, job.attempt).offset
        while True:
            events, after = read_events(RunDir(job.run_dir).events, offset, _EVENT_BYTES)
            if after == offset:
                return self._store.get(job.job_uuid)
            self._store.apply_events(job.job_uuid, job.attempt, events, after)
            offset = after

    def _place(self) -> None:
        """Give free devices to waiting jobs and launch those; tell the others what they wait for."""
        holders = {job.device: job.job_uuid for job in self._store.active() if job.device}
        queue = self._store.queue()
        chosen = choose(queue, holders, self._devices)
        holders.update({device: job_uuid for job_uuid, device in chosen.items()})
        for job_uuid, device in chosen.items():
            job = self._store.get(job_uuid)
            self._guarded(job, partial(self._begin_attempt, job, device))
        for waiting in queue:
            if waiting.job_uuid not in chosen:
                self._note_detail(waiting, why_waiting(waiting.device, holders, self._devices))

    def _begin_attempt(self, job: JobRecord, device: str) -> None:
        """Record the attempt, then launch it: a crash in between leaves `launching`, which the next pass takes up."""
        attempt = job.attempt + 1
        home = resolve_under(self._data_dir / "jobs", job.job_uuid, "job_uuid")
        run_dir = home / "attempts" / str(attempt)
        _set_aside(run_dir)
        if self._store.launch(job.job_uuid, attempt, device, run_dir):
            self._advance(self._store.get(job.job_uuid))

    def _launch(self, job: JobRecord, task: TaskSpec) -> None:
        try:
            task.run_dir.mkdir(parents=True, exist_ok=True)
            self._write_spec(job)
            self._launcher.start(task)
        except OSError as error:
            reason = Reason.disk_full if error.errno in (errno.ENOSPC, errno.EDQUOT) else Reason.launch_failed
            self._move(job, JobState.failed, reason, f"the training process could not be started: {error}")

    def _write_spec(self, job: JobRecord) -> None:
        assert job.run_dir is not None
        assert job.device is not None
        spec = derive(job.spec, job.attempt, job.device, job.run_dir)
        RunDir(job.run_dir).spec.write_text(spec.model_dump_json(indent=1))

    def _task(self, job: JobRecord) -> TaskSpec:
        assert job.run_dir is not None
        assert job.device is not None
        return TaskSpec(f"{job.job_uuid}-{job.attempt}", job.run_dir, (job.device,), self._python)

    def _note_detail(self, job: JobRecord | Queued, detail: str) -> None:
        if detail != job.detail:
            state = JobState.scheduled if isinstance(job, Queued) else job.state
            self._store.note_detail(job.job_uuid, state, detail)

    def _move(self, job: JobRecord, target: JobState, reason: Reason | None = None, message: str = "") -> bool:
        moved = self._store.transition(job.job_uuid, job.attempt, job.state, target, reason, message)
        if moved:
            log.info("job %s: %s -> %s %s", job.job_uuid, job.state, target, message.partition("\n")[0])
        return moved


def _set_aside(run_dir: Path) -> None:
    """Rename a directory that an earlier database left under this name: its events are not this attempt's."""
    number = 1
    while run_dir.exists():
        aside = run_dir.with_name(f"{run_dir.name}.stale-{number}")
        if not aside.exists():
            run_dir.rename(aside)
        number += 1

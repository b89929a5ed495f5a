"""The loop that moves jobs along: place, launch, look, take in events, decide. One per data directory.

A plain thread, since no event loop can be relied on when a provider is made. Everything that must survive it is in the
store, in run directories, and in processes that outlive it: after a restart the next pass goes on where this one was.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import faults
from ..errors import JobConflict, StoreError, is_exhausted
from ..launch.base import Launcher, Observation, TaskSpec, TaskState
from ..launch.local import given_port
from ..launch.torchrun import free_port
from ..specs.checkpoint_files import misplaced
from ..specs.evaluations import best_step
from ..specs.events import CheckpointSaved, Reason, read_events
from ..specs.job import derive
from ..system.files import RunDir, atomic_write, free_bytes, is_whole, remove_leftovers, resolve_under, set_aside, tail
from ..system.process import FileLock
from .announced import accepted
from .housekeeping import INTERVAL, remove_unused_rows
from .ownership import Ownership
from .placement import Node, Queued, place, why_waits
from .records import CheckpointRecord, JobRecord
from .states import ACTIVE, TERMINAL, JobState, backoff
from .store import Store, private_data_dir
from .verdict import has_shrunk, may_shrink, verdict

log = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two passes when nobody calls `wake`."""
LOCK_RETRY = 1.0
"""Seconds between two tries for the lock while another process supervises this data directory."""
PATIENCE = 300
"""Passes in a row that a job may give us trouble before it is failed: a minute, so that a file system may recover."""
LOSSES_IN_A_ROW = 5
"""Attempts without a step that a job may lose to lost nodes before it counts as one of its retries."""
_EVENT_BYTES = 1 << 20
MASTER_PORT = 29500
PORTS = 100


class Supervisor:
    """Supervises the jobs of one data directory.

    Args:
        devices: concrete devices of this node, such as ["cpu"] or ["cuda:0", "cuda:1"]; the first is `auto`.
        data_dir: attempts live in `<data_dir>/jobs/<job_uuid>/attempts/<n>`; also holds `supervisor.lock`.
        python: interpreter that trains; None: this process's own.
        hang_timeout: seconds without progress after which a training is ended; None: never.
        master_ports: the first of a range of ports and their number: each job of several ranks takes one.
        blob_retention: seconds for which rows that nobody refers to are kept; None: for ever.
        nodes: says at every pass which machines there are, this one first; None: this one only.
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
        master_ports: tuple[int, int] = (MASTER_PORT, PORTS),
        blob_retention: float | None = None,
        nodes: Callable[[], Sequence[Node]] | None = None,
    ) -> None:
        assert devices, "a node without a device cannot train"
        self._store = store
        self._launcher = launcher
        self._devices = tuple(devices)
        self._nodes = nodes or (lambda: [Node("", self._devices, head=True)])
        self._data_dir = data_dir.resolve()
        self._python = python
        self._tick_seconds = tick
        self._hang_timeout = hang_timeout
        self._master_ports = master_ports
        self._ownership = Ownership(self._data_dir)
        self._blob_retention = blob_retention
        self._cleaned = -math.inf
        self._seen_in_vain: tuple[Sequence[Node], Mapping[str, str], Sequence[Queued]] | None = None
        self._trouble: dict[str, int] = {}
        self._trouble_seen = ""
        self._given_up: dict[str, str] = {}
        """Jobs that fail as soon as their processes have ended, and why."""
        self._exhausted = False
        self._swept = False
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
            private_data_dir(self._data_dir)
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
        if not self._swept:
            self._sweep()
        head, *_ = nodes = self._nodes()
        draining = {node.name for node in nodes if node.draining}
        for job in self._store.active():
            self._guarded(job, partial(self._advance, job))
            if draining:
                self._guarded(job, partial(self._drain, job, head.name, draining))
        self._place()
        if time.monotonic() - self._cleaned > INTERVAL:
            self._clean()

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
            self._swept = False
        return acquired

    def _sweep(self) -> None:
        """End trainings that no job of ours knows: their job was deleted with the database, or has ended without
        them. Done once, by whoever begins to supervise."""
        for run_dir in self._launcher.sweep(self._data_dir / "jobs", self._store.active_run_dirs()):
            log.warning("ended what was left running of %s: no job owns it", run_dir)
        self._swept = True

    def _clean(self) -> None:
        """Once in a while. What cannot be removed now will be later."""
        self._cleaned = time.monotonic()
        self._store.forget_tasks()
        try:
            remove_unused_rows(self._data_dir / "datasets", self._store, self._blob_retention)
        except OSError as error:
            log.warning("unused rows cannot be removed: %s", error)

    def _guarded(self, job: JobRecord, step: Callable[[], None]) -> None:
        """Keep one job's trouble from stopping the loop for the others."""
        try:
            if job.job_uuid in self._given_up:
                self._end(self._store.get(job.job_uuid), self._given_up[job.job_uuid])
            else:
                step()
        except StoreError:
            raise
        except Exception as error:
            if is_exhausted(error):
                self._note_exhausted(job, error)
                return
            self._trouble[job.job_uuid] = count = self._trouble.get(job.job_uuid, 0) + 1
            if count in (1, PATIENCE):
                log.exception("job %s: trouble, %d passes in a row", job.job_uuid, count)
            if count == PATIENCE:
                self._give_up(job, error)
        else:
            self._exhausted = False
            self._trouble.pop(job.job_uuid, None)

    def _note_exhausted(self, job: JobRecord, error: Exception) -> None:
        """Log that this process has no descriptors or no memory left. That says nothing about the job, which is
        handled again at every pass and does not come closer to being given up."""
        if not self._exhausted:
            log.error("job %s: %s; it is handled again at the next pass, its processes continue", job.job_uuid, error)
        self._exhausted = True

    def _give_up(self, job: JobRecord, error: Exception) -> None:
        """Fail a job that cannot be handled, from here on as soon as none of its processes is left."""
        message = f"the supervisor could not handle this job: {type(error).__name__}: {error}"
        self._given_up[job.job_uuid] = message
        self._guarded(job, lambda: None)

    def _end(self, job: JobRecord, message: str) -> None:
        """End the processes of a job that was given up, and fail it once they are gone: a device that is free on record
        while a process uses it would be given to another job."""
        if job.state in ACTIVE:
            task = self._task(job)
            self._launcher.cancel(task)
            if self._launcher.poll(task).state is not TaskState.exited:
                self._note_detail(job, f"{message}; it is being ended")
                return
        if job.state not in TERMINAL:
            self._move(job, JobState.failed, Reason.internal, message)
        del self._given_up[job.job_uuid]
        self._trouble.pop(job.job_uuid, None)

    def _advance(self, job: JobRecord) -> None:
        task = self._task(job)
        # First look, then read: what has exited by now has written all its events.
        seen = self._launcher.poll(task)
        job = self._take_in_events(job)
        if seen.state is TaskState.exited:
            self._conclude(job, task, seen)
        elif job.state is JobState.cancelling:
            self._launcher.cancel(task)
        elif job.state is JobState.pausing:
            self._pause(job, task, seen)
        elif seen.state is not TaskState.unknown:
            self._note_detail(job, seen.detail)
        elif job.state is JobState.launching:
            self._launch(job, task)
        else:
            self._conclude(job, task, Observation(TaskState.exited, detail=f"{task.run_dir} was removed"))

    def _drain(self, job: JobRecord, head: str, draining: set[str]) -> None:
        """Have a training on a node that is to be emptied save and end: it goes on elsewhere."""
        job = self._store.get(job.job_uuid)
        on = {place.rpartition("/")[0] or head for place in job.devices}
        if job.state is JobState.in_progress and not draining.isdisjoint(on):
            self._launcher.pause(self._task(job))

    def _pause(self, job: JobRecord, task: TaskSpec, seen: Observation) -> None:
        """Have a training save and end; one that has not begun, and so has nothing to save, is simply ended."""
        if seen.state is not TaskState.running:
            return self._launcher.cancel(task)
        try:
            self._launcher.pause(task)
        except OSError as error:  # a full disk, which gets free again: it trains on until then
            self._note_detail(job, f"it cannot be told to pause: {error}")

    def _conclude(self, job: JobRecord, task: TaskSpec, seen: Observation) -> None:
        """Nothing of the task is left: decide what it amounts to."""
        outcome = self._store.outcome(job.job_uuid, job.attempt)
        paths = RunDir(task.run_dir)
        log_tail = tail(paths.rank_log(seen.rank or 0)) or tail(paths.launcher_log)
        node = self._node_of(job, outcome.failed.rank) if outcome.failed else ""
        decided = verdict(job.state, outcome, seen, log_tail, node, str(paths.rank_log(seen.rank or 0)))
        self._remove_leftovers(job)
        faults.reach("supervisor-concluding")
        if decided.state is JobState.paused and job.state is not JobState.pausing:
            message = f"saved at step {outcome.paused_at_step}: its node is being drained"
            self._store.retry(job, None, message, 0.0, counts=False)
            return
        if decided.reason is Reason.node_lost and self._try_without_the_node(job, decided.message):
            return
        if decided.state is JobState.failed and self._try_in_smaller_parts(job, decided.reason, decided.message):
            return
        if decided.reason is Reason.launch_failed and self._try_on_other_nodes(job, decided.message):
            return
        if decided.state is JobState.failed and self._try_again(job, decided.reason, decided.message):
            return
        self._move(job, *decided)

    def _node_of(self, job: JobRecord, rank: int) -> str:
        """The node that a rank was on; empty where the job was on the service's machine alone."""
        if not is_remote(job.devices):
            return ""
        names = list(dict.fromkeys(place.rpartition("/")[0] for place in job.devices))
        return names[min(rank // job.spec.ranks_per_node, len(names) - 1)] or self._nodes()[0].name

    def _remove_leftovers(self, job: JobRecord) -> None:
        if not self._ownership.is_ours(job.spec.checkpoint_dir):
            return
        listed = {checkpoint.path.name for checkpoint in self._store.checkpoints(job.job_uuid)}
        remove_leftovers(job.spec.checkpoint_dir, listed)

    def _try_in_smaller_parts(self, job: JobRecord, reason: Reason | None, message: str) -> bool:
        """Queue a job that ran out of memory once more, with a smaller batch; it goes on from its last checkpoint."""
        if not may_shrink(job, self._store.attempts(job.job_uuid), reason):
            return False
        smaller = job.spec.in_smaller_parts()
        assert smaller is not None
        assert reason is not None
        was, now = (
            f"batch_size {spec.batch_size} and gradient_accumulation_steps {spec.gradient_accumulation_steps}"
            for spec in (job.spec, smaller)
        )
        said = f"attempt {job.attempt} ran out of memory: the next ones train with {now} instead of {was}"
        self._store.warn(job.job_uuid, f"{said}, which gives the same steps; oom_retry false forbids it")
        log.warning("job %s: %s", job.job_uuid, said)
        return self._store.retry(job, reason, message, 0.0, counts=False)

    def _try_without_the_node(self, job: JobRecord, message: str) -> bool:
        """Queue a job that has lost a node once more. That is nobody's fault: it counts as a retry only once
        `LOSSES_IN_A_ROW` attempts have been lost without a step."""
        if not is_remote(job.devices):
            return False
        in_vain = 0
        for tried in reversed(self._store.attempts(job.job_uuid)):
            if tried.step > tried.start_step or (tried.reason is not Reason.node_lost and tried.attempt != job.attempt):
                break
            in_vain += 1
        if in_vain >= LOSSES_IN_A_ROW:
            return False
        wait = backoff(Reason.node_lost, max(0, in_vain - 1))
        assert wait is not None
        log.warning("job %s: attempt %d has lost a node: %s", job.job_uuid, job.attempt, message.partition("\n")[0])
        return self._store.retry(job, Reason.node_lost, message, wait, counts=False)

    def _try_on_other_nodes(self, job: JobRecord, message: str) -> bool:
        """Queue a job once more that a node cannot start for a lasting reason. It counts as no retry: the placement
        leaves that node out."""
        on = {place.rpartition("/")[0] for place in job.devices}
        refusing = {"" if node.head else node.name for node in self._nodes() if job.job_uuid in (node.refused or ())}
        if not on & refusing:
            return False
        before = [tried for tried in self._store.attempts(job.job_uuid) if tried.reason is Reason.launch_failed]
        wait = backoff(Reason.launch_failed, len(before))
        assert wait is not None
        log.warning("job %s: attempt %d: %s", job.job_uuid, job.attempt, message.partition("\n")[0])
        return self._store.retry(job, Reason.launch_failed, message, wait, counts=False)

    def _try_again(self, job: JobRecord, reason: Reason | None, message: str) -> bool:
        """Queue a failed job once more, if another try may mend it and it has one left."""
        wait = None if reason is None else backoff(reason, job.retries_used)
        if reason is None or wait is None or job.retries_used >= job.spec.retries:
            return False
        moved = self._store.retry(job, reason, message, wait)
        if moved:
            log.warning(
                "job %s: attempt %d ended (%s), retry %d of %d in %.0f s: %s",
                *(job.job_uuid, job.attempt, reason, job.retries_used + 1, job.spec.retries, wait),
                message.partition("\n")[0],
            )
        return moved

    def _take_in_events(self, job: JobRecord) -> JobRecord:
        """Read the event file to its end; returns the job as it stands then."""
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
                self._forget_old_checkpoints(self._store.get(job.job_uuid))

    def _forget_old_checkpoints(self, job: JobRecord) -> None:
        """Remove the step checkpoints that need not be kept; never the newest, from which a retry goes on.

        A checkpoint leaves the list before it leaves the disk, so that no listed one is ever missing.
        """
        steps = [checkpoint for checkpoint in self._store.checkpoints(job.job_uuid) if checkpoint.kind == "step"]
        metric = job.spec.best_checkpoint
        # A better one that is still being written may never be announced: the best is what a retry would find.
        seen = [one for one in self._store.evaluations(job.job_uuid) if steps and one[0] <= steps[-1].step]
        best = best_step(metric, seen) if metric else None
        for checkpoint in superfluous(steps, job, best):
            self._store.remove_checkpoint(checkpoint)
            # Again: an earlier release may have listed it unchecked, and the training may have replaced it since.
            if misplaced(checkpoint.path, checkpoint.kind, job.spec.checkpoint_dir) is None:
                shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _place(self) -> None:
        """Give free devices to waiting jobs and launch those; tell the others what they wait for. Where all is as it
        was when nobody could be served, nobody can be: as time passes, more is kept for old jobs, and no more is free.
        """
        holders, nodes = self._store.holders(), self._nodes()
        everything = {node.place(device) for node in nodes if not node.why_closed for device in node.devices}
        some_free = not holders.keys() >= everything
        seen = nodes, holders, self._store.queue() if some_free else self._store.kinds_waiting()
        if seen == self._seen_in_vain:
            return
        placed = place(seen[2], nodes, holders, time.time()) if some_free else {}
        for job_uuid, places in placed.items():
            job = self._store.get(job_uuid)
            self._guarded(job, partial(self._begin_attempt, job, ",".join(places)))
        if placed:
            holders = self._store.holders()
        waiting = [(kind, why_waits(kind, holders, nodes)) for kind in self._store.kinds_waiting()]
        if changed := [(kind, why) for kind, why in waiting if why != kind.detail]:
            self._store.note_waiting(changed)
        self._seen_in_vain = None if placed else seen

    def _begin_attempt(self, job: JobRecord, device: str) -> None:
        """Record the attempt, then launch it: a crash in between leaves `launching`, which the next pass takes up."""
        attempt = job.attempt + 1
        home = resolve_under(self._data_dir / "jobs", job.job_uuid, "job_uuid")
        run_dir = home / "attempts" / str(attempt)
        # What an earlier database left under these names is not this job's.
        set_aside(run_dir)
        # What is not ours stays where it is, and the job fails: see `_launch`.
        ours = attempt == 1 and self._ownership.is_ours(job.spec.checkpoint_dir)
        if ours and (aside := set_aside(job.spec.checkpoint_dir)):
            self._store.warn(job.job_uuid, f"{job.spec.checkpoint_dir} existed already and was moved to {aside}")
        self._say_where_nodes_share_a_machine(job, nodes_of(device.split(",")))
        if self._store.launch(job.job_uuid, attempt, device, run_dir, self._resume_point(job)):
            faults.reach("supervisor-attempt-recorded")
            self._advance(self._store.get(job.job_uuid))

    def _say_where_nodes_share_a_machine(self, job: JobRecord, nodes: int) -> None:
        asked = job.spec.resources
        if asked is not None and nodes < (asked.min_nodes if job.attempt else asked.nodes):
            where = f"{nodes} nodes" if nodes > 1 else "one node"
            self._store.warn(
                job.job_uuid,
                f"it asks for {asked.nodes} nodes, and those that could serve it are fewer machines, where a second "
                f"agent's processes would only slow the first one's down: it trains on {where}, with the same rows per "
                "step",
            )

    def _resume_point(self, job: JobRecord) -> tuple[Path, int] | None:
        """The newest step checkpoint that is whole, and its step; one that somebody damaged is no longer listed.
        Without one, the checkpoint of another job that the job begins with, if it does.

        Sizes tell most of the damage, and digests, which the training process looks at, nearly all; from one that is
        damaged otherwise, two attempts have failed without a step.
        """
        steps = [checkpoint for checkpoint in self._store.checkpoints(job.job_uuid) if checkpoint.kind == "step"]
        in_vain = Counter(
            tried.resume_from
            for tried in self._store.attempts(job.job_uuid)
            if tried.reason is Reason.rank_failed and tried.step <= tried.start_step
        )
        for checkpoint in reversed(steps):
            if is_whole(checkpoint.path) and in_vain[checkpoint.path] < 2:
                return checkpoint.path, checkpoint.step
            self._store.remove_checkpoint(checkpoint)
            message = f"checkpoint {checkpoint.path} is damaged or gone and was not used to go on from"
            self._store.warn(job.job_uuid, message)
        given = _given_checkpoint(job)
        return None if given is None else (given, int(given.name.rpartition("-")[2]))

    def _launch(self, job: JobRecord, task: TaskSpec) -> None:
        try:
            self._check_disk(job)
            self._ownership.check_unused(job.spec.checkpoint_dir)
            self._ownership.claim(job.spec.checkpoint_dir, job.job_uuid)
            task.run_dir.mkdir(parents=True, exist_ok=True)
            self._write_spec(job)
            if task.ranks > 1 and not is_remote(task.devices):
                first, count = self._master_ports
                task = replace(task, master_port=self._master_port(), last_port=first + count - 1)
            self._launcher.start(task)
        except JobConflict as error:
            self._move(job, JobState.failed, Reason.invalid_request, str(error))
        except OSError as error:
            if is_exhausted(error):
                raise  # nothing was started; the next pass starts it
            reason = Reason.disk_full if error.errno in (errno.ENOSPC, errno.EDQUOT) else Reason.launch_failed
            message = f"the training process could not be started: {error}"
            if not self._try_again(job, reason, message):
                self._move(job, JobState.failed, reason, message)
        else:
            faults.reach("supervisor-task-started")

    def _master_port(self) -> int:
        """A port for the ranks of a job to meet at. What others of our jobs were given may not be open yet."""
        given = (given_port(other.run_dir) for other in self._store.active() if other.run_dir)
        return free_port(*self._master_ports, {port for port in given if port is not None})

    def _check_disk(self, job: JobRecord) -> None:
        for directory in (self._data_dir, job.spec.checkpoint_dir):
            free, needed = free_bytes(directory), job.spec.min_free_bytes
            if free < needed:
                sizes = f"{free >> 20} MiB are free and min_free_disk_mb asks for {needed >> 20}"
                raise OSError(errno.ENOSPC, f"the disk of {directory} is full: {sizes}")

    def _write_spec(self, job: JobRecord) -> None:
        assert job.run_dir is not None
        *before, attempt = self._store.attempts(job.job_uuid)
        older = [path for path in self._step_checkpoints(job) if path != attempt.resume_from and is_whole(path)]
        spec = derive(
            job.spec,
            job.attempt,
            job.devices[0].rpartition("/")[2],
            job.run_dir,
            attempt.resume_from,
            *(older if attempt.resume_from else ()),
            in_smaller_parts=has_shrunk(before),
            has_trained=any(tried.step > tried.start_step for tried in before),
            nodes=nodes_of(job.devices),
        )
        atomic_write(RunDir(job.run_dir).spec, spec.model_dump_json(indent=1).encode())

    def _step_checkpoints(self, job: JobRecord) -> list[Path]:
        """The newest first, and last the one that the job began with."""
        listed = self._store.checkpoints(job.job_uuid)
        own = [checkpoint.path for checkpoint in reversed(listed) if checkpoint.kind == "step"]
        given = _given_checkpoint(job)
        return own if given is None else [*own, given]

    def _task(self, job: JobRecord) -> TaskSpec:
        assert job.run_dir is not None
        limit = job.spec.max_duration
        return TaskSpec(
            f"{job.job_uuid}-{job.attempt}",
            job.run_dir,
            job.devices,
            self._python,
            job.spec.ranks_per_node,
            # Only a start reads it. Never 0: even the last try may save.
            time_limit=None if limit is None else max(1.0, limit - self._store.seconds_trained(job.job_uuid)),
            hang_timeout=self._hang_timeout,
        )

    def _note_detail(self, job: JobRecord, detail: str) -> None:
        if detail != job.detail:
            self._store.note_detail(job.job_uuid, job.state, detail)

    def _move(self, job: JobRecord, target: JobState, reason: Reason | None = None, message: str = "") -> bool:
        moved = self._store.transition(job.job_uuid, job.attempt, job.state, target, reason, message)
        if moved:
            log.info("job %s: %s -> %s %s", job.job_uuid, job.state, target, message.partition("\n")[0])
        return moved


def is_remote(places: Sequence[str]) -> bool:
    """Whether other machines than the service's own take part."""
    return any("/" in place for place in places)


def nodes_of(places: Sequence[str]) -> int:
    """How many nodes these places are on."""
    return len({place.rpartition("/")[0] for place in places}) or 1


def _given_checkpoint(job: JobRecord) -> Path | None:
    """The job's own copy of another job's checkpoint."""
    return job.spec.resume_from.path if job.spec.resume_from else None


def superfluous(
    steps: Sequence[CheckpointRecord], job: JobRecord, best: int | None = None
) -> Sequence[CheckpointRecord]:
    """Of a job's step checkpoints, by step, those that are not to be kept: beyond the newest `keep_last`, or, where
    this was not asked for, those between the planned ones that a newer one has made useless. One is saved every half
    hour, or whenever an evaluation is the best so far: over a weekend they would fill the disk. That of step `best`
    always stays, beside the others."""
    spec = job.spec
    if spec.keep_last:
        return [checkpoint for checkpoint in steps if checkpoint.step != best][: -spec.keep_last]
    # As planned: a job that stopped early has fewer steps by now.
    total_steps = job.effective and job.effective["total_steps"]
    if (spec.save_steps and not spec.best_checkpoint) or not total_steps:
        return []
    planned = spec.save_steps or total_steps // spec.n_epochs
    return [checkpoint for checkpoint in steps[:-1] if checkpoint.step % planned and checkpoint.step != best]

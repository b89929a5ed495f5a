"""Starts, observes and ends tasks on this machine, through one detached runner per task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from ..system.files import RunDir, atomic_write_json, tail
from ..system.process import (
    RUN_DIR_MARK,
    FileLock,
    ProcessId,
    alive,
    carries,
    exiting,
    marked,
    reap,
    send_signal,
    tasks_below,
)
from .base import Observation, TaskSpec, TaskState
from .devices import core_numbers
from .isolation import NO_ISOLATION, Isolation
from .runner import GRACE, PAUSE, Limits, RunnerStatus, RunnerTask
from .torchrun import core_lock, lock_name, task_marks, training_argv, training_environment
from .warm_processes import WarmProcesses

RUNNER = "llama_stack_provider_trl.launch.runner"
_RUNNER_TIME = GRACE + 1.0
"""Seconds for a runner to end its task; after them it is stopped or blocked, and both are killed."""
_START_TIMEOUT = 30.0
"""Timeout of a start in seconds. It takes 0.1-0.2 s; the rest is for a machine that swaps."""


class LocalLauncher:
    """The Launcher of this machine. All state is in the run directory and the processes, none in memory but the times
    of cancels while the disk cannot be written.

    Args:
        environ: source of the children's allow-listed variables; None: this process's own, read at each start.
        exit_deadline: seconds that a training process may live on after its `finished` or `failed` event.
        isolation: isolates trainings from this process and from each other.
        limits: limits of the processes of a task, together.
        warm: starts tasks without the import of torch; None: each starts its own Python.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        exit_deadline: float = 30.0,
        isolation: Isolation = NO_ISOLATION,
        limits: Limits | None = None,
        warm: WarmProcesses | None = None,
    ) -> None:
        self._environ = environ
        self._exit_deadline = exit_deadline
        self._isolation = isolation
        self._limits = limits or Limits()
        self._warm = warm
        self._cancelled: dict[Path, float] = {}

    def warm_up(self, python: str | None) -> None:
        """Begin to import what trains with this interpreter, so that the first task starts without it, too."""
        if self._warm is not None:
            common = TaskSpec("", Path("/"), ("cpu",))
            self._warm.prepare(python, training_environment(common, self._outer()))

    def close(self) -> None:
        """Start no further tasks warm. Those that run continue."""
        if self._warm is not None:
            self._warm.close()

    def start(self, task: TaskSpec) -> None:
        """See `Launcher.start`. Of two runners of one task, the second finds the first one's lock and exits."""
        paths = RunDir(task.run_dir)
        if paths.runner_status.exists():
            return
        cores = core_numbers(task.devices)
        locks = tuple(map(core_lock, cores)) or tuple(lock_name(device, self._outer()) for device in task.devices)
        environment = training_environment(task, self._outer())
        view = self._isolation.view(task, environment)
        RunnerTask(
            task_id=task.task_id,
            run_dir=task.run_dir,
            locks=() if task.serves else locks,
            argv=tuple(training_argv(task)),
            exit_deadline=self._exit_deadline,
            log=(paths.log if task.world_size == 1 else paths.launcher_log).name,
            # Only the node of rank 0 sees progress, and has the process that can save at the time limit.
            time_limit=task.time_limit if task.node_rank == 0 else None,
            hang_timeout=task.hang_timeout if task.node_rank == 0 else None,
            view=view,
            limits=self._limits.reserving(reserved_memory(paths.spec) if cores else None),
            shared_locks=_shared(task, locks),
            cores=cores,
            gives_way=task.serves and not task.beside,
        ).write(paths.task)
        exit_code = self._spawn(task, paths, environment)
        if exit_code != 0 and not paths.runner_status.exists():
            raise OSError(f"the runner exited with {exit_code}: {tail(paths.runner_log, 5) or 'its log is empty'}")

    def poll(self, task: TaskSpec) -> Observation:
        """See `Launcher.poll`. Ends the processes of a task whose runner was killed, since nothing else does."""
        if self._warm is not None:
            self._warm.replace_ended()
        status = RunnerStatus.read(RunDir(task.run_dir).runner_status)
        if status is None:
            if left := kill_marked(task):  # the run directory was removed
                return Observation(
                    TaskState.running, detail=f"its run directory was removed: {left} processes are being ended"
                )
            return Observation(TaskState.unknown)
        if status.state is TaskState.exited or _lives(status, task_marks(task)):
            return _observed(status)
        status = RunnerStatus.read(RunDir(task.run_dir).runner_status)  # its final status, if it has just ended
        if status is not None and status.state is TaskState.exited:
            return _observed(status)
        if left := kill_marked(task):
            return Observation(
                TaskState.running, detail=f"the runner was killed: its {left} remaining processes are being ended"
            )
        return Observation(TaskState.exited, detail="the runner was killed, and its training process with it")

    def pause(self, task: TaskSpec) -> None:
        control = RunDir(task.run_dir).control
        if not control.exists():
            atomic_write_json(control, PAUSE)

    def sweep(self, root: Path, keep: Collection[Path]) -> list[Path]:
        """See `Launcher.sweep`. A runner ends its processes itself; processes without a runner are killed here."""
        found = {run_dir: left for run_dir, left in tasks_below(root).items() if run_dir not in keep}
        for run_dir, left in found.items():
            status = RunnerStatus.read(RunDir(run_dir).runner_status) if run_dir.is_dir() else None
            if status is None or not _request_end(status.runner, {RUN_DIR_MARK: str(run_dir)}):
                for process in left:
                    send_signal(process, signal.SIGKILL)
        return sorted(found)

    def cancel(self, task: TaskSpec) -> None:
        paths = RunDir(task.run_dir)
        status = RunnerStatus.read(paths.runner_status)
        if status is None:
            kill_marked(task)
            return _forestall(task, paths)
        if status.state is TaskState.exited:
            return
        overdue = self._seconds_since_cancel(paths.cancelled) > _RUNNER_TIME
        if overdue or not _request_end(status.runner, task_marks(task)):
            kill_marked(task)

    def _seconds_since_cancel(self, mark: Path) -> float:
        """Seconds since the first cancel of a task, which creates `mark`; where that cannot be written, since the first
        one of this process."""
        try:
            return _seconds_since_first(mark)
        except OSError:  # a full or read-only disk, a removed directory
            now = time.monotonic()
            return now - self._cancelled.setdefault(mark, now)

    def _outer(self) -> Mapping[str, str]:
        return os.environ if self._environ is None else self._environ

    def _spawn(self, task: TaskSpec, paths: RunDir, environment: Mapping[str, str]) -> int:
        """Run the runner's first process, which exits once the detached one has reported. Returns its exit code."""
        argv = ["-m", RUNNER, str(paths.task)]
        with open(paths.runner_log, "ab", opener=_private) as output:
            # A CUDA driver that was opened before a fork does not work after it. No machine with a GPU has shown yet
            # that the imports do not open it. A warm process keeps the environment that it was started with.
            can_fork = (
                self._warm is not None
                and not task.accounts
                and not any(device.startswith("cuda") for device in task.devices)
            )
            if can_fork and self._start_warm(task, argv, environment, output.fileno()):
                return 0
            first = subprocess.Popen(
                [sys.executable, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=task.run_dir,
                env=environment,
                start_new_session=True,
            )
        try:
            return first.wait(_START_TIMEOUT)
        except subprocess.TimeoutExpired:
            first.kill()
            return first.wait()

    def _start_warm(self, task: TaskSpec, argv: list[str], environment: Mapping[str, str], output: int) -> bool:
        """Have a warm process fork the runner; False: it has to be started cold. A runner that was forked too late
        finds the lock of the other one and exits."""
        assert self._warm is not None
        return self._warm.start(task.python, argv, environment, task.run_dir, output) == 0


def _shared(task: TaskSpec, locks: tuple[str, ...]) -> tuple[str, ...]:
    """The locks that a task shares with others."""
    if task.serves:
        return () if task.beside else locks
    return ("cpu",) if core_numbers(task.devices) else ()


def _private(path: str, flags: int) -> int:
    """An opener of files that no other user can read."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _seconds_since_first(mark: Path) -> float:
    """Seconds since the first call with `mark`, a file that it creates. Raises OSError."""
    with suppress(FileExistsError):  # O_EXCL follows no symbolic link
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return time.time() - mark.lstat().st_mtime


def kill_marked(task: TaskSpec) -> int:
    """SIGKILL every process that carries the task's marks; returns their number."""
    left = marked(task_marks(task))
    for process in left:
        send_signal(process, signal.SIGKILL)
    return len(left)


def reserved_memory(spec: Path) -> float | None:
    """GiB that the job of a `spec.json` reserves with its cores on each node; None: none, or there is no file."""
    if not spec.exists():
        return None
    resources = (json.loads(spec.read_text()).get("job") or {}).get("resources") or {}
    memory_gb: float | None = resources.get("memory_gb")
    return memory_gb


def _request_end(runner: ProcessId | None, marks: Mapping[str, str]) -> bool:
    """SIGTERM to a task's runner; False where it is gone. The training can write `runner.json`: a process without the
    task's marks is not signalled, whatever the file contains."""
    return runner is not None and carries(runner, marks) and send_signal(runner, signal.SIGTERM)


def _lives(status: RunnerStatus, marks: Mapping[str, str]) -> bool:
    """Whether a task's runner lives: a process without the task's marks does not count, whatever `runner.json`
    contains."""
    if status.runner is None:
        return False
    # An exiting process has lost its environment: it is awaited, so that it is reaped below.
    if alive(status.runner) and (carries(status.runner, marks) or exiting(status.runner)):
        return True
    # A runner is an orphan. If this process is process 1 of a container, it has to reap it: now, since a task that has
    # ended is not polled again. It may have ended between the questions above.
    if not alive(status.runner):
        reap(status.runner.pid)
    return False


def _observed(status: RunnerStatus) -> Observation:
    return Observation(
        status.state, status.exit_code, status.rank, status.detail, status.launch_error, status.ended, status.stacks
    )


def _forestall(task: TaskSpec, paths: RunDir) -> None:
    """Record a task that never started as ended, unless its runner is starting at this moment."""
    Path(task.run_dir).mkdir(parents=True, exist_ok=True)
    claim = FileLock(paths.runner_lock)
    if not claim.acquire("a cancel"):
        return
    if not paths.runner_status.exists():
        ended = RunnerStatus(task.task_id, None, TaskState.exited, detail="cancelled before it was started")
        ended.write(paths.runner_status)
    claim.release()

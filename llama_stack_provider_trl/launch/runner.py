"""Owns one training process, or the torchrun of several: locks its devices, starts it, ends remaining processes, and
records how it ended.

    python -m llama_stack_provider_trl.launch.runner RUN_DIR/task.json

It detaches itself and outlives the supervisor, which reads `runner.json` instead of holding a pipe. No torch and no
pydantic here: it starts in 0.1 s and stays small while a training runs for days.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import platform
import pwd
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import faults
from ..system import fork
from ..system.beneath import NotAFile
from ..system.files import RunDir, atomic_write_json, open_in, open_regular, read_regular, tail, tail_of
from ..system.process import (
    FileLock,
    ProcessId,
    become_subreaper,
    descendants,
    die_with_parent,
    identify,
    innermost_pid,
    memory_of,
    myself,
    send_signal,
    terminate,
)
from .base import Ended, TaskState
from .namespaces import Confined, NotIsolated, View
from .torchrun import first_failure

log = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""
NICE = 10
"""Niceness: training yields to all other processes of the machine, such as those of requests."""
LOCKS = Path("/tmp")
"""Directory of device locks, with a directory below it for each user."""
RUNTIME = Path("/run/user")
_CLAIM_RETRY, _LATER_CLAIM_RETRY = 0.01, 0.2
"""Seconds after which a second runner of a task looks again whether the first one has reported; the longer ones after a
second of waiting."""
_CLAIM_SECONDS = 25.0
"""Seconds for which it waits: less than the launcher waits for it, so that its log has the reason."""
_DEVICE_RETRY = 0.2
"""Seconds between two attempts to take a lock that another process holds, and between two checks of a task that gives
way."""
_CLAIM_TRIES, _CLAIM_PAUSE = 5, 0.01
"""How often a task that gives way finds a claim before it ends, and seconds in between: it may be the check of another
such task, which takes microseconds."""
_FINAL_EVENTS = ("finished", "failed", "paused")
PAUSE = {"command": "pause"}
"""Content of `control.json` that orders rank 0 to save and end."""
_SAVING_TIME = 60.0
"""Seconds that a training at its time limit has to save a checkpoint."""
_STACKS_TIME = 1.0
_STACKS_BYTES = 16_384
_EVENTS_READ = 8 << 20
"""Bytes of events that are read at a time: more than any event has."""
_LIMITS_INTERVAL = 2.0
"""Seconds between two measurements of a task's memory. One takes 3 ms with 200 processes on the machine."""
_OOM_SCORE = "500"
"""Added to a training's badness of 0 to 1000: when memory is short, the kernel ends a training before the service."""


@dataclass(frozen=True)
class Limits:
    """Limits of the processes of a task, together; None: no limit."""

    memory_bytes: int | None = None
    processes: int | None = None
    of_memory: str = "max_training_memory_gb"
    """Name of what sets the limit of the memory."""

    @classmethod
    def of(cls, memory_gb: float | None, processes: int | None) -> Limits:
        """Limits from the settings."""
        return cls(None if memory_gb is None else int(memory_gb * 2**30), processes)

    def reserving(self, memory_gb: float | None) -> Limits:
        """The limits of a task that has reserved so much memory; None: it has reserved none."""
        size = None if memory_gb is None else int(memory_gb * 2**30)
        if size is None or (self.memory_bytes is not None and self.memory_bytes <= size):
            return self
        return replace(self, memory_bytes=size, of_memory="its reserved resources.memory_gb")


@dataclass(frozen=True)
class RunnerTask:
    """The launcher's order to the runner: `task.json`. The environment is inherited and never in a file."""

    task_id: str
    run_dir: Path
    locks: tuple[str, ...]
    """Names of the device locks to hold, such as `cpu` or `cuda-2`."""
    argv: tuple[str, ...]
    exit_deadline: float
    """Seconds that a process may live after its final event."""
    log: str = "rank-0.log"
    """File in the run directory for the process's output."""
    time_limit: float | None = None
    hang_timeout: float | None = None
    view: View | None = None
    """The trainer's view of the machine; None: it is not isolated."""
    limits: Limits = Limits()
    shared_locks: tuple[str, ...] = ()
    """Names of locks to share with other tasks, such as `cpu` where it has cores of its own."""
    cores: tuple[int, ...] = ()
    """The cores that its processes run on; none: all."""
    gives_way: bool = False
    """It shares its devices with other tasks that do, and is ended when a task that does not wants one of them."""

    @classmethod
    def read(cls, path: Path) -> RunnerTask:
        data = json.loads(read_regular(path))
        return cls(
            task_id=data["task_id"],
            run_dir=Path(data["run_dir"]),
            locks=tuple(data["locks"]),
            argv=tuple(data["argv"]),
            exit_deadline=data["exit_deadline"],
            log=data.get("log", "rank-0.log"),
            time_limit=data.get("time_limit"),
            hang_timeout=data.get("hang_timeout"),
            view=View.from_json(data["view"]) if data.get("view") else None,
            limits=Limits(**data.get("limits", {})),
            shared_locks=tuple(data.get("shared_locks", ())),
            cores=tuple(data.get("cores", ())),
            gives_way=data.get("gives_way", False),
        )

    def write(self, path: Path) -> None:
        atomic_write_json(path, {**asdict(self), "run_dir": str(self.run_dir)}, mode=0o600)


@dataclass(frozen=True)
class RunnerStatus:
    """The runner's published status: `runner.json`. Valid only while the runner lives, or when `state` is exited."""

    task_id: str
    runner: ProcessId | None
    state: TaskState
    trainer: ProcessId | None = None
    exit_code: int | None = None
    rank: int | None = None
    detail: str = ""
    launch_error: str = ""
    ended: Ended | None = None
    stacks: str = ""

    @classmethod
    def read(cls, path: Path) -> RunnerStatus | None:
        try:
            data: dict[str, Any] = json.loads(read_regular(path))
        except (FileNotFoundError, NotAFile):  # the training has replaced it: its processes are ended
            return None
        for name in ("runner", "trainer"):
            data[name] = data[name] and ProcessId(**data[name])
        ended = data.get("ended")
        return cls(**{**data, "state": TaskState(data["state"]), "ended": None if ended is None else Ended(ended)})

    def write(self, path: Path) -> None:
        atomic_write_json(path, asdict(self))


def main(arguments: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    task = RunnerTask.read(Path(arguments[0]))
    umask = os.umask(0o077)
    paths = RunDir(task.run_dir)
    claim = FileLock(paths.runner_lock)
    waited = 0.0
    while not claim.acquire(f"runner, pid {os.getpid()}"):
        if paths.runner_status.exists():
            return
        if waited >= _CLAIM_SECONDS:
            log.error(
                "another process (%s) holds %s of task %s and has not written %s for %.0f s: end that process; the "
                "task is started again",
                *(claim.holder(), claim.path.name, task.task_id, paths.runner_status.name, waited),
            )
            sys.exit(1)
        # Started before: the launcher takes a task without that file for gone, and ends it.
        pause = _CLAIM_RETRY if waited < 1 else _LATER_CLAIM_RETRY
        time.sleep(pause)
        waited += pause
    if paths.runner_status.exists():
        return  # started before; the lock and the file outlive the process that requested it
    ready = _detach()
    runner = Runner(task, umask)
    os.write(ready, b"1")
    os.close(ready)
    runner.run()


def _detach() -> int:
    """Continue as an orphan; the first process waits until a byte is written to the returned descriptor, then exits.

    So the launcher's child exits immediately (no zombie), and `runner.json` exists from then on.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)
    os.close(reader)
    return writer


class Signals:
    """Turns SIGTERM into a flag, and SIGTERM or SIGCHLD into an early end of `wait`."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def wait(self, seconds: float, trainer: Trainer | None = None) -> None:
        watched: list[int | Confined] = [self._reader, *([trainer] if isinstance(trainer, Confined) else [])]
        if self._reader in select.select(watched, [], [], seconds)[0]:
            os.read(self._reader, 4096)

    def _stop(self, number: int, frame: object) -> None:
        self.stop_requested = True


class Runner:
    """Runs one training process, from the wait for its devices to its exit code.

    Args:
        umask: the user's; the training process gets it, for checkpoints outside the data directory.
    """

    def __init__(self, task: RunnerTask, umask: int) -> None:
        self.umask = umask
        self.task = task
        self.paths = RunDir(task.run_dir)
        self.signals = Signals()
        self.locks: list[FileLock] = []
        self.claims: list[FileLock] = []
        """The claims on its devices; those of other tasks where this one gives way."""
        self.status = RunnerStatus(task.task_id, runner=myself(), state=TaskState.waiting)
        self.status.write(self.paths.runner_status)
        become_subreaper()

    def run(self) -> None:
        try:
            taken = self.take_devices()
        except OSError as error:
            return self.report(state=TaskState.exited, launch_error=f"its devices cannot be locked: {error}")
        if not taken:
            detail = self.status.detail if self.task.gives_way else ""
            return self.report(state=TaskState.exited, detail=detail or "cancelled before training started")
        try:
            trainer = self.start_trainer()
        except NotIsolated as error:
            reason = f"the training cannot be isolated ({error.strerror}); set isolation=off to train without it"
            return self.report(state=TaskState.exited, launch_error=reason)
        except OSError as error:
            reason = f"cannot start {self.task.argv[0]}: {error.strerror or error}"
            return self.report(state=TaskState.exited, launch_error=reason)
        self.report(state=TaskState.running, trainer=identify(trainer.pid), detail="")
        faults.reach("runner-trainer-started")
        try:
            exit_code = self.watch(trainer)
        finally:
            terminate(self.left_behind, grace=0)  # also after an error of ours: nothing would limit them
        faults.reach("runner-trainer-ended")
        rank, exit_code = first_failure(tail(self.paths.launcher_log)) or (None, exit_code)
        self.report(state=TaskState.exited, exit_code=exit_code, rank=rank)

    def report(self, **changes: Any) -> None:
        status = replace(self.status, **changes)
        if status == self.status:
            return
        self.status = status
        log.info("%s exit_code=%s %s%s", status.state, status.exit_code, status.detail, status.launch_error)
        try:
            status.write(self.paths.runner_status)
        except OSError as error:  # a full disk: an exit here would end a training that may survive it
            log.warning("cannot write %s: %s", self.paths.runner_status, error)

    def take_devices(self) -> bool:
        """Lock every device, in one order for all runners, which prevents deadlocks; False: the task has to stop.

        Tasks with cores of their own share the lock of the CPU, which a task without them takes alone.

        A training also claims its devices, from the moment at which it wants them until it ends. A task that gives way
        takes a free device only, and ends when it finds a claim: so a training never waits for one."""
        holder = f"task {self.task.task_id} (pid {os.getpid()}, run directory {self.task.run_dir})"
        places = device_locks()
        for name in sorted({*self.task.locks, *self.task.shared_locks}):
            for place in places:
                self.claims.append(FileLock(place / f"{name}.claim", shared=not self.task.gives_way))
                if not self.task.gives_way:
                    self._claim(self.claims[-1], holder)
                lock = FileLock(place / f"{name}.lock", shared=name in self.task.shared_locks)
                while not self.signals.stop_requested and not lock.acquire(holder):
                    self.report(detail=f"waiting for device {name}, held by {lock.holder()}")
                    if self.task.gives_way:
                        return False
                    self.signals.wait(_DEVICE_RETRY)
                self.locks.append(lock)
        return not self.signals.stop_requested and not self.has_to_give_way()

    def _claim(self, claim: FileLock, holder: str) -> None:
        """Any number of trainings hold a claim together; one that gives way holds it alone, to find out about them."""
        while not self.signals.stop_requested and not claim.acquire(holder):
            self.signals.wait(_CLAIM_PAUSE)

    def has_to_give_way(self) -> bool:
        """Whether a training wants a device that this task serves on; reports which one does."""
        for claim in self.claims if self.task.gives_way else ():
            if _is_claimed(claim):
                self.report(detail=f"gave way to {claim.holder()}")
                return True
        return False

    def start_trainer(self) -> Trainer:
        """Start the trainer. It writes to files and never to a pipe: a pipe without a reader blocks every rank after 64
        KiB."""
        with open(self.paths.root / self.task.log, "ab") as output:
            if self.task.view is not None:
                if any(name.startswith("cuda") for name in (*self.task.locks, *self.task.shared_locks)):
                    _load_driver()
                return Confined(self.task.view, self.task.argv, self._in_child(self.umask), output.fileno())
            prepare = self._in_child(self.umask, os.getpid())
            if fork.can_become(self.task.argv):
                return fork.start(self.task.argv, cwd=self.task.run_dir, output=output.fileno(), prepare=prepare)
            return subprocess.Popen(
                self.task.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.task.run_dir,
                start_new_session=True,
                preexec_fn=prepare,
            )

    def watch(self, trainer: Trainer) -> int:
        """Wait for the trainer. It is ended on request, when it hangs, at its time limit, when it exceeds a limit, or
        when it does not exit after its final event."""
        began = time.monotonic()
        measured = 0.0
        events = _EventFile(self.paths.events)
        while (exit_code := collect(trainer)) is None:
            overtime = time.monotonic() - began - (self.task.time_limit or math.inf)
            if self.signals.stop_requested:
                log.info("a stop was requested")
                terminate(self.left_behind, GRACE)
            elif self.has_to_give_way():
                terminate(self.left_behind, 0)  # it has nothing to save, and the training waits
            elif events.seconds_since_final() > self.task.exit_deadline:
                log.info("still alive %.0f s after its final event: ending it", self.task.exit_deadline)
                terminate(self.left_behind, GRACE)
            elif overtime > 0 and self.has_run_out_of_time(overtime):
                terminate(self.left_behind, GRACE)
            elif events.seconds_still() > (self.task.hang_timeout or math.inf) and not events.is_over:
                self.report(ended=Ended.hung, stacks=self.collect_stacks())
                terminate(self.left_behind, GRACE)
            elif time.monotonic() - measured > _LIMITS_INTERVAL and self.exceeds_limits():
                terminate(self.left_behind, 0)  # a process that handles SIGTERM could use more memory
            else:
                if time.monotonic() - measured > _LIMITS_INTERVAL:
                    measured = time.monotonic()
                self.signals.wait(_DEVICE_RETRY if self.task.gives_way else 1.0, trainer)
        return exit_code

    def exceeds_limits(self) -> bool:
        """Whether the processes of the task exceed a limit; records which one."""
        limits = self.task.limits
        if limits.memory_bytes is None and limits.processes is None:
            return False
        processes = self.left_behind()
        if limits.processes is not None and len(processes) > limits.processes:
            found = f"it has {len(processes)} processes, max_training_processes is {limits.processes}"
            self.report(ended=Ended.too_many_processes, detail=found)
        elif limits.memory_bytes is not None and (taken := _more_than(limits.memory_bytes, processes)):
            found = f"it takes {taken / 2**30:.1f} GiB, {limits.of_memory} is {limits.memory_bytes / 2**30:.1f}"
            self.report(ended=Ended.out_of_memory, detail=found)
        return self.status.ended in (Ended.out_of_memory, Ended.too_many_processes)

    def has_run_out_of_time(self, overtime: float) -> bool:
        """Request that the trainer saves. Returns True once its time for that is over."""
        if self.status.ended is None:
            self.report(ended=Ended.timed_out)
            try:
                atomic_write_json(self.paths.control, PAUSE)
            except OSError as error:  # a full disk: it could not save either
                log.warning("cannot request that it saves: %s", error)
        return overtime > _SAVING_TIME

    def collect_stacks(self) -> str:
        """The Python stacks of every rank. Only a process with a file in `stacks` expects the signal; any other would
        be ended by it."""
        # The training can replace `stacks`, but not the directory that contains it.
        files = {process: f"{self.paths.stacks.name}/{innermost_pid(process.pid)}" for process in self.left_behind()}
        signalled = {process: name for process, name in files.items() if self._stack(name) is not None}
        for process in signalled:
            send_signal(process, signal.SIGUSR1)
        time.sleep(_STACKS_TIME)
        texts = [self._stack(name) for name in signalled.values()]
        return "\n\n".join(text for text in texts if text)

    def _stack(self, name: str) -> str | None:
        try:
            with open_in(self.paths.root, name) as file:
                return tail_of(file, 400, _STACKS_BYTES)
        except OSError:
            return None

    def left_behind(self) -> list[ProcessId]:
        return descendants(os.getpid())

    def _in_child(self, umask: int, parent: int | None = None) -> Any:
        cores = self.task.cores

        def prepare() -> None:
            os.umask(umask)
            if cores and hasattr(os, "sched_setaffinity"):  # else its threads are limited only
                os.sched_setaffinity(0, cores)
            if parent is not None:
                die_with_parent(parent)
            _yield_to_others()

        return prepare


Trainer = subprocess.Popen[bytes] | fork.ForkedProgram | Confined


def _yield_to_others() -> None:
    """Set up the training process: its CPU time and memory rank behind everything else on the machine, without core
    dumps."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # no Linux
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _load_driver() -> None:
    """Have NVIDIA's tool create the device nodes that CUDA would create itself, with rights that a training lacks."""
    tool = shutil.which("nvidia-modprobe")
    if tool is not None and not Path("/dev/nvidia-uvm").exists():
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([tool, "-u", "-c=0"], timeout=30, capture_output=True, check=False)


class _EventFile:
    """Watches `events.jsonl` for the final event, after which only the exit is left, and for progress.

    Ages are counted from the first observation here, so clock changes do not matter.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._final_seen: float | None = None
        self._stamp = 0
        self._moved = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self._final_seen is not None

    def seconds_since_final(self) -> float:
        """Seconds since the final event; 0: there is none yet."""
        if self._final_seen is None and self._read_new_events():
            self._final_seen = time.monotonic()
        return 0.0 if self._final_seen is None else time.monotonic() - self._final_seen

    def seconds_still(self) -> float:
        """Seconds since the file was last written or touched, or since the first observation."""
        try:
            stamp = self._path.lstat().st_mtime_ns
        except FileNotFoundError:
            stamp = 0
        if stamp != self._stamp:
            self._stamp, self._moved = stamp, time.monotonic()
        return time.monotonic() - self._moved

    def _read_new_events(self) -> bool:
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                data = file.read(_EVENTS_READ)
        except (FileNotFoundError, NotAFile):
            return False
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _EVENTS_READ else 0)
        self._offset += end
        return any(_is_final(line) for line in data[:end].splitlines())


def _is_final(line: bytes) -> bool:
    try:
        event = json.loads(line)
    except ValueError:  # the supervisor reports it; it must not end the runner
        return False
    return isinstance(event, dict) and event.get("type") in _FINAL_EVENTS


def _more_than(limit: int, processes: Sequence[ProcessId]) -> int:
    """Memory of processes where it exceeds a limit, else 0. Forks, such as loader workers, share most pages with the
    process that forked them: those count once, which is measured only where counting them several times exceeds the
    limit."""
    if memory_of(processes) <= limit:
        return 0
    taken = memory_of(processes, exact=True)
    return taken if taken > limit else 0


def collect(trainer: Trainer) -> int | None:
    """Collect every dead child (a subreaper inherits them). Returns the trainer's exit code once it is among them."""
    child = trainer.init if isinstance(trainer, Confined) else trainer.pid
    while (trainer.poll_report() if isinstance(trainer, Confined) else trainer.returncode) is None:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return trainer.returncode
        if pid == 0:
            return None
        if pid == child and (not isinstance(trainer, Confined) or trainer.poll_report() is None):
            trainer.returncode = os.waitstatus_to_exitcode(status)
    return trainer.returncode


def _is_claimed(claim: FileLock) -> bool:
    for _ in range(_CLAIM_TRIES):
        if claim.acquire("a task that serves"):
            claim.release()
            return False
        time.sleep(_CLAIM_PAUSE)
    return True


def device_locks() -> list[Path]:
    """The directories of device locks, all of which have to be locked, in this order: $TRL_LOCK_DIR alone, or one for
    each user of the machine. TMPDIR has no effect, so that programs with different ones lock the same devices.

    The usual directory is in /tmp, where another user can create it first, which makes it useless. Then directories are
    created where no other user can write. Programs that have used those lock them also after the one in /tmp can be
    created, since programs that started without it lock only them. Raises OSError: none can be created.
    """
    if chosen := os.environ.get("TRL_LOCK_DIR"):
        directory = Path(chosen)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [directory]
    usual = LOCKS / f"llama-stack-trl-{os.getuid()}"
    usable, problem = [], ""
    try:
        _make_private(usual)
        _make_private(usual / "devices")
        usable.append(usual / "devices")
    except OSError as error:
        problem = f"{error.filename or usual}: {error.strerror}"
        log.warning("device locks cannot be kept in %s; using directories of this user instead", problem)
    for place in _own_places():
        with suppress(OSError):  # a user without a home directory, a disk that cannot be written
            if problem:
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _make_private(place)
            elif not place.is_dir():
                continue
            else:
                _check_private(place)
            usable.append(place)
    if not usable:
        raise PermissionError(errno.EPERM, f"no directory is usable ({problem}): remove it, or set TRL_LOCK_DIR")
    return usable


def lock_places(chosen: str | None) -> list[Path]:
    """Every directory that holds device locks of this user, to be hidden from trainings; `chosen` is TRL_LOCK_DIR.

    Those that `device_locks` falls back to are created: only an existing directory can be covered, and a training may
    write the cache that one of them is in.
    """
    places = [Path(chosen) if chosen else LOCKS / f"llama-stack-trl-{os.getuid()}"]
    for place in _own_places():
        with suppress(OSError):
            place.parent.mkdir(mode=0o700, exist_ok=True)
            places.append(place.parent)
    return places


def _own_places() -> list[Path]:
    """Directories for device locks that no other user can create: below directories that only this user can write."""
    session = RUNTIME / str(os.getuid())
    places = [session / "llama-stack-trl"] if session.is_dir() else []
    with suppress(KeyError):  # a user without an entry, as in some containers
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        # One home directory may serve several machines.
        places.append(home / ".cache" / "llama-stack-trl" / f"devices-{platform.node()}")
    return places


def _make_private(directory: Path) -> None:
    """Create a directory for this user alone, or check that it is one. Raises OSError: it is another user's, or no
    directory."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    _check_private(directory)


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a directory but a link or a file", str(directory))
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    if found.st_mode & 0o022:
        directory.chmod(0o700)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Keeps warm processes for a launcher, and has them start runners."""

from __future__ import annotations

import array
import json
import logging
import math
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..system import fork
from ..system.files import tail_of
from ..system.process import RUN_DIR_MARK, TASK_MARK
from .installed import digest
from .warm import ARROW, CHANNEL, REQUEST_BYTES

log = logging.getLogger(__name__)

WARM = "llama_stack_provider_trl.launch.warm"
ANSWER_TIME = 1.0
"""Seconds within which a runner is to be started; it takes 0.1. After them the task is started cold."""
MOST_UNANSWERED = 2
"""Requests in a row without an answer, after which the process is replaced: it is stopped or blocked."""
MOST_PROCESSES = 2
"""Each takes 0.5 GiB. A task with another interpreter or other variables replaces the least recently used one."""
IDLE = 600.0
"""Seconds after which a process that no task has used is ended, if there is another one."""
RETRY = 60.0
"""Seconds before another try for an interpreter whose warm process ended before it was ready."""
_ROOM_FOR_ARGUMENTS = "-" * 1024
"""An argument whose place a fork's own command line takes."""
_LONGEST_ENVIRONMENT = fork.ROOM_BYTES - 1024
_AFTER_THE_FORK = re.compile(
    rf"{TASK_MARK}|{RUN_DIR_MARK}|TRL_FAULTS|TRL_LOCK_DIR|(GLOO|NCCL)_SOCKET_IFNAME|{fork.THREADS}|PYTORCH_ALLOC_CONF"
    r"|TORCHINDUCTOR_CACHE_DIR"
)
"""Variables that are read after the fork, or applied then. PYTORCH_ALLOC_CONF: only tasks on the CPU are forked."""

type Conditions = tuple[str, tuple[tuple[str, str], ...], tuple[Any, ...]]
"""Interpreter, environment and limits with which libraries are imported."""


def conditions(python: str, environ: Mapping[str, str]) -> Conditions:
    """What a warm process and a task must have in common."""
    kept = (item for item in environ.items() if not _is_applied_later(*item))
    limits = (getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_"))
    inherited = (
        *(resource.getrlimit(limit) for limit in limits),
        os.getpriority(os.PRIO_PROCESS, 0),
        tuple(sorted(os.sched_getaffinity(0))),
    )
    return python, tuple(sorted(kept)), inherited


def _is_applied_later(name: str, value: str) -> bool:
    if name == fork.THREADS and not value.isdigit():  # a list, one number for each level
        return False
    return _AFTER_THE_FORK.fullmatch(name) is not None


class WarmProcess:
    """One warm process and the channel to it. It ends with this process, or when the channel is closed. Raises OSError:
    it cannot be started."""

    def __init__(self, python: str, environ: Mapping[str, str], spawn: Callable[..., Any] = subprocess.Popen) -> None:
        self._python = python
        self._ready: dict[str, Any] | None = None
        self._unanswered = 0
        with ExitStack() as on_error:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_error.callback(self._channel.close)
            self._channel.setblocking(False)
            self._errors = cast(BinaryIO, on_error.enter_context(tempfile.TemporaryFile()))
            with theirs:
                self._process = spawn(
                    [python, "-m", WARM, f"{CHANNEL}{theirs.fileno()}", _ROOM_FOR_ARGUMENTS],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    cwd="/",
                    env={**environ, **ARROW, fork.ROOM: "-" * fork.ROOM_BYTES},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            on_error.pop_all()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def is_ready(self) -> bool:
        """Whether it has imported the libraries."""
        if self._ready is None:
            with suppress(BlockingIOError, ConnectionError):
                data = self._channel.recv(REQUEST_BYTES)
                self._ready = json.loads(data) if data else None
        return self._ready is not None

    @property
    def other_interpreter(self) -> str:
        """The interpreter that a script ran in place of the requested one; empty: it is that one, or not known yet."""
        found = "" if self._ready is None else str(self._ready["executable"])
        return "" if found == self._python else found

    def ended(self) -> str:
        """The reason for which it can serve no request any more; empty: there is none."""
        if self._process.poll() is not None:
            return f"it ended with {self._process.returncode}"
        if self._unanswered >= MOST_UNANSWERED:
            return "it does not answer"
        return ""

    def problem(self) -> str:
        """The reason for which it has to be replaced; empty: there is none."""
        if reason := self.ended():
            return reason
        if not self.is_ready or self._ready is None:
            return ""
        if self.other_interpreter:
            return f"it runs {self.other_interpreter}"
        if digest(self._ready["paths"], Path(self._ready["own"])) != self._ready["digest"]:
            return "installed packages, or our own modules, have changed"
        return ""

    def start(self, argv: Sequence[str], environ: Mapping[str, str], cwd: Path, output: int) -> int | None:
        """Start a runner. Returns the exit code of its first process; None: no answer within `ANSWER_TIME`."""
        request = {"argv": list(argv), "environ": dict(environ), "cwd": str(cwd), "umask": _umask()}
        data = json.dumps(request).encode()
        if len(data) > REQUEST_BYTES:
            return None
        rights = array.array("i", [output])
        try:
            self._channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError as error:
            log.debug("the warm process does not accept a request: %s", error)
            return None
        self._unanswered += 1
        return self._answer()

    def _answer(self) -> int | None:
        """The answer to the last request. Those of requests that were given up before may come first."""
        deadline, found = time.monotonic() + ANSWER_TIME, None
        while self._unanswered:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._channel.recv(REQUEST_BYTES)
            except OSError:  # the time is over, or it was killed
                return None
            finally:
                self._channel.setblocking(False)
            if not data:
                return None
            self._unanswered -= 1
            found = int(json.loads(data)["exit_code"])
        return found

    def close(self) -> str:
        """End it, which has no effect on what it has started. Returns the end of its log."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
        with self._errors:
            return tail_of(self._errors, 5, 4096)


class WarmProcesses:
    """The warm processes of one launcher, or of several in one process. May be used from several threads.

    Linux only: elsewhere every task is started cold, since libraries have threads after the import, or a fork of them
    is not safe.
    """

    def __init__(
        self,
        make: Callable[[str, Mapping[str, str]], WarmProcess] = WarmProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._clock = make, clock
        self._lock = threading.Lock()
        self._kept: dict[Conditions, WarmProcess] = {}
        """Least recently used first."""
        self._used_at: dict[Conditions, float] = {}
        self._failed_at: dict[str, float] = {}
        self._closed = False

    def prepare(self, python: str | None, environ: Mapping[str, str]) -> None:
        """Start the warm process for tasks with this environment, unless there is one. Returns at once."""
        with self._lock:
            self._find(python or sys.executable, environ)

    def start(
        self, python: str | None, argv: Sequence[str], environ: Mapping[str, str], cwd: Path, output: int
    ) -> int | None:
        """Have a runner started, without its interpreter in `argv`. Returns the exit code of its first process; None:
        it has to be started cold."""
        python = python or sys.executable
        with self._lock:
            process = self._find(python, environ)
            if process is None or not process.is_ready:
                return None
            if sum(len(name) + len(value) + 2 for name, value in environ.items()) > _LONGEST_ENVIRONMENT:
                return None
            return process.start([python, *argv], environ, cwd, output)

    def replace_ended(self) -> None:
        """Replace processes that have ended, and end superfluous ones. Takes no time where there are none."""
        with self._lock:
            for wanted in list(self._kept)[:-1]:
                if self._clock() - self._used_at[wanted] > IDLE:
                    self._kept.pop(wanted).close()
            for wanted, process in list(self._kept.items()):
                if process.ended():
                    self._find(wanted[0], dict(wanted[1]))

    def close(self) -> None:
        """End the warm processes, and start no others. Trainings continue."""
        with self._lock:
            self._closed = True
            for process in self._kept.values():
                process.close()
            self._kept.clear()

    def pids(self) -> list[int]:
        """Process ids of the warm processes that are ready."""
        with self._lock:
            return [process.pid for process in self._kept.values() if process.is_ready]

    def _find(self, python: str, environ: Mapping[str, str]) -> WarmProcess | None:
        """The process for tasks with this environment, started now where there is none. None: there can be none."""
        if self._closed or sys.platform != "linux":
            return None
        wanted = conditions(python, environ)
        process = self._kept.pop(wanted, None)
        if process is not None and (problem := process.problem()):
            self._drop(python, process, problem)
            process = None
        if process is None and self._clock() - self._failed_at.get(python, -math.inf) > RETRY:
            process = self._begin(python, wanted)
        if process is not None:
            self._kept[wanted] = process
            self._used_at[wanted] = self._clock()
        return process

    def _begin(self, python: str, wanted: Conditions) -> WarmProcess | None:
        while len(self._kept) >= MOST_PROCESSES:
            self._kept.pop(next(iter(self._kept))).close()
        try:
            return self._make(python, dict(wanted[1]))
        except OSError as error:
            self._failed_at[python] = self._clock()
            log.warning("no warm process of %s: %s; trainings start cold", python, error)
            return None

    def _drop(self, python: str, process: WarmProcess, problem: str) -> None:
        is_usable = process.is_ready and not process.other_interpreter
        last = process.close()
        if is_usable:
            log.info("the warm process of %s is replaced: %s", python, problem)
            return
        self._failed_at[python] = self._clock()
        log.warning("no warm process of %s: %s; trainings start cold. Its log ends with: %s", python, problem, last)


def _umask() -> int:
    found = re.search(r"^Umask:\s+(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "the kernel is older than 4.7"
    return int(found[1], 8)

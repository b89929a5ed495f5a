"""Continues a forked process as a Python program, where another process would run it by exec.

A process that has imported large libraries calls `prepare` once. From then on it and its forks start programs of the
same interpreter by a fork, without another import. `become` gives the fork what exec would give it: an environment, the
default signal handlers, its own file descriptors, fresh random numbers. Linux, standard library only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOM = "TRL_WARM_ROOM"
"""Variable of a process that calls `prepare`. Its value only takes space: a fork's environment is written there."""
ROOM_BYTES = 48 << 10
THREADS = "OMP_NUM_THREADS"
_UNBUFFERED, _MODULE = "-u", "-m"
_FROM_ENTROPY = {
    "torch": "default_generator",
    "numpy.random.mtrand": "_rand",
    "datasets.fingerprint": "fingerprint_rng",  # names of cache files, which two jobs must not share
    "sympy.core.random": "rng",
}
"""Generators, by their modules. With torch, trl and their dependencies imported there are no others."""
_STREAMS = 3
_ARGUMENTS_AT = 45
"""Index of `arg_start` in /proc/PID/stat, without the pid and the name; the ends of both areas follow."""


@dataclass(frozen=True)
class ForkableProcess:
    """What a fork needs of the process that has imported the libraries."""

    executable: str
    arguments: tuple[int, int]
    environment: tuple[int, int]
    """Addresses of the memory that the kernel shows in /proc/PID/cmdline and /proc/PID/environ."""
    imported: Mapping[str, str]
    """Environment variables that the libraries have set."""
    openmp: str | None
    """Path of the OpenMP library that torch uses."""
    default_threads: int
    resident: int
    """Bytes of resident memory after the imports. A fork maps the libraries' files again only where it reads them."""


_prepared: ForkableProcess | None = None


def prepare(before: Mapping[str, str], resident: int) -> None:
    """Make this process one whose forks are programs; its libraries are imported.

    Args:
        before: its environment before the imports.
        resident: its resident memory now, in bytes.
    """
    global _prepared
    start = _addresses()
    openmp = _openmp_library()
    _prepared = ForkableProcess(
        executable=sys.executable,
        arguments=(start[0], start[1]),
        environment=(start[2], start[3]),
        imported={name: value for name, value in os.environ.items() if name not in before},
        openmp=openmp,
        default_threads=ctypes.CDLL(openmp).omp_get_max_threads() if openmp else 0,
        resident=resident,
    )


def is_prepared() -> bool:
    """Whether this process has imported the libraries, or is a fork of one that has."""
    return _prepared is not None


def imported_memory() -> int:
    """Bytes that a process of the same interpreter has in memory after the imports; 0: unknown."""
    return _prepared.resident if _prepared is not None else 0


def can_become(argv: Sequence[str]) -> bool:
    """Whether a fork of this process can continue as this command: `python [-u] -m MODULE ...` of its interpreter."""
    if _prepared is None or list(argv[:1]) != [_prepared.executable]:
        return False
    rest = [part for part in argv[1:3] if part != _UNBUFFERED]
    return rest[:1] == [_MODULE]


class ForkedProgram:
    """A program in a fork of this process. It has what callers use of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Exit status once it is known; negative: minus the signal that ended it."""

    def poll(self) -> int | None:
        """The exit status; None: it runs."""
        if self.returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. Raises subprocess.TimeoutExpired: it runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return status


def start(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output: int | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> ForkedProgram:
    """Start a command that this process `can_become`, in a session of its own.

    Args:
        environ: its environment; None: this process's.
        output: file descriptor for its output, and it has no input then; None: this process's streams.
        prepare: called in the fork, before the program.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # torchrun's store has a thread, which waits for requests in the kernel and holds no lock then.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return ForkedProgram(pid)
    try:
        os.setsid()
        if output is not None:
            redirect(output)
        close_files()
        if cwd is not None:
            os.chdir(cwd)
        prepare()
        become(argv, os.environ.copy() if environ is None else environ)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def redirect(output: int) -> None:
    """Write this process's output to a file descriptor, and give it no input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, output, output)):
        os.dup2(source, target)


def close_files(keep: Collection[int] = ()) -> None:
    """Close all file descriptors but the three streams and `keep`."""
    gc.freeze()  # else the collector could close a number again that is another file by then
    kept = sorted({_STREAMS - 1, *keep})
    for low, high in zip(kept, [*kept[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)


def become(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Continue as a program, in a process that was forked for it, and end with its exit status."""
    assert _prepared is not None, "this process has imported nothing"
    _default_signals()
    _replace_environment(argv, {**_prepared.imported, **environ}, _prepared)
    _renew_random_numbers()
    _set_threads(environ.get(THREADS), _prepared)
    atexit._clear()
    status = 1
    try:
        _run(argv)
        status = 0
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(status)


def _run(argv: Sequence[str]) -> None:
    module_at = argv.index(_MODULE) + 1
    sys.argv = list(argv[module_at:])
    sys.orig_argv = list(argv)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    sys.modules.pop(argv[module_at], None)  # `python -m` runs a module once more, too
    runpy.run_module(argv[module_at], run_name="__main__", alter_sys=True)


def _exit_status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _default_signals() -> None:
    """Undo the handlers of the process that forked us, as exec does: what it ignores, such as SIGINT in the background
    of a shell, stays ignored. Python itself ignores two signals and handles SIGINT."""
    signal.set_wakeup_fd(-1)
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    ignored |= {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):  # those of the C library's threads
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _replace_environment(argv: Sequence[str], environ: Mapping[str, str], prepared: ForkableProcess) -> None:
    """Replace the environment, and what the kernel shows of it and of the command line.

    A task's processes are found by /proc/PID/environ: the marks come first, and what does not fit is left out there.
    """
    os.environ.clear()  # first: the C library's pointers lead into the memory that is overwritten
    os.environ.update(environ)
    marks_first = sorted(environ.items(), key=lambda item: not item[0].startswith("TRL_"))
    _overwrite(prepared.environment, [f"{name}={value}" for name, value in marks_first])
    _overwrite(prepared.arguments, [" ".join(argv)])
    # Without a NUL at its end the kernel shows the area up to the first NUL only.
    ctypes.memset(prepared.arguments[1] - 1, ord("-"), 1)


def _overwrite(area: tuple[int, int], parts: Sequence[str]) -> None:
    first, size = area[0], area[1] - area[0]
    block = b""
    for part in (os.fsencode(part) + b"\0" for part in parts):
        if len(block) + len(part) < size:
            block += part
    ctypes.memset(first, 0, size)
    ctypes.memmove(first, block, len(block))


def _renew_random_numbers() -> None:
    """Seed what an import seeds from the system's entropy. Python renews its own generator after a fork."""
    for name, generator in _FROM_ENTROPY.items():
        if (module := sys.modules.get(name)) is not None:
            getattr(module, generator).seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)


def _set_threads(text: str | None, prepared: ForkableProcess) -> None:
    """Apply OMP_NUM_THREADS, which OpenMP has read when it was loaded. It starts its threads at the first use."""
    wanted = int(text) if text and text.isdigit() else prepared.default_threads
    if prepared.openmp and wanted:
        ctypes.CDLL(prepared.openmp).omp_set_num_threads(wanted)


def _openmp_library() -> str | None:
    found = re.search(r"(/\S*/libgomp\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return found[1] if found else None


def _addresses() -> tuple[int, ...]:
    stat = Path("/proc/self/stat").read_bytes()
    fields = stat[stat.rindex(b")") + 2 :].split()
    return tuple(map(int, fields[_ARGUMENTS_AT : _ARGUMENTS_AT + 4]))

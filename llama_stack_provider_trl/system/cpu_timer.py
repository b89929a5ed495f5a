"""Has the kernel end this process where one of its threads, or all of them, take too much CPU time, whatever they do.

An exception that is raised in a thread, and the handler of a signal, wait for its next bytecode: one call of C code,
such as the division of two numbers of a million digits, ends years later, and holds the interpreter's lock meanwhile.
Only the default action of a signal ends it. Linux only: elsewhere there is no timer of CPU time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from functools import cache

from .process import usable_cpus

ENDED_BY = signal.SIGVTALRM
"""The signal whose default action ends the process: nothing else here sends it."""
_CLOCK_PROCESS_CPUTIME_ID, _CLOCK_THREAD_CPUTIME_ID = 2, 3
_SIGEV_SIGNAL = 0


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class CpuTimer:
    """Ends this process after so many seconds of CPU time of the thread that creates it, unless `cancel` is called
    before, or nothing refers to it any more. A fork has no timers. Raises OSError: the kernel has none.

    The kernel has a number of them for each user (RLIMIT_SIGPENDING), which the code of one job can take for itself.
    Then the one timer that each process has without them counts the time of all its threads, to the first end of these.

    Args:
        of_all: of all threads, as many times as many seconds as this process has cores: others may compute meanwhile.
    """

    def __init__(self, seconds: float, *, of_all: bool = False) -> None:
        self._timer: ctypes.c_void_p | None = None
        self._ends: float | None = None
        """In CPU time of the process, where the kernel has no timer left."""
        if (library := _library()) is None:
            return
        timer = ctypes.c_void_p()
        event = _SigEvent(signo=ENDED_BY, notify=_SIGEV_SIGNAL)
        clock = _CLOCK_PROCESS_CPUTIME_ID if of_all else _CLOCK_THREAD_CPUTIME_ID
        seconds *= usable_cpus() if of_all else 1
        if library.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)):
            if (number := ctypes.get_errno()) != errno.EAGAIN:
                raise OSError(number, "no timer of CPU time can be created")
            self._ends = time.process_time() + (seconds if of_all else seconds * usable_cpus())
            _arm(add=self._ends)
            return
        self._timer = timer
        wanted = _TimerSpec(value_s=int(seconds), value_ns=int(seconds % 1 * 1e9) or 1)
        library.timer_settime(timer, 0, ctypes.byref(wanted), None)

    def cancel(self) -> None:
        """Let the process live."""
        if self._timer is not None and (library := _library()) is not None:
            library.timer_delete(self._timer)
            self._timer = None
        if self._ends is not None:
            _arm(remove=self._ends)
            self._ends = None

    def __enter__(self) -> None:
        """End the process where the block does not end in time."""

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        """One that an exception has kept from being cancelled would end the process later."""
        self.cancel()


class _Ends:
    """When the blocks of this process without a timer of their own end, in CPU time of the process."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Forget those of another process."""
        self.all: list[float] = []
        self.lock = threading.RLock()
        """Reentrant: `__del__` may be called in the thread that has it."""


_ends = _Ends()


def _arm(*, add: float | None = None, remove: float | None = None) -> None:
    with _ends.lock:
        if add is not None:
            _ends.all.append(add)
        if remove in _ends.all:  # else it is that of a process whose fork this is
            _ends.all.remove(remove)
        found: list[float] | None = None
        while found != _ends.all:  # a collection may have cancelled one meanwhile
            found = [*_ends.all]
            left = max(0.001, min(found) - time.process_time()) if found else 0
            signal.setitimer(signal.ITIMER_VIRTUAL, left)


@cache
def _library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)

"""Ends what the servers of a pytest process have left, where that was killed: a service runs in a session of its own,
and its trainings survive it on purpose.

    watch(root)    # before a server is started whose files are below `root`

A process of its own waits for the end of the pytest process. Then it kills all whose environment names a watched
directory, until there are none. Before that it does nothing, so it changes nothing of what tests kill and find. On
Linux only; elsewhere nothing is watched.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from llama_stack_provider_trl.system.process import RUN_DIR_MARK

MARKS = (RUN_DIR_MARK, "TRL_LOCK_DIR", "TRL_SERVICE_DATA_DIR", "TRL_OUTPUT_DIR")
"""Variables of servers and of their tasks that name a directory."""
_ROUNDS = 100
_PAUSE_S = 0.1
_QUIET_ROUNDS = 3
"""Without a process that is left, before all are gone: one may have started another meanwhile."""


def watch(root: Path) -> None:
    if sys.platform == "linux":
        os.write(_guard(os.getpid()), os.fsencode(root.resolve()) + b"\0")


def left(roots: Sequence[Path]) -> list[int]:
    """Processes whose environment names a directory of one of these."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
            named = (os.fsdecode(one).partition("=") for one in variables)
            places = [Path(value) for variable, _, value in named if variable in MARKS]
            if any(place.is_relative_to(root) for place in places for root in roots):
                found.append(int(name))
    return found


@cache
def _guard(pid: int) -> int:
    """The pipe to the guard of this process, which closes with it."""
    reader, writer = os.pipe()
    # In a session of its own, which a signal to the group of pytest does not reach; and no child of it.
    subprocess.run(
        [sys.executable, "-m", "tests.left_behind", str(pid)],
        stdin=reader,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
        check=True,
    )
    os.close(reader)
    return writer


def _watched(pid: int) -> list[Path]:
    """The directories that were written into standard input, once a process has ended. They are read at once: a pipe
    that is full would stop the process."""
    data = b""
    os.set_blocking(0, False)  # a fork of pytest may have the other end, too
    waited = [0]
    with suppress(ProcessLookupError):
        waited.append(os.pidfd_open(pid))
        while waited[-1] not in (readable := select.select(waited, [], [])[0]):
            chunk = os.read(0, 1 << 16) if 0 in readable else b""
            data += chunk
            waited = waited if chunk else waited[-1:]
    with suppress(BlockingIOError):
        while chunk := os.read(0, 1 << 16):
            data += chunk
    return [Path(os.fsdecode(one)) for one in dict.fromkeys(data.split(b"\0")[:-1])]


def _kill(roots: Sequence[Path]) -> None:
    quiet = 0
    for _ in range(_ROUNDS):
        pids = left(roots)
        quiet = 0 if pids else quiet + 1
        if quiet == _QUIET_ROUNDS:
            return
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__" and os.fork() == 0:
    _kill(_watched(int(sys.argv[1])))

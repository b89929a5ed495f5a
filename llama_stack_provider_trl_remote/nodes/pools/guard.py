"""Runs an agent for as long as its starter exists: then everything that the agent has started is ended, too.

Trainings survive their agent, and Ray ends none of them where a raylet, its GCS or a driver dies. So this process is
between them: it leaves the process tree of its starter, adopts what its own descendants orphan, and reads standard
input. A line `leave` has the agent leave; the end of the input means that the starter has ended, in whatever way.

    python -m llama_stack_provider_trl_remote.nodes.pools.guard '{"home": DIRECTORY, "command": [...]}'

Writes one line of JSON at the end: {"status": exit status of the agent, "message": its last line}.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from llama_stack_provider_trl.system.owned_paths import own_directory
from llama_stack_provider_trl.system.process import (
    FileLock,
    become_subreaper,
    children_of,
    descendants,
    reap,
    terminate,
)

LOCK = "guard.lock"
OUTPUT = "agent.out"
LEAVE = "leave"
_POLL = 0.5
"""Seconds between two polls of the agent."""
_REAPED = 20
"""Polls of the agent between two at which ended children are reaped."""
_PAUSE = 2.0
"""Seconds before an agent that a signal has ended is started again."""


class Guard:
    """One agent, started again where a signal has ended it: its trainings continue with the next one.

    Args:
        home: directory of the agent; created, and removed at the end.
    """

    def __init__(self, home: Path, command: list[str]) -> None:
        self.home, self.command = home, command
        self.starter_ended = threading.Event()
        self._leaving = False
        self._agent: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Held to start an agent, and to have it leave: none is started after that."""

    def read_orders(self) -> None:
        """Follow standard input until its end."""
        for line in sys.stdin:
            if line.strip() == LEAVE:
                with self._lock:
                    self._leaving = True
                    if self._agent is not None:
                        self._agent.send_signal(signal.SIGUSR1)  # an agent that has just been started ends of it
        self.starter_ended.set()

    def run(self) -> int:
        """Returns the exit status of the agent; -15: it was ended since the starter has ended."""
        own_directory(self.home)
        with (self.home / OUTPUT).open("ab") as output:
            while True:
                with self._lock:
                    if self._leaving:
                        return 0
                    self._agent = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                status = self._wait()
                if status == -signal.SIGUSR1:
                    return 0
                if status >= 0 or self.starter_ended.wait(_PAUSE):
                    return status

    def _wait(self) -> int:
        assert self._agent is not None
        polls = 0
        while (status := self._agent.poll()) is None:
            if self.starter_ended.wait(_POLL):
                return -signal.SIGTERM
            polls += 1
            if polls % _REAPED == 0:
                for pid in children_of(os.getpid()):
                    if pid != self._agent.pid:
                        reap(pid)
        return status

    def end(self) -> str:
        """End every descendant, and remove the directory. Returns the last line of the agent."""
        terminate(lambda: descendants(os.getpid()))
        lines = []
        with suppress(OSError):
            lines = (self.home / OUTPUT).read_text(errors="replace").strip().splitlines()
        shutil.rmtree(self.home, ignore_errors=True)
        return lines[-1][:500] if lines else ""


def remove_left(parent: Path) -> None:
    """Remove the directories of guards of this machine that were killed."""
    for home in parent.glob("*"):
        lock = FileLock(home / LOCK)
        with suppress(OSError):
            if (home / LOCK).exists() and lock.holder().endswith(f" {_boot()}") and lock.acquire(_holder()):
                shutil.rmtree(home, ignore_errors=True)
                lock.release()


def _boot() -> str:
    """This machine since its start. A directory on a disk that others share may be theirs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _holder() -> str:
    return f"process {os.getpid()} of {os.uname().nodename} {_boot()}"


def main(arguments: list[str]) -> int:
    """See the module."""
    request = json.loads(arguments[0])
    if os.fork():  # the first process ends: a starter that is killed may take its children along
        return 0
    os.setsid()
    become_subreaper()
    home = Path(request["home"])
    guard = Guard(home, request["command"])
    lock = FileLock(home / LOCK)
    status, message = 1, ""
    try:
        own_directory(home)
        remove_left(home.parent)
        if not lock.acquire(_holder()):
            raise OSError(f"{home} is used by {lock.holder()}")
        threading.Thread(target=guard.read_orders, daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: guard.starter_ended.set())
        status = guard.run()
    except OSError as error:
        message = f"{os.uname().nodename}: {error}"
    finally:
        if lock.held:
            message = guard.end() or message
    with suppress(OSError):  # the starter has ended
        print(json.dumps({"status": status, "message": message}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

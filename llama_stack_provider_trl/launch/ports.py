"""Rendezvous ports of this machine: which ones are free, and which one a task was given."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from pathlib import Path

from ..system.beneath import NotAFile
from ..system.files import RunDir
from .runner import RunnerTask
from .torchrun import LOOPBACK, MASTER_PORT

FIRST_PORT = 29500
PORTS = 100
"""Ports of a range: the number of jobs of several ranks that can train on this machine at a time."""


class PortRange:
    """The `MasterPorts` of this machine: `count` ports from `first` on."""

    def __init__(self, first: int = FIRST_PORT, count: int = PORTS) -> None:
        self._first = first
        self._count = count

    def choose(self, run_dirs: Iterable[Path]) -> tuple[int, int]:
        """See `MasterPorts.choose`."""
        given = (given_port(run_dir) for run_dir in run_dirs)
        port = free_port(self._first, self._count, {port for port in given if port is not None})
        return port, self._first + self._count - 1


def given_port(run_dir: Path) -> int | None:
    """The rendezvous port of a task, open or not; None: the task has none."""
    try:
        arguments = RunnerTask.read(RunDir(run_dir).task).argv
    except (FileNotFoundError, NotAFile):
        return None
    return next((int(part.removeprefix(MASTER_PORT)) for part in arguments if part.startswith(MASTER_PORT)), None)


def free_port(first: int, count: int, taken: Collection[int]) -> int:
    """The first port of `first ... first + count - 1` that is not `taken` and that no process listens on. Raises
    OSError: all of them are in use."""
    for port in range(first, first + count):
        if port not in taken and _can_listen(port):
            return port
    raise OSError(
        f"every port from {first} to {first + count - 1} is in use; set master_port to the first of {count} free ones"
    )


def _can_listen(port: int) -> bool:
    # torch's own store listens on every address, which macOS permits beside a listener on one of them.
    return all(_can_bind(host, port) for host in (LOOPBACK, ""))


def _can_bind(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As in torch's store, a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

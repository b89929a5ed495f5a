"""Ports on which a process of a test will listen later."""

from __future__ import annotations

import atexit
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

_FIRST, _COUNT = 21000, 7000
"""Below those that the kernel gives to connections (32768 and more on Linux, 49152 and more on macOS): of these it may
give one to another process that was free a moment ago."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nothing listens on, and that no other test of this machine's user gets in the block."""
    for port in range(_FIRST, _FIRST + _COUNT):
        path = Path(tempfile.gettempdir()) / f"trl-test-port-{os.getuid()}-{port}"
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as lock:
            if _is_ours(lock, port):
                yield port
                return
    raise AssertionError(f"no port of {_FIRST} to {_FIRST + _COUNT - 1} is free")


_of_this_process = ExitStack()
atexit.register(_of_this_process.close)


def free_port() -> int:
    """As `reserved_port`, until this process ends: for servers that start again on their port."""
    return _of_this_process.enter_context(reserved_port())


def _is_ours(lock: TextIO, port: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:  # another test has it, or another program listens on it
        return False
    return True

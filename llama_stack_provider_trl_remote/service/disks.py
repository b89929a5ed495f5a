"""The state of the disks that the service writes to, for callers that may not wait for a disk.

A disk of another machine (NFS) that hangs holds every call to it for as long as it hangs. So a thread of its own
examines the disks, and whoever asks gets what it has found, or for how long it has waited. It writes, too: a file
system that is frozen, or has stopped after an error, looks writable until something is written.
"""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llama_stack_provider_trl.errors import is_exhausted
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.files import try_to_write

from .space import Space, Use

_EVERY = 1.0
"""Seconds between two examinations; one takes 0.3 ms."""
_WRITTEN_EVERY = 20.0
"""Seconds between two writes to each directory: one takes 7 to 16 ms of a disk, of eight directories on it 0.1 s. After
a failure they are repeated with each examination, since that shows at once when it is over."""
_HANGS = 5.0
"""Seconds without an answer after which a disk is reported: a busy one may take some."""
_TEMPORARY = 1 << 20
"""Bytes that must be free for temporary files."""


class _Examined(NamedTuple):
    what: str
    directory: Callable[[], Path]
    use: Use | None
    """None: temporary files, which need a little space."""
    consequence: str
    required: bool = False
    """Whether it exists from the start of the service on; others are created when they are needed."""


class DiskWatch:
    """Examines and writes to the disks of the data directory, of its parts that lie on others, of other directories for
    checkpoints, and of temporary files."""

    def __init__(
        self,
        space: Space,
        data_dir: Path,
        checkpoint_roots: Iterable[Path] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space, self._clock = space, clock
        own = DataDir(data_dir)
        self._disks = (
            _Examined("the data directory", lambda: own.root, Use.ordered, "nothing new is accepted", True),
            _Examined("uploaded rows", lambda: own.datasets, Use.ordered, "no rows are accepted", True),
            _Examined("checkpoints", lambda: own.checkpoints, Use.checkpoint, "jobs cannot save"),
            _Examined("run directories", lambda: own.jobs, Use.report, "jobs cannot start"),
            _Examined("the token cache", lambda: own.tokens, Use.checkpoint, "jobs may fail"),
            _Examined("the reference cache", lambda: own.reference, Use.checkpoint, "jobs may fail"),
            *(
                _Examined("a directory of checkpoint_roots", partial(Path, root), Use.checkpoint, "no job saves there")
                for root in checkpoint_roots
            ),
            # The first call of `gettempdir` writes to the directory.
            _Examined("temporary files", lambda: Path(tempfile.gettempdir()), None, "jobs may fail"),
        )
        self._stopping = threading.Event()
        self._problem: str | None = None
        self._write_at = -float("inf")
        self._waiting: tuple[_Examined, float] | None = None
        """The disk that is being examined, and since when."""

    def start(self) -> None:
        """Examine the disks until `stop`, in a thread that ends with the process."""
        threading.Thread(target=self._watch, name="trl-disks", daemon=True).start()

    def stop(self) -> None:
        """Examine nothing more; waits for no disk."""
        self._stopping.set()

    def problem(self) -> str | None:
        """Why something cannot be stored, and what to do, as of a second ago; None: all can. Never waits.

        Names no path: any program may ask.
        """
        if (waiting := self._waiting) is not None and (seconds := self._clock() - waiting[1]) >= _HANGS:
            check = "check it, or the machine and the network that it is mounted from"
            return _sentence(waiting[0], f"has not answered for {seconds:.0f} s: {check}")
        return self._problem

    def examine(self) -> None:
        """Examine each disk; takes as long as they do."""
        problem, failed = None, False
        is_due = self._clock() >= self._write_at
        for disk in self._disks:
            self._waiting = disk, self._clock()
            found = self._examined(disk)
            if found is None and is_due:
                found = self._tried(disk)
                failed |= found is not None
            problem = problem or found
        if is_due and not failed:
            self._write_at = self._clock() + _WRITTEN_EVERY
        self._waiting, self._problem = None, problem

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self.examine()
            self._stopping.wait(_EVERY)

    def _examined(self, disk: _Examined) -> str | None:
        try:
            directory = disk.directory()
            # A link that leads nowhere: the disk that it names is not mounted.
            if not directory.exists() and (disk.required or directory.is_symlink()):
                name = disk.what if "directory" in disk.what else f"the directory of {disk.what}"
                return f"{name} is missing: move it back, or mount its disk; until then {disk.consequence}"
            if disk.use is None:
                self._space.require(Use.report, directory, _TEMPORARY, 0)
            else:
                self._space.require(disk.use, directory)
        except OSError as error:
            return _sentence(disk, _state(error, "examined"))
        return None

    def _tried(self, disk: _Examined) -> str | None:
        """Why nothing can be written to a directory, or to the one that it will be created in."""
        try:
            directory = disk.directory()
            while not directory.exists():
                directory = directory.parent
            try_to_write(directory)
        except OSError as error:
            return None if is_exhausted(error) else _sentence(disk, _state(error, "written to"))
        return None


def _state(error: OSError, done: str) -> str:
    match error.errno:
        case errno.EROFS:
            return "is read-only: make it writable again (the kernel's log has the reason)"
        case errno.ENOSPC | errno.EDQUOT:
            return "is full: free some space"
        case _:
            return f"cannot be {done} ({error.strerror}): check it (the kernel's log has the reason)"


def _sentence(disk: _Examined, state: str) -> str:
    return f"the disk of {disk.what} {state}; until then {disk.consequence}"

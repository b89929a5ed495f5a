"""Serves files of checkpoints: found by identifier, listed with digests, never from outside the checkpoint's
directory."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.checkpoint_files import is_directory
from llama_stack_provider_trl.stack.responses import checkpoint_response
from llama_stack_provider_trl.system.files import file_names, open_in, open_regular, resolve_under
from llama_stack_provider_trl.system.offload import CallThreads

from ...wire import GIVEN
from ..http.bodies import CheckpointFile, CheckpointFiles
from ..http.errors import NotFound, OutOfRange

_REMEMBERED = 10_000
_PIECE = 1 << 20

Opener = Callable[[], BinaryIO]


class Digests:
    """Caches the sha256 of files for as long as size and time stay the same. Safe to share between threads."""

    def __init__(self) -> None:
        # Separate threads: reading the weights of a large model takes minutes, and other calls need threads meanwhile.
        self.threads = CallThreads(2, "trl-digests")
        self._closed = False
        self._known: OrderedDict[tuple[int, int, int, int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> tuple[int, str]:
        """Size and sha256 of a file. Raises OSError."""
        with open_regular(path) as file:
            return self.of_file(file)

    def of_file(self, file: BinaryIO) -> tuple[int, str]:
        """Size and sha256 of an open file."""
        return self.of_beginning(file, os.fstat(file.fileno()).st_size)

    def of_beginning(self, file: BinaryIO, size: int) -> tuple[int, str]:
        """`size`, and the sha256 of so many bytes of an open file."""
        status = os.fstat(file.fileno())
        # Not cached by its path: an upload is read once, and then moved to its place.
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, size)
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = self._sha256(file, size)
            with self._lock:
                self._known[key] = known
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return size, known

    def close(self) -> None:
        """Stop the threads. A digest under way ends with an OSError."""
        self._closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _sha256(self, file: BinaryIO, size: int) -> str:
        file.seek(0)
        digest = hashlib.sha256()
        while piece := file.read(min(_PIECE, size)):
            size -= len(piece)
            if self._closed:
                raise OSError("the service stops")
            digest.update(piece)
        return digest.hexdigest()


def list_files(store: Store, digests: Digests, job_uuid: str, identifier: str) -> CheckpointFiles:
    """Every file of a checkpoint. Raises NotFound."""
    shown_as, checkpoint = _find(store, job_uuid, identifier)
    files = []
    for relative in file_names(checkpoint):
        with open_in(checkpoint.parent, Path(checkpoint.name, relative)) as file:
            size, sha256 = digests.of_file(file)
        files.append(CheckpointFile(path=relative, size=size, sha256=sha256))
    if not files:
        raise NotFound(f"the directory of checkpoint {shown_as!r} is gone: {checkpoint}")
    return CheckpointFiles(identifier=shown_as, path=str(checkpoint), files=files)


def find_file(store: Store, digests: Digests, job_uuid: str, identifier: str, relative: str) -> tuple[Opener, int, str]:
    """Resolve a file of a checkpoint: a function that opens it, its size and its sha256.

    The function never follows a symbolic link out of the job's checkpoints: a training may create one at any time.
    Raises InvalidRequest: the path leads out of the checkpoint; NotFound.
    """
    shown_as, checkpoint = _find(store, job_uuid, identifier)
    try:
        resolve_under(checkpoint, relative)
        opener = partial(open_in, checkpoint.parent, Path(checkpoint.name, relative))
        with opener() as file:
            return opener, *digests.of_file(file)
    except (OSError, RuntimeError):  # a name too long for the file system, a loop of links, no regular file, or missing
        pass
    raise NotFound(f"checkpoint {shown_as!r} has no file {relative!r}: GET .../checkpoints/{shown_as} lists its files")


def requested_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte of a Range header and the one behind its last; None: the whole file.

    A header without a range of bytes, or with several, is ignored, as HTTP requires. Raises OutOfRange.
    """
    found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", (header or "").replace(" ", ""))
    if not found or found[1] == found[2] == "":
        return None
    if not found[1]:
        start, stop = max(0, size - int(found[2])), size
    else:
        start, stop = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        if found[2] and int(found[2]) < start:
            return None
    if start >= size:
        raise OutOfRange(size)
    return start, stop


def _find(store: Store, job_uuid: str, identifier: str) -> tuple[str, Path]:
    """A checkpoint by its identifier, or by the name of its directory: `final`, `merged`, `checkpoint-10`."""
    job = store.get(job_uuid)
    given = job.spec.resume_from
    if identifier == GIVEN and given is not None and given.path is not None:
        return GIVEN, given.path
    listed = {checkpoint_response(job, record).identifier: record for record in store.checkpoints(job_uuid)}
    for shown_as, record in listed.items():
        if identifier in (shown_as, record.path.name):
            if not is_directory(record.path):  # the training may have put a symbolic link there
                raise NotFound(f"the directory of checkpoint {shown_as!r} is gone: {record.path}")
            return shown_as, record.path
    names = ", ".join(listed) or ("none" if job.state in TERMINAL else "none yet")
    raise NotFound(f"job {job_uuid!r} has no checkpoint {identifier!r}; its checkpoints: {names}")

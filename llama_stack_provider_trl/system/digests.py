"""sha256 of large files, computed once and kept for as long as a file does not change."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .files import atomic_write, read_regular

log = logging.getLogger(__name__)
_REMEMBERED = 20_000
_PIECE = 1 << 20


class KeptDigests:
    """Digests by device, inode, size and times of a file, in a file that outlives this process. Safe to share between
    threads.

    Args:
        path: of that file; its directory exists before the first digest is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._closed = False

    def of(self, file: BinaryIO, note: Callable[[int], None] = lambda size: None) -> str:
        """sha256 of an open file. Raises OSError: it cannot be read, or `close` was called. `note` receives the number
        of bytes of each part that was read; all of them where the digest is known."""
        status = os.fstat(file.fileno())
        # The time of a change of the inode too: unlike the time of its content, no program can set it.
        key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
        if (found := self._find(key)) is not None:
            note(status.st_size)
            return found
        digest = hashlib.sha256()
        while piece := file.read(_PIECE):
            if self._closed:
                raise OSError("this process stops")
            digest.update(piece)
            note(len(piece))
        self._keep(key, digest.hexdigest())
        return digest.hexdigest()

    def close(self) -> None:
        """Have a digest under way end with an OSError."""
        self._closed = True

    def _find(self, key: str) -> str | None:
        with self._lock:
            if key not in self._known:  # another process may have computed it
                self._known |= self._stored()
            return self._known.get(key)

    def _stored(self) -> dict[str, str]:
        try:
            return {str(key): str(value) for key, value in json.loads(read_regular(self._path)).items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def _keep(self, key: str, digest: str) -> None:
        with self._lock:
            self._known |= self._stored()
            self._known[key] = digest
            while len(self._known) > _REMEMBERED:
                self._known.pop(next(iter(self._known)))
            try:
                atomic_write(self._path, json.dumps(self._known).encode())
            except OSError as error:  # a full disk: the next process computes it again
                log.warning("digests of files cannot be kept: %s", error)

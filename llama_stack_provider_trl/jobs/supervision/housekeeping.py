"""Removes stored rows without a reference, and the files of interrupted uploads.

Rows are files named by their digest, and a request that is about to refer to some may find them stored already. So each
use touches the file, only files that were not touched for a long time are removed, and no job is added meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..store.store import Store

log = logging.getLogger(__name__)
INTERVAL = 3600.0
"""Seconds between two passes."""
ABANDONED = 86400.0
"""Seconds without a write after which a temporary file counts as abandoned."""
_TEMPORARY = re.compile(r"\.(rows-|incoming-|removed-|[0-9a-f]{64}\.).*")
_ASIDE = ".removed-"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def remove_unused_rows(directory: Path, store: Store, retention: float | None) -> list[str]:
    """Remove the rows that no job and no registered dataset refers to and that were not touched for a while. Raises
    StoreError: the database cannot be read: nothing is removed then; OSError: a file cannot be read or removed. Returns
    the digests of what was removed.

    Args:
        directory: `<data_dir>/datasets`.
        retention: seconds for which unused rows are kept; None: forever.
    """
    for path in directory.glob(".*"):
        if _TEMPORARY.fullmatch(path.name) and _seconds_untouched(path) > ABANDONED:
            _remove(path)
    if retention is None:
        return []
    old = {path.stem: path for path in directory.glob("*.jsonl") if _seconds_untouched(path) > retention}
    if not old or not old.keys() - _registered(directory) - store.digests():
        return []
    removed = []
    with store.no_new_jobs() as referred:
        for digest in sorted(old.keys() - _registered(directory) - referred):
            # Renamed first, checked afterwards: a request may have found and touched the file in between.
            aside = directory / f"{_ASIDE}{digest}"
            os.replace(old[digest], aside)
            if _seconds_untouched(aside) > retention:
                removed.append(digest)
            else:
                os.replace(aside, old[digest])
    for digest in removed:
        _remove(directory / f"{_ASIDE}{digest}")
        for verdict in directory.glob(f"{digest}.*.json"):
            _remove(verdict)
        store.rows.forget([digest])
        log.info("removed rows %s: not used for %.0f days", digest, retention / 86400)
    return removed


def _registered(directory: Path) -> set[str]:
    """Digests in the service's registry, damaged entries included."""
    found: set[str] = set()
    for path in directory.glob("registry/*"):  # with those that were damaged, and are set aside
        with suppress(FileNotFoundError, IsADirectoryError):  # a request has deleted it since it was listed
            found.update(_DIGEST.findall(path.read_text(errors="replace")))
    return found


def _seconds_untouched(path: Path) -> float:
    """Seconds since a file, or any file in a directory, was modified; 0 if it does not exist."""
    try:
        return time.time() - max(found.stat().st_mtime for found in _with_contents(path))
    except FileNotFoundError:
        return 0.0


def _with_contents(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from path.rglob("*")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

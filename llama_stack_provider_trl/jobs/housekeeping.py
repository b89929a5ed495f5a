"""Removes stored rows that nobody refers to any more, and what interrupted uploads have left.

Rows are files named by their digest, and who is about to refer to some may find them stored already. So whoever finds
them touches them, only what nobody has touched for a long time goes, and no job is added while it is taken away.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from .store import Store

log = logging.getLogger(__name__)
INTERVAL = 3600.0
"""Seconds between two looks."""
ABANDONED = 86400.0
"""Seconds after which nobody writes into a temporary file any more."""
_TEMPORARY = re.compile(r"\.(rows-|incoming-|removed-|[0-9a-f]{64}\.).*")
_TAKEN = ".removed-"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def remove_unused_rows(directory: Path, store: Store, retention: float | None) -> list[str]:
    """Remove the rows that no job and no registered dataset refers to and that were not touched for a while.

    Args:
        directory: `<data_dir>/datasets`.
        retention: seconds for which unused rows are kept; None: for ever.

    Returns:
        The digests of what was removed.

    Raises:
        StoreError: the database cannot be read: nothing is removed then.
        OSError: something cannot be looked at or removed.
    """
    for path in directory.glob(".*"):
        if _TEMPORARY.fullmatch(path.name) and _seconds_untouched(path) > ABANDONED:
            _remove(path)
    if retention is None:
        return []
    old = {path.stem: path for path in directory.glob("*.jsonl") if _seconds_untouched(path) > retention}
    if not old or not old.keys() - _registered(directory) - store.digests():
        return []
    taken = []
    with store.no_new_jobs() as referred:
        for digest in sorted(old.keys() - _registered(directory) - referred):
            # First out of reach, then looked at: somebody may have found and touched them this very moment.
            aside = directory / f"{_TAKEN}{digest}"
            os.replace(old[digest], aside)
            if _seconds_untouched(aside) > retention:
                taken.append(digest)
            else:
                os.replace(aside, old[digest])
    for digest in taken:
        _remove(directory / f"{_TAKEN}{digest}")
        for verdict in directory.glob(f"{digest}.*.json"):
            _remove(verdict)
        log.info("removed rows %s: nobody has referred to them for %.0f days", digest, retention / 86400)
    return taken


def _registered(directory: Path) -> set[str]:
    """Digests that the service's registry mentions; an entry that is damaged still counts."""
    return {digest for path in directory.glob("registry/*.json") for digest in _DIGEST.findall(path.read_text())}


def _seconds_untouched(path: Path) -> float:
    """Of a directory: since anything in it was; 0 for what is gone."""
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

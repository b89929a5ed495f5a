"""A digest of the code on disk that a process has imported: our own modules, and what is installed beside them."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_INSTALLED = (".dist-info", ".egg-info", ".egg-link", ".pth")
"""Ends of the entries that an installer creates, replaces and removes with a package."""
OWN = Path(__file__).absolute().parents[1]
"""Directory of our package."""


def searched(path: Sequence[str]) -> list[str]:
    """The directories of a `sys.path` that exist, and the interpreter: the argument of `digest`."""
    return [sys.executable, *dict.fromkeys(os.path.abspath(entry) for entry in path if os.path.isdir(entry))]


def digest(paths: Sequence[str], own: Path = OWN) -> str:
    """A digest of names, sizes and times. It takes 2 ms and reads no file.

    Args:
        paths: from `searched`.
    """
    found = hashlib.sha256()
    for entry in sorted((*_installed(paths), *_modules(own))):
        found.update(repr(entry).encode())
    return found.hexdigest()


type _Entry = tuple[str, int, int, int]


def _installed(paths: Sequence[str]) -> Iterator[_Entry]:
    for path in paths:
        try:
            if os.path.isdir(path):
                with os.scandir(path) as entries:
                    yield from (_entry(each.path) for each in entries if each.name.endswith(_INSTALLED))
            else:
                yield _entry(path)
        except OSError:  # removed meanwhile
            yield (path, 0, 0, 0)


def _modules(own: Path) -> Iterator[_Entry]:
    for directory, names, files in os.walk(own):
        names[:] = [name for name in names if name != "__pycache__"]
        yield from (_entry(os.path.join(directory, name)) for name in files)


def _entry(path: str) -> _Entry:
    try:
        found = os.stat(path)
    except OSError:
        return (path, 0, 0, 0)
    return (path, found.st_size, found.st_mtime_ns, found.st_ino)

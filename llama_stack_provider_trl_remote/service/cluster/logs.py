"""Logs that nodes send: without holes, and bounded, for any offset that a node names."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llama_stack_provider_trl.system.files import atomic_write_json

from ..http.errors import WrongOffset

LOG_BYTES = 128 << 20
"""Bytes of one log. A full log becomes `NAME.1`, in place of the one before: 256 MiB in all."""
_SKIPPED = "\n[{} bytes were left out: the node sent them too late]\n"
_ROTATED = "[earlier lines are in {}.1]\n"


def append_log(path: Path, offset: int, data: bytes) -> int:
    """Append a part of a node's log. Where it begins beyond the end of the log, a note counts the missing bytes.

    The node's offsets count the bytes of its own file; `.NAME.offset` keeps the difference to this one. Returns the
    byte of the node's file up to which the log is here.

    Raises:
        WrongOffset: it begins before that.
        OSError: the disk is full; nothing of `data` is kept.
    """
    file = _opened(path)
    try:
        size = os.fstat(file).st_size
        end = size + _difference(path)
        if offset < end:
            raise WrongOffset(offset, end)
        note = _SKIPPED.format(offset - end).encode() if offset > end else b""
        if size + len(note) + len(data) > LOG_BYTES:
            os.replace(path, path.with_name(f"{path.name}.1"))
            os.close(file)
            file, size = _opened(path), 0
            note = _ROTATED.format(path.name).encode() + note
        if note:
            write_all(file, size, note)
            size += len(note)
            atomic_write_json(_record(path), offset - size)
        write_all(file, size, data)
        return offset + len(data)
    finally:
        os.close(file)


def write_all(file: int, offset: int, data: bytes) -> None:
    """Append all of the data, or nothing where the disk fills up."""
    view, at = memoryview(data), offset
    try:
        while view:
            written = os.pwrite(file, view, at)
            view, at = view[written:], at + written
    except OSError:
        os.ftruncate(file, offset)
        raise


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _record(path: Path) -> Path:
    return path.with_name(f".{path.name}.offset")


def _difference(path: Path) -> int:
    """The number to add to the size of the file for the node's offset."""
    try:
        return int(json.loads(_record(path).read_text()))
    except FileNotFoundError:
        return 0

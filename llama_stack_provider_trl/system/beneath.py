"""Opens files below a directory so that no symbolic link, placed at any moment, leads out of it."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""O_NONBLOCK: opening a FIFO would otherwise wait for a writer."""
_SYS_OPENAT2 = 437
"""The same number on every architecture (Linux 5.6)."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_UNSUPPORTED = (errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.EINVAL)
"""Errors of an older kernel, or of a sandbox that does not know the call."""
_TRIES = 8
"""EAGAIN: a directory on the path was renamed during the call."""
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class NotAFile(OSError):
    """Raised when something other than a regular file has the name; the message names its kind."""


def open_beneath(root: Path, relative: Path) -> int:
    """A descriptor of the regular file `root / relative`, for reading.

    `root` itself may be reached through symbolic links; it belongs to the operator.

    Raises:
        NotAFile: it is a directory, a FIFO, a device or a socket.
        OSError: it cannot be opened. EXDEV or ELOOP: a symbolic link on the path leads out of `root`.
    """
    parts = relative.parts
    if relative.is_absolute() or not parts or ".." in parts:
        raise OSError(errno.EXDEV, "the path leads out of its directory", str(relative))
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file = _open_at_once(directory, relative)
        if file is None:
            file = _open_step_by_step(directory, parts)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise NotAFile(errno.EINVAL, "it is a socket, not a file", str(relative)) from error
        if error.errno in (errno.EXDEV, errno.ELOOP):
            raise OSError(error.errno, "a symbolic link leads out of its directory", str(relative)) from error
        raise
    finally:
        os.close(directory)
    try:
        _check_kind(file, relative)
    except OSError:
        os.close(file)
        raise
    return file


@contextmanager
def directory_beneath(root: Path, relative: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a directory below `root`, as `dir_fd` of what is then written there: no part of its path below
    `root` is a symbolic link, and what happens to the path later has no effect. Raises NotAFile: a part of the path is
    a symbolic link, or no directory; FileNotFoundError: it is missing; OSError: it cannot be opened or created."""
    if relative.is_absolute() or ".." in relative.parts:
        raise NotAFile(errno.EXDEV, "the path leads out of its directory", str(relative))
    current = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in relative.parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise NotAFile(errno.EINVAL, f"{part!r} is a symbolic link or a file", str(relative)) from error
                raise
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def path_of(file: int, otherwise: Path) -> Path:
    """The path without symbolic links of an open file, where the system reports it (Linux)."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{file}"))
    except OSError:
        return otherwise


def _check_kind(file: int, relative: Path) -> None:
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise NotAFile(errno.EINVAL, f"it is {kind}, not a file", str(relative))


def _open_at_once(directory: int, relative: Path) -> int | None:
    """By openat2, which follows links that stay beneath `directory`; None: the system does not have it."""
    if sys.platform != "linux":
        return None
    how = _OpenHow(_FLAGS, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_TRIES):
        file = int(
            _libc().syscall(_SYS_OPENAT2, directory, os.fsencode(relative), ctypes.byref(how), ctypes.sizeof(how))
        )
        if file >= 0:
            return file
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return None
        if number != errno.EAGAIN:
            raise OSError(number, os.strerror(number), str(relative))
    raise OSError(errno.EAGAIN, "directories on its path keep changing", str(relative))


def _open_step_by_step(directory: int, parts: tuple[str, ...]) -> int:
    """Component by component, following no symbolic link at all."""
    *parents, name = parts
    current = os.dup(directory)
    try:
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = below
        return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=current)
    finally:
        os.close(current)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    library.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    return library

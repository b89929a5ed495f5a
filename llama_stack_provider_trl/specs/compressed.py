"""Decompresses files of rows while they are read, with memory that does not depend on their size."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Buffer, Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple

from ..errors import InvalidRows

_BUFFER = 1 << 16


def _gzip(file: BinaryIO) -> Any:
    return gzip.GzipFile(fileobj=file)


def _zstd(file: BinaryIO) -> Any:
    with suppress(ImportError):  # Python 3.14
        return import_module("compression.zstd").ZstdFile(file)
    try:
        import pyarrow
    except ImportError as error:
        raise InvalidRows(
            "the file is compressed by zstd, which Python reads from 3.14 on, and before with pyarrow, which is not "
            "installed: run `pip install pyarrow`, or compress the file by gzip"
        ) from error
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(Borrowed(file), mode="r"), "zstd")


class Packing(NamedTuple):
    """A way to compress files."""

    name: str
    magic: bytes
    """First bytes of its files."""
    open: Callable[[BinaryIO], Any]
    """What a file has, as an object with `read`."""


PACKED = {
    ".gz": Packing("gzip", b"\x1f\x8b", _gzip),
    ".zst": Packing("zstd", b"\x28\xb5\x2f\xfd", _zstd),
}
"""By the last ending of a file's name."""


def decompressed(file: BinaryIO, ending: str) -> BinaryIO:
    """What a compressed file has. It may be read again from its beginning (`seek(0)`). Raises InvalidRows: the file is
    not compressed by that, or no library decompresses it. Reading: it is damaged or cut.

    Args:
        ending: of its name, a key of `PACKED`.
    """
    packing = PACKED[ending]
    found = packing_of(file)
    if found != ending:
        instead = "with its own ending" if found is None else f"with {found} in place of {ending}"
        raise InvalidRows(f"the file is not compressed by {packing.name}, as its name says: give it a name {instead}")
    content: BinaryIO = io.BufferedReader(_Decompressed(file, packing), _BUFFER)
    if packing_of(content) is not None:
        raise InvalidRows("the file is compressed twice: compress it once")
    return content


def packing_of(file: BinaryIO) -> str | None:
    """The key of `PACKED` by which a file is compressed, from its first bytes; None: by none of them."""
    start = file.read(max(len(one.magic) for one in PACKED.values()))
    file.seek(0)
    return next((ending for ending, one in PACKED.items() if start.startswith(one.magic)), None)


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, whose faults are those of its rows."""

    def __init__(self, file: BinaryIO, packing: Packing) -> None:
        self._file, self._packing = file, packing
        self._stream = packing.open(file)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if (offset, whence) != (0, io.SEEK_SET):
            raise io.UnsupportedOperation("a compressed file is read again from its beginning only")
        if self._position:
            self._file.seek(0)
            self._stream, self._position = self._packing.open(self._file), 0
        return 0

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        try:
            data = self._stream.read(len(view))
        except EOFError as error:
            raise self._damaged("it ends before its content does") from error
        except zlib.error as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            if error.errno is not None:  # of the disk
                raise
            raise self._damaged(str(error)) from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise self._damaged(str(error)) from error
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _damaged(self, found: str) -> InvalidRows:
        return InvalidRows(f"the file is damaged or cut ({self._packing.name}: {found}): copy or compress it again")


class Borrowed(io.RawIOBase):
    """A file that is not closed with the stream that reads it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

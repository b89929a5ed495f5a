"""A cache on disk of tokenized rows, which ranks, attempts, jobs and preflights of a machine map into memory.

`<data_dir>/tokens/<key>/rows.arrow` is an Arrow stream as `datasets` maps it, `entry.json` beside it has the report on
the rows and their number. A process that finds no entry writes it under a lock, in a directory of its own, and renames
that; others wait, and continue the work where the writer ends without a result. Of many rows an entry has a file for
each part of them, a shard: those that a killed writer has completed are kept (`shards`). Entries that were not used for
`KEEP_SECONDS` are removed, and the oldest ones beyond `KEEP_BYTES`. A process keeps the rows that it has mapped.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from datasets import Dataset
from datasets.table import ConcatenationTable, MemoryMappedTable

from ...errors import TrlError
from ...faults import reach
from ...system.files import atomic_write, free_bytes, open_regular, put_in_place, read_regular
from ...system.process import FileLock
from ...system.texts import json_digest
from .tables import schema

KEEP_SECONDS = 30 * 24 * 3600.0
KEEP_BYTES = 32 << 30
"""Four billion tokens with their labels."""
KEEP_SHARE = 0.2
"""Of the disk, which also holds checkpoints."""
_ABANDONED = 24 * 3600.0
"""Seconds without a change after which a directory of a killed writer is removed."""
_ROWS, _ENTRY = "rows.arrow", "entry.json"
_SHARD = "rows-{number:05}"
"""Of the files of a shard, without their endings: its rows, and what was stored with them."""
_BATCH_BYTES = 8 << 20
"""Of a record batch, of which a file has few: opening it reads the head of each."""
_POLL = 0.05
"""Seconds between two polls of a lock."""


@dataclass(frozen=True)
class CachedRows:
    rows: Dataset
    notes: dict[str, Any]
    """What was stored with them."""
    was_found: bool
    """False: this process has written them."""


class NotCached(Exception):
    """Raised where the disk does not hold an entry; the message is the reason."""


class Add(Protocol):
    """Adds a part of the rows to an entry; other processes that wait for it are shown the note."""

    def __call__(self, table: pa.Table, note: str = "") -> None: ...


class TokenCache:
    """The cache directory. Several processes may use it at a time.

    Args:
        directory: made when something is stored.
        waiting: called with the writer's note while another process writes what this one needs.
    """

    def __init__(self, directory: Path, min_free_bytes: int, waiting: Callable[[str], None]) -> None:
        self.directory, self._min_free_bytes, self._waiting = directory, min_free_bytes, waiting

    def get(self, key: str, columns: tuple[str, ...], write: Callable[[Add], dict[str, Any]]) -> CachedRows:
        """The entry of a key. Raises NotCached: the disk is full, or the directory cannot be used; the exceptions of
        `write`. `write` is called where there is none: it adds the rows, and returns the notes."""
        return self._get(key, columns, partial(self._write, key, columns, write))

    def get_sharded(
        self, key: str, columns: tuple[str, ...], count: int, write: Callable[[Shards], dict[str, Any]]
    ) -> CachedRows:
        """As `get`, of an entry that consists of `count` shards.

        Args:
            write: called where there is none: sees to it that all shards are there, and returns the notes. Those that
                it has completed stay where it is killed, and where it fails for another reason than the rows' own.
        """
        return self._get(key, columns, partial(self._write_shards, key, columns, count, write))

    def _get(self, key: str, columns: tuple[str, ...], write: Callable[[FileLock], None]) -> CachedRows:
        if found := self.find(key, columns):
            return found
        with self._locked(key) as lock:
            if found := self.find(key, columns):  # of the process that had the lock before
                return found
            write(lock)
            written = self.find(key, columns)
        if written is None:
            raise NotCached(f"{self.directory / key} cannot be read back")
        self._tidy(key)
        return CachedRows(written.rows, written.notes, was_found=False)

    def find(self, key: str, columns: tuple[str, ...]) -> CachedRows | None:
        """The entry of a key; None where there is none, or it is damaged."""
        path = self.directory / key
        try:
            entry = _read_entry(path / _ENTRY)
            if "shards" in entry:
                shards = enumerate(entry["shards"])
                tables = [_mapped(_shard(path, number, ".arrow"), shard, columns) for number, shard in shards]
                table = ConcatenationTable.from_tables(tables)
            else:
                table = _mapped(path / _ROWS, entry, columns)
            found = CachedRows(Dataset(table, fingerprint=key), dict(entry["notes"]), was_found=True)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            return None
        with suppress(OSError):  # of a disk that has become read-only
            os.utime(path)
        return found

    def write_shard(
        self, key: str, number: int, columns: tuple[str, ...], write: Callable[[Add], dict[str, Any]]
    ) -> None:
        """Write a shard of an entry that another process, or this one, is writing. Raises NotCached, and the exceptions
        of `write`. `write` adds the rows, and returns the shard's notes."""
        staging = self._staging(key)
        part = _shard(staging, number, f".{os.getpid()}.part")
        with self._own_disk():
            part.unlink(missing_ok=True)
        try:
            entry = self._write_rows(part, columns, write, lambda note: None)
            with self._own_disk():
                with open(part, "rb") as file:
                    os.fsync(file.fileno())
                reach(f"shard-{number}")
                part.rename(_shard(staging, number, ".arrow"))
                atomic_write(_shard(staging, number, ".json"), _entry_text(entry).encode())
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[FileLock]:
        """The lock of a key. Waits while another process has it."""
        lock = FileLock(self.directory / f"{key}.lock")
        with self._own_disk():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            while not lock.acquire(""):
                self._waiting(lock.holder())
                time.sleep(_POLL)
        try:
            yield lock
        finally:
            with suppress(OSError):
                lock.release()

    def _write(
        self, key: str, columns: tuple[str, ...], write: Callable[[Add], dict[str, Any]], lock: FileLock
    ) -> None:
        staging = self._staging(key)
        try:
            with self._own_disk():
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(mode=0o700)
            entry = self._write_rows(staging / _ROWS, columns, write, lock.describe)
            self._complete(key, entry)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _write_shards(
        self,
        key: str,
        columns: tuple[str, ...],
        count: int,
        write: Callable[[Shards], dict[str, Any]],
        lock: FileLock,
    ) -> None:
        staging = self._staging(key)
        try:
            with self._own_disk():
                shards = Shards(staging, columns, count, lock.describe)
                shards.clean()
            notes = write(shards)
            whole = shards.whole()
            if len(whole) != count:
                raise NotCached(f"{staging} cannot be read back")
            sizes = [{"rows": whole[number]["rows"], "bytes": whole[number]["bytes"]} for number in range(count)]
            self._complete(key, {"shards": sizes, "notes": notes})
        except (NotCached, TrlError):
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def _staging(self, key: str) -> Path:
        """Only the process with the lock, and its workers, use it."""
        return self.directory / f"{key}.tmp"

    def _write_rows(
        self,
        path: Path,
        columns: tuple[str, ...],
        write: Callable[[Add], dict[str, Any]],
        describe: Callable[[str], None],
    ) -> dict[str, Any]:
        with self._own_disk():
            rows = _RowFile(path, schema(columns), self.check_space)

        def add(table: pa.Table, note: str = "") -> None:
            with self._own_disk():
                rows.add(table)
            describe(note)

        try:
            notes = write(add)
            with self._own_disk():
                size = rows.close()
        except BaseException:
            rows.abandon()
            raise
        return {"rows": rows.count, "bytes": size, "notes": notes}

    def _complete(self, key: str, entry: dict[str, Any]) -> None:
        """Make an entry visible whose rows are written."""
        with self._own_disk():
            staging = self._staging(key)
            (staging / _ENTRY).write_text(_entry_text(entry))
            put_in_place(staging, self.directory / key)

    def check_space(self, size: int) -> None:
        """Return if the disk has room for so many bytes. Raises NotCached: it has less."""
        with self._own_disk():
            if free_bytes(self.directory) < self._min_free_bytes + size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def _own_disk(self) -> Iterator[None]:
        """While this is open, errors are those of the cache's disk."""
        try:
            yield
        except OSError as error:
            raise NotCached(f"{self.directory}: {error.strerror or error}") from error

    def _tidy(self, newest: str) -> None:
        """Remove what was not used for long, the oldest entries beyond the limit, and what killed writers left."""
        now, total, entries = time.time(), 0, []
        with suppress(OSError):
            limit = min(KEEP_BYTES, int(shutil.disk_usage(self.directory).total * KEEP_SHARE))
            for path in self.directory.iterdir():
                with suppress(OSError):  # another process has removed it
                    age = now - path.stat().st_mtime
                    if path.suffix == ".lock" and age > KEEP_SECONDS:
                        path.unlink()
                    elif path.suffix in (".tmp", ".old"):
                        last = max(file.stat().st_mtime for file in (path, *path.iterdir()))
                        if now - last > _ABANDONED:
                            shutil.rmtree(path, ignore_errors=True)
                    elif not path.suffix:
                        size = sum(file.stat().st_size for file in path.iterdir())
                        entries.append((path.name != newest, age, size, path))
            for is_older, age, size, path in sorted(entries):
                total += size
                if is_older and (total > limit or age > KEEP_SECONDS):
                    shutil.rmtree(path, ignore_errors=True)


class Shards:
    """The shards of an entry that is being written, some of which a killed process may have completed.

    Args:
        describe: shows others that wait for the entry how far it is.
    """

    def __init__(self, directory: Path, columns: tuple[str, ...], count: int, describe: Callable[[str], None]) -> None:
        self.directory, self.count, self.describe = directory, count, describe
        self._columns = columns

    def whole(self) -> dict[int, dict[str, Any]]:
        """Number -> rows, bytes and notes of each shard that is complete and undamaged."""
        found = {}
        for number in range(self.count):
            with suppress(OSError, pa.ArrowException, KeyError, TypeError, ValueError):
                entry = _read_entry(_shard(self.directory, number, ".json"))
                _mapped(_shard(self.directory, number, ".arrow"), entry, self._columns)
                found[number] = entry
        return found

    def clean(self) -> None:
        """Remove all but the whole shards. Raises OSError: the directory cannot be used."""
        if self.directory.is_symlink():
            self.directory.unlink()
        self.directory.mkdir(mode=0o700, exist_ok=True)
        kept = {_shard(self.directory, number, end).name for number in self.whole() for end in (".arrow", ".json")}
        for path in self.directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in kept:
                path.unlink()


def _shard(directory: Path, number: int, ending: str) -> Path:
    return directory / f"{_SHARD.format(number=number)}{ending}"


def _mapped(path: Path, entry: dict[str, Any], columns: tuple[str, ...]) -> MemoryMappedTable:
    """The rows of a file, mapped. Raises OSError, pa.ArrowException, ValueError: it is not what was written."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != entry["bytes"]:
        raise ValueError(f"{path} has {size} bytes, expected {entry['bytes']}")
    table = MemoryMappedTable.from_file(str(path))
    if not table.schema.equals(schema(columns)) or table.num_rows != entry["rows"]:
        raise ValueError(f"{path} has other rows than {entry['rows']} of {columns}")
    table.validate(full=True)  # no offset leads out of the mapped file
    return table


def _read_entry(path: Path) -> dict[str, Any]:
    """What `_entry_text` has written. Raises OSError, KeyError, TypeError, ValueError: it is damaged."""
    stored = json.loads(read_regular(path))
    entry: dict[str, Any] = stored["entry"]
    if stored["sha256"] != json_digest(entry):
        raise ValueError(f"{path} is not what was written")
    return entry


def _entry_text(entry: dict[str, Any]) -> str:
    return json.dumps({"entry": entry, "sha256": json_digest(entry)})


class _RowFile:
    """Collects tables, and writes large record batches."""

    def __init__(self, path: Path, of: pa.Schema, check_space: Callable[[int], None]) -> None:
        self._check_space = check_space
        self._file = open(path, "xb")  # noqa: SIM115  closed by `close` and `abandon`
        self._stream = pa.ipc.new_stream(self._file, of)
        self._tables: list[pa.Table] = []
        self._bytes = self.count = 0

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._bytes += table.nbytes
        self.count += len(table)
        if self._bytes >= _BATCH_BYTES:
            self._flush()

    def close(self) -> int:
        """Complete the file; returns its size."""
        self._flush()
        self._stream.close()
        self._file.flush()
        size = self._file.tell()
        self._file.close()
        return size

    def abandon(self) -> None:
        for closed in (self._stream, self._file):
            with suppress(OSError, pa.ArrowException):
                closed.close()

    def _flush(self) -> None:
        if self._tables:
            self._check_space(self._bytes)
            self._stream.write_table(pa.concat_tables(self._tables).combine_chunks())
        self._tables, self._bytes = [], 0

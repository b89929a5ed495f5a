"""The audit log: caller, action, address and result. Append-only, numbered without gaps, in rotated files.

A thread writes the lines, in the order in which they were submitted: a disk that hangs holds up the calls that wait for
their line, and nothing else. Each line is one `os.write` to a file opened with O_APPEND. A killed process leaves whole
lines and at most one torn one, which the next start removes. Lines are not forced to disk one by one: a kill loses
nothing that was written, and an fsync takes milliseconds where the write takes microseconds. A power cut may lose the
last lines. Actions of admins, starts, stops and each full file are forced to disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.store.tokens import PREFIX
from llama_stack_provider_trl.system.files import is_regular, set_aside
from llama_stack_provider_trl.system.in_order import InOrder

from .limits import Bucket

log = logging.getLogger(__name__)
WINDOW = 1.0
"""Seconds within which refusals of one kind are one line and a count."""
_BEGINNING = "audit-"
_TAIL = 1 << 16
"""Bytes at the end of a file within which its last line begins; lines are shorter than 4 KiB."""
_BURST, _PER_SECOND = 100.0, 1.0
"""Lines for the refusals of one caller, and of all unknown callers together: a flood takes about 25 MB a day."""
_REST_SECONDS = 10.0
"""Seconds between reports of the number of further refusals."""
_QUEUED = 1000
"""Lines that may wait for the disk while refusals add more: a few hundred KiB. Further refusals are counted."""
_SCANNED = 20_000
"""Lines that one page reads at most, however few of them match its filter."""

Line = dict[str, Any]


class AuditLog:
    """The files of one directory: `audit-<number of the first line>.jsonl`. One process writes; any process may read.

    Args:
        max_bytes: of one file.
    """

    def __init__(self, directory: Path, max_bytes: int, max_files: int, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._clock = clock
        self._writer = InOrder("trl-audit")
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0
        self._next = 1
        self._lost = 0
        self._forcing: threading.Thread | None = None
        """Forces full files to disk."""

    def open(self) -> int:
        """Continue the newest file, without its torn or damaged end. Returns the number of bytes cut off. Raises
        OSError."""
        self._writer.start()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.directory, 0o700)
        files = self._files()
        with self._lock:
            if not files:
                self._begin_file()
                self._force_directory()
                return 0
            path = files[-1]
            end, self._next = _last_whole(path)
            if not end and path.stat().st_size:  # no line of it is ours
                log.warning("%s holds no line of the audit log: it was set aside as %s", path, set_aside(path))
                self._begin_file()
                self._force_directory()
                return 0
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            cut = os.fstat(self._file).st_size - end
            if cut:
                os.ftruncate(self._file, end)
                os.fsync(self._file)
            self._size = end
            return cut

    def submit(self, event: str, of: Future[int | None] | None = None, **fields: Any) -> Future[int | None]:
        """Have the writer append one line; waits for nothing. Returns its number, once it is written; None: the file
        cannot be written, which the next line reports.

        Args:
            of: of an earlier line, whose number this one names.
        """
        return self._writer.submit(partial(self._write, event, self._clock(), of, fields))

    def write(self, event: str, **fields: Any) -> int | None:
        """As `submit`, and wait for the line."""
        return self.submit(event, **fields).result()

    @property
    def is_behind(self) -> bool:
        """Whether as many lines wait for the disk as may."""
        return self._writer.pending >= _QUEUED

    def _write(self, event: str, at: float, of: Future[int | None] | None, fields: Line) -> int | None:
        """A full disk must not keep an admin from deleting what fills it, so a failure is logged and not raised."""
        if of is not None:
            fields = {**fields, "of": of.result()}  # it has ended: one thread writes both
        with self._lock:
            if self._file is None:
                return None
            try:
                if self._lost:
                    self._append("lost", self._clock(), {"count": self._lost})
                    self._lost = 0
                return self._append(event, at, fields)
            except OSError as error:
                if not self._lost:
                    log.error("the audit log in %s cannot be written: %s", self.directory, error)
                self._lost += 1
                return None

    def sync(self) -> None:
        """Force written lines to disk. Lines can be written meanwhile: an fsync may take seconds."""
        with self._lock:
            forcing = self._forcing
            copy = None if self._file is None else os.dup(self._file)
        if forcing is not None:
            forcing.join()
        if copy is not None:
            self._force(copy)

    @property
    def last(self) -> int:
        """Number of the newest line; 0: there is none."""
        return self._next - 1

    def close(self) -> None:
        self._writer.drain()
        self.sync()
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def page(
        self, after: int = 0, limit: int = 100, caller: str | None = None, route: str | None = None
    ) -> tuple[list[Line], int]:
        """Lines with numbers above `after`, oldest first, and the number to continue after.

        That number is `after` itself where no more lines exist yet. A page may be empty and have more behind it, since
        a filter reads on. Raises StoreError: the files cannot be read.
        """
        found: list[Line] = []
        last = after
        try:
            for scanned, line in enumerate(self._lines(after)):
                if len(found) == limit or scanned == _SCANNED:
                    break
                last = line["seq"]
                if caller in (None, line.get("caller")) and route in (None, line.get("route")):
                    found.append(line)
        except OSError as error:
            raise StoreError(f"the audit log in {self.directory} cannot be read: {error}") from error
        return found, last

    def _append(self, event: str, at: float, fields: Line) -> int:
        number = self._next
        data = self._encoded(event, at, fields)
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        assert self._file is not None
        written = os.write(self._file, data)
        if written != len(data):
            os.ftruncate(self._file, self._size)
            raise OSError(f"only {written} of {len(data)} bytes could be written; is the disk full?")
        self._size += written
        self._next = number + 1
        return number

    def _encoded(self, event: str, at: float, fields: Line) -> bytes:
        moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"seq": self._next, "time": moment, "event": event}
        line |= {name: value for name, value in fields.items() if value not in (None, "", {})}
        return _utf8(line) + b"\n"

    def _rotate(self) -> None:
        """Begin the next file. Nothing is renamed, so a crash at any point leaves a complete log."""
        assert self._file is not None
        full = self._file
        self._begin_file()
        # Another thread, so that further lines need not wait for it.
        self._forcing = threading.Thread(target=self._force_full, args=(full, self._forcing), name="trl-audit")
        self._forcing.start()
        for path in self._files()[: -self._max_files]:
            path.unlink(missing_ok=True)

    def _begin_file(self) -> None:
        path = self.directory / f"{_BEGINNING}{self._next:012}.jsonl"
        if os.path.lexists(path):  # not ours: numbers are given once
            log.warning("%s was there already: it was set aside as %s", path, set_aside(path))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._size = 0

    def _force_full(self, file: int, before: threading.Thread | None) -> None:
        """Force a full file and the name of its successor to disk, after the files before it."""
        if before is not None:
            before.join()
        self._force(file)
        try:
            self._force_directory()
        except OSError as error:
            log.error("the audit log in %s cannot be forced to disk: %s", self.directory, error)

    def _force(self, file: int) -> None:
        """Force a file to disk, and close it."""
        try:
            os.fsync(file)
        except OSError as error:
            log.error("the audit log in %s cannot be forced to disk: %s", self.directory, error)
        finally:
            os.close(file)

    def _force_directory(self) -> None:
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _files(self) -> list[Path]:
        """Oldest first."""
        return sorted(filter(is_regular, self.directory.glob(f"{_BEGINNING}*.jsonl")), key=_first)

    def _lines(self, after: int) -> Iterator[Line]:
        files = self._files()
        # The file with line after + 1, and the later ones.
        begin = max((place for place, path in enumerate(files) if _first(path) <= after + 1), default=0)
        for path in files[begin:]:
            try:
                file = open(path, "rb")  # noqa: SIM115
            except FileNotFoundError:  # rotated away since the directory was listed
                continue
            with file:
                file.seek(_offset_behind(file, after))
                for raw in file:
                    line = _parsed(raw)
                    if line is not None and line["seq"] > after:
                        yield line


class Refusal(NamedTuple):
    """Fields that two refusals of the same kind share."""

    status: int
    caller: str
    role: str | None
    node: str | None
    address: str
    method: str
    route: str | None


class Refusals:
    """Writes refusals to a log, bounded.

    The first of a kind is written at once, and its repetitions within a second as a count. Beyond a budget per caller
    only the sum is written, so that a flood neither fills the disk nor displaces the history.

    Nothing waits for a line: where the disk hangs, refusals are counted until it answers.
    """

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._repeated: dict[Refusal, int] = {}
        self._budgets: dict[str, Bucket] = {}
        self._rest: Counter[tuple[int, str]] = Counter()
        self._rest_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, refusal: Refusal) -> None:
        if refusal in self._repeated:
            self._repeated[refusal] += 1
        elif not self._audit.is_behind and self._may_write(refusal):
            self._audit.submit("refused", **refusal._asdict())
            self._repeated[refusal] = 0
        else:
            self._count(refusal, 1)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._on_time)

    def flush(self, everything: bool = True) -> None:
        """Submit all counts that are due.

        Args:
            everything: also those that are due later, or while the disk hangs.
        """
        # Replaced before they are read: at the end of the service refusals are still added, in the event loop's thread.
        repeated, self._repeated = self._repeated, {}
        for refusal, count in repeated.items():
            if count and (everything or not self._audit.is_behind) and self._may_write(refusal):
                self._audit.submit("refused", **refusal._asdict(), count=count)
            elif count:
                self._count(refusal, count)
        is_due = self._clock() - self._rest_since >= _REST_SECONDS and not self._audit.is_behind
        if self._rest and (everything or is_due):
            rest, self._rest = self._rest, Counter()
            for (status, caller), count in rest.items():
                self._audit.submit("refused", status=status, caller=caller, count=count)

    def _on_time(self) -> None:
        self._timer = None
        self.flush(everything=False)
        if self._rest:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._on_time)

    def _may_write(self, refusal: Refusal) -> bool:
        # Names of known tokens only: an unknown caller has none, so there are few.
        budget = self._budgets.setdefault(refusal.caller, Bucket(_PER_SECOND, _BURST, self._clock))
        return not budget.take()

    def _count(self, refusal: Refusal, count: int) -> None:
        if not self._rest:
            self._rest_since = self._clock()
        self._rest[refusal.status, refusal.caller] += count


def _first(path: Path) -> int:
    """The number of a file's first line."""
    digits = path.stem.removeprefix(_BEGINNING)
    return int(digits) if digits.isdecimal() else 0


def _utf8(line: Any) -> bytes:
    """A line as JSON in UTF-8. Half of a surrogate pair, which a client may send as a name, becomes `?`: no answer
    could show it."""
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _parsed(raw: bytes) -> Line | None:
    """A parsed line; None: the line is torn or damaged."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
        if b"\\ud" in raw.lower():  # in a file that another program has changed: no answer could show half of a pair
            line = json.loads(_utf8(line))
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("seq"), int) else None


def _last_whole(path: Path) -> tuple[int, int]:
    """Offset at which the last whole line of a file ends, and the number of the line that follows it."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        for begin in (max(0, size - _TAIL), 0):  # the whole file only where its end is damaged, as by a power cut
            file.seek(begin)
            end, number = begin, None
            for raw in file:
                begin += len(raw)
                line = _parsed(raw)
                if line is not None:
                    end, number = begin, line["seq"] + 1
            if number is not None:
                return end, number
    return 0, _first(path)


def _offset_behind(file: BinaryIO, after: int) -> int:
    """Offset of the first line with a number above `after`: a binary search, since numbers ascend."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > _TAIL:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        start = file.tell()
        line = _parsed(file.readline())
        if line is None:
            break
        if line["seq"] <= after:
            low = start
        else:
            high = middle
    return low


_TOKEN = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{32,}")


def shortened(values: dict[str, Any], limit: int = 200) -> dict[str, Any]:
    """Names as a line holds them: client-chosen text is cut, so that no line grows beyond a few KiB, and a token in
    place of a name is masked."""
    return {
        name: value if isinstance(value, bool) else _TOKEN.sub(f"{PREFIX}[masked]", str(value))[:limit]
        for name, value in values.items()
        if value is not None
    }

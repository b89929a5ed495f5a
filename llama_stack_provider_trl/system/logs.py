"""The log of a service or an agent: to standard error and to files that rotate, without tokens."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Collection
from functools import partial
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from .console import indented, shown
from .data_dir import settle
from .files import private_directory
from .in_order import InOrder

LogLevel = Literal["debug", "info", "warning", "error"]
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FILE_BYTES, _FILES = 10 << 20, 5
"""Bytes of a file, and how many are kept besides the current one."""
_WAITING, _PATIENCE = 10_000, 5.0
"""Entries that may wait for the disk, and seconds that the end of a process waits for it."""
MOST_CHARACTERS = 8192
"""Of an entry: a longer one is cut in the middle."""
_TOKENS = re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",]+|\btrl_[A-Za-z0-9_-]{20,}")
_HIDDEN = "***"
_OTHERS = ("aiohttp", "asyncio", "urllib3", "uvicorn")
"""Loggers of libraries whose details stay out at the level debug: they log headers of requests."""


class RedactingFormatter(logging.Formatter):
    """Formats an entry without tokens, bounded, and as text that does nothing to a terminal.

    Only the first line of an entry begins without white space: a line break in a name, or in the message of an error,
    cannot make another entry.

    Args:
        secrets: values that never appear, such as the tokens of the configuration. Tokens that the service has created
            are recognized by their form.
    """

    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__(_FORMAT)
        # A short one, such as a test's, would hide parts of ordinary words.
        self._secrets = sorted((secret for secret in secrets if len(secret) >= 8), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        text = "\n".join(shown(line) for line in indented(super().format(record)))
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        text = _TOKENS.sub(lambda found: f"{found[1]} {_HIDDEN}" if found[1] else _HIDDEN, text)
        if len(text) > MOST_CHARACTERS:
            left = len(text) - MOST_CHARACTERS
            text = f"{text[: MOST_CHARACTERS // 2]} [{left} characters left out] {text[-MOST_CHARACTERS // 2 :]}"
        return text


class PrivateFileHandler(RotatingFileHandler):
    """Files that only their owner can read. A full disk loses entries, and stops nothing."""

    def __init__(self, path: Path, size: int = _FILE_BYTES, files: int = _FILES) -> None:
        settle(path.parent, "directory")
        private_directory(path.parent)
        for each in (path, *(path.with_name(f"{path.name}.{number}") for number in range(1, files + 1))):
            settle(each, "file")
        super().__init__(path, maxBytes=size, backupCount=files, encoding="utf-8", errors="backslashreplace")

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return TextIOWrapper(
            os.fdopen(os.open(self.baseFilename, flags, 0o600), "ab"), encoding=self.encoding, errors=self.errors
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """Report nothing of a full disk: a report would be an entry, too."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class FileWriter(logging.Handler):
    """Has a thread write entries to the file of another handler: a disk that hangs holds up nobody who logs."""

    def __init__(self, file: logging.Handler, most: int = _WAITING) -> None:
        super().__init__()
        self._file, self._most = file, most
        self._writer = InOrder("trl-log")
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._writer.pending >= self._most:
            self._lost += 1
            return
        if self._lost:
            lost = logging.makeLogRecord({**record.__dict__, "msg": f"{self._lost} entries were lost: the disk hung"})
            lost.args, lost.exc_info, lost.exc_text, lost.stack_info = (), None, None, None
            self._submit(lost)
            self._lost = 0
        self._submit(record)

    def _submit(self, record: logging.LogRecord) -> None:
        text = self.format(record)  # now: what it mentions may change
        self._writer.submit(partial(self._file.handle, logging.makeLogRecord({"msg": text})))

    def flush(self) -> None:
        """Wait for the file, unless its disk hangs: that must not keep a process from its end."""
        self._writer.drain(_PATIENCE)

    def close(self) -> None:
        self.flush()
        if not self._writer.pending:
            self._file.close()
        super().close()


class Unsent(logging.Handler):
    """Keeps the last entries until they were sent."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self._kept: deque[str] = deque(maxlen=most)
        self._number = 1
        """Of the first one that is kept."""
        self._changing = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        with self._changing:
            if len(self._kept) == self._kept.maxlen:
                self._number += 1
            self._kept.append(text)

    def first(self, most: int) -> tuple[int, tuple[str, ...]]:
        """The number of the first entry that was not sent (1: the first of all), and some entries from there on."""
        with self._changing:
            return self._number, tuple(self._kept)[:most]

    def sent(self, last: int) -> None:
        """Drop the entries up to number `last`."""
        with self._changing:
            while self._kept and self._number <= last:
                self._kept.popleft()
                self._number += 1


def start_logging(
    path: Path | None, level: LogLevel = "info", secrets: Collection[str] = (), unsent: Unsent | None = None
) -> None:
    """Log to standard error, and to the file `path` and its predecessors `path.1` to `path.5`. Raises OSError: the file
    cannot be created.

    Args:
        path: None: no file.
        level: the lowest level that is logged.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if path is not None:
        handlers.append(FileWriter(PrivateFileHandler(path)))
    if unsent is not None:
        handlers.append(unsent)
    formatter = RedactingFormatter(secrets)
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    for name in _OTHERS:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))

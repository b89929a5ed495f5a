"""The queue of a training's events to the service: every event once, in one order, across restarts of both ends.

The training's own event file is the queue, and the size of the service's file is the progress. Only the order has to be
stored, since events may overtake others: a checkpoint is announced when its files are with the service, and later
events do not wait. The final event of a job that answers prompts waits for its answers. `shipped.order` has one line
for each event that may be sent, with its position in the event file.
The line is written before the event is sent, so the service's file is always a prefix of this order.
"""

from __future__ import annotations

import errno
import json
import os
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.system.beneath import NotAFile
from llama_stack_provider_trl.system.files import open_regular, read_regular

from .localize import PathMap

ORDER = "shipped.order"
_FINAL = ("finished", "failed", "paused")
_PIECE = 1 << 20
_ORDER_BYTES = 1 << 30
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Open the order file. The training may replace it by a symbolic link or a FIFO."""


@dataclass(frozen=True)
class PendingEvent:
    """An event that waits: a checkpoint for its files, a final event for the checkpoints or answers before it."""

    start: int
    length: int
    event: dict[str, Any]

    @property
    def is_checkpoint(self) -> bool:
        return bool(self.event["type"] == "checkpoint")


class Outbox:
    """The events of one task. A new object, after a restart, continues at the same event.

    Args:
        paths: translates the paths in events. They must be the same after a restart.
    """

    def __init__(self, paths: PathMap) -> None:
        self._paths = paths
        self._events = paths.files.events
        self._order = paths.run_dir / ORDER
        self._starts, self._lengths, self._ends = array("q"), array("q"), array("q")
        """For each event that may be sent: its position in the event file, and its end in the sent bytes."""
        self._read = 0
        self._known: set[int] = set()
        self._pending: list[PendingEvent] = []
        self.has_finished = False
        self._recover()

    @property
    def size(self) -> int:
        """Bytes of all events that may be sent."""
        return self._ends[-1] if self._ends else 0

    @property
    def pending(self) -> tuple[PendingEvent, ...]:
        return tuple(self._pending)

    def read_events(self) -> None:
        """Read further whole lines of the event file. Raises OSError: the order cannot be stored (a full disk); the
        same lines are read again the next time."""
        ready: list[tuple[int, int]] = []
        pending: list[PendingEvent] = []
        read = self._read
        for start, line in self._lines(read):
            read = start + len(line)
            if start in self._known:
                self._notice(json.loads(line))
                continue
            event = json.loads(line)
            if self._waits(event, [*self._pending, *pending]):
                pending.append(PendingEvent(start, len(line), event))
            else:
                ready.append((start, len(line)))
                self._notice(event)
        self._append(ready)
        self._known = {start for start in self._known if start >= read}
        self._pending += pending
        self._read = read

    def release(self, uploaded: PendingEvent) -> None:
        """Release the event of an uploaded checkpoint, or of uploaded answers, and a final event that waits for none.
        Raises OSError: as `read_events`."""
        ready, left = [uploaded], [pending for pending in self._pending if pending is not uploaded]
        while left and not left[0].is_checkpoint:
            ready.append(left.pop(0))
        self._append([(pending.start, pending.length) for pending in ready])
        self._pending = left
        for pending in ready:
            self._notice(pending.event)

    def piece(self, offset: int, limit: int = _PIECE) -> bytes:
        """Bytes that the service's file lacks from `offset` on: about `limit`, up to the end of an event."""
        index = bisect_right(self._ends, offset)
        found = bytearray()
        with open_regular(self._events) as file:
            while index < len(self._starts) and len(found) < limit:
                line = self._paths.event(os.pread(file.fileno(), self._lengths[index], self._starts[index]))
                begin = self._ends[index] - len(line)
                found += line[max(0, offset - begin) :]
                index += 1
        return bytes(found)

    def _waits(self, event: dict[str, Any], pending: list[PendingEvent]) -> bool:
        kind = event.get("type")
        if kind == "checkpoint":
            return not self._paths.shared
        waits = bool(self._paths.answer_files) or any(other.is_checkpoint for other in pending)
        return kind in _FINAL and waits

    def _notice(self, event: dict[str, Any]) -> None:
        self.has_finished = self.has_finished or event.get("type") == "finished"

    def _lines(self, offset: int) -> list[tuple[int, bytes]]:
        try:
            with open_regular(self._events) as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return []
        found = []
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            found.append((offset, line))
            offset += len(line)
        return found

    def _append(self, spans: list[tuple[int, int]]) -> None:
        if not spans:
            return
        text = "".join(f"{start} {length}\n" for start, length in spans).encode()
        fd = os.open(self._order, _APPEND | os.O_CREAT, 0o600)
        try:
            before = os.fstat(fd).st_size
            if os.write(fd, text) != len(text):
                os.ftruncate(fd, before)
                raise OSError(errno.ENOSPC, "no space is left for the order of events", str(self._order))
        finally:
            os.close(fd)
        self._add(spans)

    def _add(self, spans: list[tuple[int, int]]) -> None:
        with open_regular(self._events) as file:
            for start, length in spans:
                line = self._paths.event(os.pread(file.fileno(), length, start))
                self._starts.append(start)
                self._lengths.append(length)
                self._ends.append(self.size + len(line))

    def _recover(self) -> None:
        """Restore the released events, and drop an incomplete last line."""
        try:
            data = read_regular(self._order, _ORDER_BYTES)
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            fd = os.open(self._order, _APPEND)
            try:
                os.ftruncate(fd, len(whole))
            finally:
                os.close(fd)
        spans = [(int(start), int(length)) for start, length in (line.split() for line in whole.splitlines())]
        self._known = {start for start, _ in spans}
        self._add(spans)


def first_failed(events: Path) -> dict[str, Any] | None:
    """The first `failed` event of a file: all that a node without rank 0 reports. None: there is none."""
    try:
        with open_regular(events) as file:
            lines = file.read().splitlines(keepends=True)
    except (FileNotFoundError, NotAFile):
        return None
    for line in lines:
        if line.endswith(b"\n") and (event := json.loads(line)).get("type") == "failed":
            return dict(event)
    return None

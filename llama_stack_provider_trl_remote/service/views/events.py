"""Serves a job's events from a cursor on: as pages, and as a stream of server-sent events.

A cursor is `<attempt>-<bytes>`: all events of earlier attempts, and those in the first so many bytes of this attempt's
`events.jsonl`. Only events that the store has ingested are shown. So a cursor means the same after any restart, and
events of an attempt never come after those of the next.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, StoreError, TrlError
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.records import EventFile
from llama_stack_provider_trl.jobs.store.row_mapping import metrics_of
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import LINE_BYTES, Evaluated, Event, Prepared, Progress, parse_event
from llama_stack_provider_trl.system.beneath import NotAFile
from llama_stack_provider_trl.system.files import RunDir, open_regular

from ..http.bodies import Derived, EventPoint

POLL_INTERVAL = 0.25
"""Seconds between two polls for new events."""
HEARTBEAT = 15.0
"""Seconds without an event after which a stream sends a keepalive comment."""
_PAGE = 500
_PIECE = 1 << 18
_CHUNK = 1 << 16
"""Bytes of a stream that are written to a connection at once: the memory that a slow reader costs."""
_SCANNED = 16 << 20
"""Bytes without any event that are skipped in one call."""
_KEPT_PAGES = 8
DELETED = "deleted"
"""State of a job that was deleted while a stream followed it."""


class Cursor(NamedTuple):
    attempt: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str | None, field: str) -> Cursor:
        """Parse the id of an event. Raises InvalidRequest."""
        if not text:
            return cls()
        found = re.fullmatch(r"(\d{1,9})-(\d{1,15})", text)
        if not found:
            raise InvalidRequest(field, text, "expected the id of an event, such as 1-2048, or nothing for all events")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def parse_all(cls, text: str | None, count: int, field: str) -> list[Cursor]:
        """Parse the id of an event of several jobs. Raises InvalidRequest."""
        if not text:
            return [cls()] * count
        parts = text.split("~")
        if len(parts) != count:
            hint = (
                f"expected the cursors of {count} jobs, with ~ between them, in the order in which they are requested"
            )
            raise InvalidRequest(field, text[:200], hint)
        return [cls.parse(part, field) for part in parts]

    def __str__(self) -> str:
        return f"{self.attempt}-{self.offset}"


class Line(NamedTuple):
    cursor: Cursor
    """Cursor behind this event."""
    text: str
    """The event as JSON."""
    event: Event


class Page(NamedTuple):
    lines: list[Line]
    state: JobState
    """State of the job, before the events were read."""
    next: Cursor
    """Cursor at which the following page begins."""
    is_last: bool
    """Whether nothing follows yet."""


def read_page(store: Store, job_uuid: str, after: Cursor, limit: int, size: int = _PIECE) -> Page:
    """Read the next events behind a cursor: at most `limit`, and about `size` bytes of each attempt.

    Lines that are no events are left out, as in the supervisor. Raises JobNotFound; InvalidRequest: the cursor is not
    one of this job's.
    """
    state, files = store.event_files(job_uuid, after.attempt)
    if after.attempt and (not files or files[0].attempt != after.attempt):
        raise InvalidRequest("after", str(after), f"job {job_uuid!r} has no attempt {after.attempt}")
    lines: list[Line] = []
    cursor = after
    for file in files:
        start = after.offset if file.attempt == after.attempt else 0
        more, stopped, whole = _read(file, start, limit - len(lines), size)
        lines += more
        cursor = Cursor(file.attempt, stopped) if stopped else cursor
        if not whole:
            return Page(lines, state, cursor, False)
    return Page(lines, state, cursor, True)


def read_back(store: Store, job_uuid: str, before: Cursor | None, limit: int) -> list[Line]:
    """Read the events before a cursor, the last one first: at most `limit`. Raises JobNotFound; InvalidRequest: the
    cursor is not one of this job's.

    Args:
        before: the cursor of an event, which is left out; None: all of them.
    """
    _, files = store.event_files(job_uuid)
    if before is not None and before.attempt not in {file.attempt for file in files}:
        raise InvalidRequest("after", str(before), f"job {job_uuid!r} has no attempt {before.attempt}")
    lines: list[Line] = []
    for file in reversed(files):
        if before is not None and file.attempt > before.attempt:
            continue
        is_last = before is not None and file.attempt == before.attempt
        end = before.offset if is_last and before is not None else file.end
        if end > file.end:
            raise _no_cursor(file, end)
        for line in _lines_back(file, end):
            if is_last and line.cursor == before:
                continue
            lines.append(line)
            if len(lines) == limit:
                return lines
    return lines


def _lines_back(file: EventFile, end: int) -> Iterator[Line]:
    """The events in the first `end` bytes of an attempt's file, the last one first."""
    try:
        events = open_regular(RunDir(file.run_dir).events)
    except (FileNotFoundError, NotAFile):
        return
    with events:
        tail, start = b"", end
        while start:
            begin = max(0, start - _CHUNK)
            events.seek(begin)
            data = events.read(start - begin) + tail
            first = data.find(b"\n") + 1 if begin else 0  # what is before may belong to a line that begins earlier
            lines = data[first:].split(b"\n")
            stop = begin + len(data) - len(lines.pop())
            for line in reversed(lines):
                event = _event_of(line)
                if event is not None:
                    text = line.decode(errors="replace").strip().replace("\r", " ")
                    yield Line(Cursor(file.attempt, stop), text, event)
                stop -= len(line) + 1
            tail = data[:first] if first <= LINE_BYTES else b""  # of a line that is too long for an event: nothing
            start = begin


def read_states(store: Store, jobs: Sequence[str]) -> tuple[list[JobState], list[Cursor]]:
    """The states of jobs, and the cursors behind all their events so far. Raises JobNotFound."""
    found = [store.event_files(job) for job in jobs]
    ends = [Cursor(files[-1].attempt, files[-1].end) if files else Cursor() for _, files in found]
    return [state for state, _ in found], ends


class Feeds:
    """Reads the jobs that streams follow: once per job and interval, for any number of streams."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._feeds: dict[str, _Feed] = {}

    async def stream(self, job_uuid: str, after: Cursor, stopping: asyncio.Event) -> AsyncGenerator[bytes]:
        """Server-sent events until the job has ended and all were sent, which `event: end` marks, or the service stops.

        Each part has at most 64 KiB and is sent when the reader has taken most of the parts before.
        """
        feed = self._enter(job_uuid, stopping)
        try:
            async for text in _stream(feed, after, stopping):
                for start in range(0, len(text), _CHUNK):
                    yield text[start : start + _CHUNK]
        finally:
            self._leave(job_uuid, feed)

    async def streams(
        self, jobs: Sequence[str], after: Sequence[Cursor], stopping: asyncio.Event
    ) -> AsyncGenerator[bytes]:
        """Server-sent events of several jobs, until all have ended or the service stops.

        The id of an event names the cursors of all jobs, in the order of `jobs`. Besides the jobs' own events there are
        `event: state`, with the job's state at first and after each change (`deleted` in the end, if it was), and
        `event: end`. Parts are as those of `stream`.
        """
        feeds = [self._enter(job, stopping) for job in jobs]
        try:
            async for text in _streams(jobs, feeds, list(after), stopping):
                for start in range(0, len(text), _CHUNK):
                    yield text[start : start + _CHUNK]
        finally:
            for job, feed in zip(jobs, feeds, strict=True):
                self._leave(job, feed)

    def _enter(self, job_uuid: str, stopping: asyncio.Event) -> _Feed:
        feed = self._feeds.get(job_uuid)
        if feed is None:  # not setdefault: a feed that nothing closes polls forever
            feed = self._feeds[job_uuid] = _Feed(self._store, job_uuid, stopping)
        feed.streams += 1
        return feed

    def _leave(self, job_uuid: str, feed: _Feed) -> None:
        feed.streams -= 1
        if not feed.streams:
            feed.close()
            self._feeds.pop(job_uuid, None)


class _FedPage(NamedTuple):
    page: Page
    text: bytes
    """The page as server-sent events of one job."""
    messages: list[str]
    """The fields of each event in a stream of several jobs, as JSON."""


class _Feed:
    """Reads one job for its streams."""

    def __init__(self, store: Store, job_uuid: str, stopping: asyncio.Event) -> None:
        self.streams = 0
        self.changed = asyncio.Event()
        """Set and replaced when there is more to read, the job's state has changed, or the service stops."""
        self.listeners: set[asyncio.Event] = set()
        """Set at the same times, and cleared by their owners: those wait for several feeds."""
        self._store, self._job_uuid = store, job_uuid
        self._seen: object = None
        self._pages: dict[Cursor, asyncio.Task[_FedPage]] = {}
        self._poller = asyncio.create_task(self._poll())
        self._stopper = asyncio.create_task(self._stop(stopping))

    def close(self) -> None:
        self._poller.cancel()
        self._stopper.cancel()
        for page in self._pages.values():
            page.cancel()

    async def page(self, after: Cursor) -> _FedPage:
        """A page with what streams send of it. Streams with equal cursors share it."""
        reading = self._pages.get(after)
        if reading is None:
            while len(self._pages) >= _KEPT_PAGES:
                self._pages.pop(next(iter(self._pages)))
            reading = self._pages[after] = asyncio.create_task(asyncio.to_thread(self._read, after))
        try:
            return reading.result() if reading.done() else await asyncio.shield(reading)
        except TrlError:  # the next stream reads again: other ones may keep this feed, and the job may change no more
            if self._pages.get(after) is reading:
                del self._pages[after]
            raise

    def _read(self, after: Cursor) -> _FedPage:
        page = read_page(self._store, self._job_uuid, after, _PAGE, _CHUNK)
        text = "".join(f"id: {line.cursor}\ndata: {line.text}\n\n" for line in page.lines).encode()
        has_steps = any(isinstance(line.event, Progress) for line in page.lines)
        eta = self._store.get(self._job_uuid).progress.eta_seconds if has_steps else None
        job = json.dumps(self._job_uuid)
        return _FedPage(
            page, text, [f'"job":{job},"event":{line.text}{_derived(line.event, eta)}' for line in page.lines]
        )

    async def _poll(self) -> None:
        last = 0
        while True:
            # One point read of 30 us, no thread.
            try:
                state, files = self._store.event_files(self._job_uuid, last)
                last = files[-1].attempt if files else 0
                seen: object = (state, files[-1:])
            except JobNotFound:
                seen = None
            except StoreError:
                seen = self._seen  # the streams retry with it
            if seen != self._seen:
                self._seen = seen
                self._pages.clear()
                self._wake()
            await asyncio.sleep(POLL_INTERVAL)

    async def _stop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        for listener in self.listeners:
            listener.set()


async def _stream(feed: _Feed, after: Cursor, stopping: asyncio.Event) -> AsyncIterator[bytes]:
    spoke = time.monotonic()
    while not stopping.is_set():
        changed = feed.changed
        try:
            page, text, _ = await feed.page(after)
        except (
            TrlError
        ):  # the job was deleted, or the database cannot be read: the client reconnects and gets the reason
            return
        after = page.next
        if text:
            yield text
            spoke = time.monotonic()
        if not page.is_last:
            continue
        if page.state in TERMINAL:
            yield f"event: end\ndata: {json.dumps({'state': page.state})}\n\n".encode()
            return
        # One timer for each stream and no task: 500 streams took a fifth of the event loop with two tasks for each.
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, spoke + HEARTBEAT - time.monotonic())):
                await changed.wait()
        if time.monotonic() - spoke >= HEARTBEAT:
            yield f": the job is {page.state}\n\n".encode()
            spoke = time.monotonic()


async def _streams(
    jobs: Sequence[str], feeds: Sequence[_Feed], cursors: list[Cursor], stopping: asyncio.Event
) -> AsyncIterator[bytes]:
    changed = asyncio.Event()
    states: dict[int, str] = {}
    followed = list(range(len(jobs)))
    spoke = time.monotonic()
    try:
        for feed in feeds:
            feed.listeners.add(changed)
        while followed and not stopping.is_set():
            changed.clear()
            text: list[str] = []
            is_last = True
            for number in list(followed):
                try:
                    page, _, messages = await feeds[number].page(cursors[number])
                    state: str = page.state
                except JobNotFound:
                    page, messages, state = Page([], JobState.cancelled, cursors[number], True), [], DELETED
                except TrlError:  # the database cannot be read: the client reconnects and gets the reason
                    return
                for line, message in zip(page.lines, messages, strict=True):
                    cursors[number] = line.cursor
                    text.append(f"id: {_ids(cursors)}\ndata: {{{message}}}\n\n")
                cursors[number] = page.next
                # The state was read before the events: one that has ended, once all of them were sent.
                if page.is_last and states.get(number) != state:
                    states[number] = state
                    text.append(f"event: state\ndata: {json.dumps({'job': jobs[number], 'state': state})}\n\n")
                if page.is_last and page.state in TERMINAL:
                    followed.remove(number)
                is_last = is_last and page.is_last
            if text:
                yield "".join(text).encode()
                spoke = time.monotonic()
            if not is_last or not followed:
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, spoke + HEARTBEAT - time.monotonic())):
                    await changed.wait()
            if time.monotonic() - spoke >= HEARTBEAT:
                yield f": {len(followed)} of {len(jobs)} jobs have not ended\n\n".encode()
                spoke = time.monotonic()
        if not followed:
            yield b"event: end\ndata: {}\n\n"
    finally:
        for feed in feeds:
            feed.listeners.discard(changed)


def _derived(event: Event, eta_seconds: float | None) -> str:
    """What follows from an event, as further fields of its message."""
    derived = Derived()
    match event:
        case Progress() | Evaluated():
            kind, metrics = metrics_of(event)
            derived.point = EventPoint(kind=kind, metrics=metrics)
            derived.eta_seconds = eta_seconds if isinstance(event, Progress) else None
        case Prepared():
            derived.superseded_after = event.start_step
    fields = derived.model_dump_json(exclude_none=True)[1:-1]
    return f",{fields}" if fields else ""


def _ids(cursors: Sequence[Cursor]) -> str:
    return "~".join(map(str, cursors))


def parsed(line: Line) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line.text, parse_constant=lambda name: None)
    return event


def _read(file: EventFile, start: int, limit: int, size: int) -> tuple[list[Line], int, bool]:
    """Read the events of one attempt's file behind byte `start`.

    Returns them, the byte at which reading stopped, and whether these are all."""
    if start > file.end:
        raise _no_cursor(file, start)
    try:
        events = open_regular(RunDir(file.run_dir).events)
    except (FileNotFoundError, NotAFile):  # no event yet, or the run directory was removed
        return [], start, True
    lines: list[Line] = []
    with events:
        events.seek(max(0, start - 1))
        if start and events.read(1) != b"\n":
            raise _no_cursor(file, start)
        stop, give_up = start + size, start + _SCANNED
        while start < file.end and len(lines) < limit and start < (stop if lines else give_up):
            line, length = _next_line(events)
            if not length or start + length > file.end:
                return lines, start, True
            start += length
            event = None if line is None else _event_of(line)
            if line is not None and event is not None:
                # A carriage return between values ends a line of a stream: a training could imitate another's events.
                text = line.decode(errors="replace").strip().replace("\r", " ")
                lines.append(Line(Cursor(file.attempt, start), text, event))
    return lines, start, start >= file.end


def _next_line(events: BinaryIO) -> tuple[bytes | None, int]:
    """A line and its length; the line is None where it is too long for an event."""
    line = events.readline(LINE_BYTES + 1)
    if line.endswith(b"\n") or len(line) <= LINE_BYTES:
        return line, len(line)
    length = len(line)
    while piece := events.readline(_PIECE):
        length += len(piece)
        if piece.endswith(b"\n"):
            break
    return None, length


def _event_of(line: bytes) -> Event | None:
    try:
        return parse_event(line)
    except ValueError:
        return None


def _no_cursor(file: EventFile, start: int) -> InvalidRequest:
    return InvalidRequest(
        "after", f"{file.attempt}-{start}", "expected the end of an event: pass the id of one, or nothing"
    )

"""A job's events from a cursor on: as pages, and as a stream of server-sent events.

A cursor is `<attempt>-<bytes>`: all events of earlier attempts, and those in the first so many bytes of this attempt's
`events.jsonl`. Only what the store has taken in is shown, so that a cursor means the same after any restart and events
of an attempt never come after those of the next.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.files import RunDir
from llama_stack_provider_trl.jobs.records import EventFile
from llama_stack_provider_trl.jobs.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store import Store

LOOK = 0.25
"""Seconds between two looks for new events."""
HEARTBEAT = 15.0
"""Seconds of silence after which a stream says that it lives."""
_PAGE = 500
_PIECE = 1 << 18


class Cursor(NamedTuple):
    attempt: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str | None, field: str) -> Cursor:
        """Raises InvalidRequest."""
        if not text:
            return cls()
        found = re.fullmatch(r"(\d{1,9})-(\d{1,15})", text)
        if not found:
            raise InvalidRequest(field, text, "expected the id of an event, such as 1-2048, or nothing for all events")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.attempt}-{self.offset}"


class Line(NamedTuple):
    cursor: Cursor
    """Behind this event."""
    text: str
    """The event as JSON."""


def read_page(store: Store, job_uuid: str, after: Cursor, limit: int) -> tuple[list[Line], JobState]:
    """The next events behind a cursor, at most `limit`, and the state of the job before they were read.

    Raises:
        JobNotFound.
        InvalidRequest: the cursor is not one of this job's.
    """
    state, files = store.event_files(job_uuid, after.attempt)
    if after.attempt and (not files or files[0].attempt != after.attempt):
        raise InvalidRequest("after", str(after), f"job {job_uuid!r} has no attempt {after.attempt}")
    lines: list[Line] = []
    for file in files:
        start = after.offset if file.attempt == after.attempt else 0
        more, whole = _read(file, start, limit - len(lines))
        lines += more
        if not whole:
            break
    return lines, state


async def stream(store: Store, job_uuid: str, after: Cursor, stopping: asyncio.Event) -> AsyncIterator[str]:
    """Server-sent events until the job has ended and all was sent, or the service stops. Then `event: end`, or not."""
    spoke = time.monotonic()
    while True:
        # Cheap where there is nothing new: one point read, no thread.
        state, files = store.event_files(job_uuid, after.attempt)
        if any((file.attempt, file.end) > after for file in files):
            lines, state = await asyncio.to_thread(read_page, store, job_uuid, after, _PAGE)
            if lines:
                after, spoke = lines[-1].cursor, time.monotonic()
                yield "".join(f"id: {line.cursor}\ndata: {line.text}\n\n" for line in lines)
                continue
        if state in TERMINAL:
            yield f"event: end\ndata: {json.dumps({'state': state})}\n\n"
            return
        if time.monotonic() - spoke > HEARTBEAT:
            yield ": the job is " + state + "\n\n"
            spoke = time.monotonic()
        try:
            await asyncio.wait_for(stopping.wait(), LOOK)
        except TimeoutError:
            continue
        return


def parsed(line: Line) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line.text, parse_constant=lambda name: None)
    return event


def _read(file: EventFile, start: int, limit: int) -> tuple[list[Line], bool]:
    """Lines of one attempt's file behind byte `start`, as far as they count; and whether these are all."""
    if start > file.end:
        raise _no_cursor(file, start)
    try:
        events = open(RunDir(file.run_dir).events, "rb")  # noqa: SIM115
    except FileNotFoundError:  # no event yet, or somebody removed the run directory
        return [], True
    lines: list[Line] = []
    with events:
        events.seek(max(0, start - 1))
        if start and events.read(1) != b"\n":
            raise _no_cursor(file, start)
        stop = start + _PIECE
        while start < min(file.end, stop) and len(lines) < limit and (line := events.readline()):
            start += len(line)
            lines.append(Line(Cursor(file.attempt, start), line.decode(errors="replace").strip()))
    return lines, start >= file.end


def _no_cursor(file: EventFile, start: int) -> InvalidRequest:
    return InvalidRequest("after", f"{file.attempt}-{start}", "no event ends there: pass the id of one, or nothing")

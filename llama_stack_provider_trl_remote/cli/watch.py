"""Shows jobs and their logs in a terminal while they run."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from llama_stack_provider_trl.errors import InvalidRequest, ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl.system.console import complain, indented, redraw, show_json, show_lines

from ..client import ServiceClient, job_path
from ..follow import ENDED, changes, status_again, statuses
from .terminal import best_of, measures_of, progress_line, progress_within

EXIT_STATUS = {"completed": 0, "failed": 1, "cancelled": 2}
_WINDOW = 2000
"""Lines of a log that are read at each poll."""
_LOG_INTERVAL = 1.0
"""Seconds between two polls of a log."""
_BETWEEN = "~"
"""Between the cursors of several jobs, as in the service's stream of several."""
_MEASURES = 40
"""Of a result, that are shown: one of hundreds of tasks has thousands."""


async def watch(
    client: ServiceClient,
    job_uuids: Sequence[str],
    interval: float = 1.0,
    *,
    as_json: bool = False,
    output: TextIO | None = None,
) -> list[dict[str, Any]]:
    """Show jobs until all have ended: on a terminal a line each that changes, elsewhere a line per change. Returns the
    last status of each job.

    Args:
        as_json: as `watch_changes`.
    """
    if as_json:
        return await watch_changes(client, job_uuids, interval, output=output)
    names = list(dict.fromkeys(job_uuids))
    display = _Display(output or sys.stdout, names)

    async def follow(job_uuid: str) -> dict[str, Any]:
        async for status in statuses(client, job_uuid, interval, display.note, config=False):
            display.show(status)
        display.end(status)
        return status

    return await asyncio.gather(*map(follow, names))


async def watch_changes(
    client: ServiceClient,
    job_uuids: Sequence[str],
    interval: float = 1.0,
    after: str | None = None,
    output: TextIO | None = None,
) -> list[dict[str, Any]]:
    """Print what changes in jobs until all have ended, an object on a line each: `job_uuid`, `id` and `event`. Raises
    InvalidRequest: the id is of a watch of other jobs. Returns the last status of each job.

    Args:
        after: the id of a line of such a watch: what came before it is not printed again.
    """
    names = list(dict.fromkeys(job_uuids))
    cursors = _cursors(names, after)

    async def follow(job_uuid: str) -> dict[str, Any]:
        async for change in changes(client, job_uuid, cursors[job_uuid], interval, note):
            cursors[job_uuid] = change.id
            show_change(job_uuid, change.event, _BETWEEN.join(cursors.values()), output)
        return change.event

    return await asyncio.gather(*map(follow, names))


def show_change(job_uuid: str, event: dict[str, Any], at: str | None = None, output: TextIO | None = None) -> None:
    """Print what has happened to a job, an object on a line: `job_uuid`, `id` and `event`.

    Args:
        at: where a watch stands behind it; None: it is of no watch.
    """
    show_json({"job_uuid": job_uuid, "id": at, "event": event}, flush=True, to=output)


def _cursors(names: Sequence[str], after: str | None) -> dict[str, str]:
    """Where the events of each job continue."""
    if after is None:
        return dict.fromkeys(names, "")
    found = after.split(_BETWEEN)
    if len(found) != len(names):
        hint = f"expected the id of a line of a watch of the same jobs, with {len(names)} parts between {_BETWEEN}."
        raise InvalidRequest("--after", after, hint)
    return dict(zip(names, found, strict=True))


def exit_status(ended: Sequence[dict[str, Any]]) -> int:
    """0: every job completed. 1: one failed. 2: none failed, and one was cancelled."""
    found = {EXIT_STATUS[status["status"]] for status in ended}
    return 1 if 1 in found else max(found)


async def follow_log(client: ServiceClient, job_uuid: str, rank: str, tail: int, show: Callable[[str], None]) -> None:
    """Show the end of a log, then its new lines until the job has ended."""
    path = job_path(job_uuid, "/logs")
    shown: list[str] | None = None
    while True:
        # Requested before the log is read, so that the log includes everything a finished job wrote.
        status = (
            await status_again(client, job_uuid, _LOG_INTERVAL, note)
            if shown is not None
            else await client.status(job_uuid, config=False)
        )
        ended = status["status"] in ENDED
        try:
            lines = (await client.get_text(path, rank=rank, tail=max(tail, _WINDOW))).splitlines()
        except ServiceUnreachable:
            continue
        except ServiceRefusal as error:
            # A job has no log before its first attempt, and at the beginning of each.
            if error.status != 404 or ended:
                raise
            lines = []
        # The last line may be incomplete.
        whole = lines if ended else lines[:-1]
        for line in whole[-tail:] if shown is None else new_lines(shown, whole):
            show(line)
        shown = whole
        if ended:
            return
        await asyncio.sleep(_LOG_INTERVAL)


def new_lines(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """What was appended to a text between two polls of its last lines."""
    # The service strips white space off the beginning and the end of a log.
    known, found = [line.strip() for line in before], [line.strip() for line in after]
    for overlap in range(min(len(known), len(found)), 0, -1):
        if found[:overlap] == known[len(known) - overlap :]:
            return after[overlap:]
    return after


def note(text: str) -> None:
    """Print a message beside the output, on standard error."""
    complain(text)


class _Display:
    """The lines of some jobs: one job has the whole line, several have their names in front."""

    def __init__(self, output: TextIO, job_uuids: Sequence[str]) -> None:
        self.output = output
        self.redraws = output.isatty()
        self.width = max(map(len, job_uuids)) if len(job_uuids) > 1 else 0
        self.last = dict.fromkeys(job_uuids, "")
        self.drawn: list[str] = []
        """Lines on the terminal that are replaced by the next ones."""

    def show(self, status: dict[str, Any]) -> None:
        job_uuid, line = status["job_uuid"], progress_line(status)
        changed = self.last[job_uuid] != line
        self.last[job_uuid] = progress_within(status, self._room()) if self.redraws else line
        if self.redraws:
            self._draw()
        elif changed and status["status"] not in ENDED:
            show_lines(self._named(job_uuid, line), flush=True, to=self.output)

    def _room(self) -> int:
        """Columns for the line of a job, beside its name."""
        return shutil.get_terminal_size().columns - 1 - (self.width + 2 if self.width else 0)

    def note(self, text: str) -> None:
        """Print a message beside the progress, on standard error."""
        self._clear()
        note(text)

    def end(self, status: dict[str, Any]) -> None:
        """Print how a job has ended, above the lines of those that go on."""
        self._clear()
        del self.last[status["job_uuid"]]
        for line in _ending(status):
            show_lines(self._named(status["job_uuid"], line), to=self.output)
        self.output.flush()
        if self.redraws and self.last:
            self._draw()

    def _named(self, job_uuid: str, line: str) -> str:
        return f"{job_uuid:<{self.width}}  {line}" if self.width else line

    def _draw(self) -> None:
        replaced = len(self.drawn)
        self.drawn = [self._named(job, line) for job, line in self.last.items()]
        redraw(self.output, replaced, self.drawn, shutil.get_terminal_size().columns - 1)

    def _clear(self) -> None:
        if self.drawn:
            redraw(self.output, len(self.drawn), [], shutil.get_terminal_size().columns - 1)
            self.drawn = []


def _ending(status: dict[str, Any]) -> list[str]:
    """How a job ended, what it has measured, and its checkpoints."""
    resources = status.get("resources_allocated") or {}
    measures = measures_of(resources.get("result") or {})
    lines = [progress_line(status)]
    if best := best_of(resources.get("search") or {}):
        lines.append(f"best {best}")
    lines += measures[:_MEASURES]
    if len(measures) > _MEASURES:
        lines.append(f"{len(measures) - _MEASURES} more: trl-remote jobs show {status['job_uuid']}")
    error = resources.get("error")
    if error:
        lines += indented(f"{error['reason']}: {error['message']}")
        if error.get("log_path"):
            lines.append(f"log: {error['log_path']}")
    return lines + [f"checkpoint {found['identifier']}: {found['path']}" for found in status["checkpoints"]]

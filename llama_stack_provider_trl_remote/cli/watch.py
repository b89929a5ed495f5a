"""Follows a job over the network, where the service or the connection may be interrupted."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable

from ..client import ServiceClient, job_path
from .terminal import bar, progress_line

EXIT_STATUS = {"completed": 0, "failed": 1, "cancelled": 2}
_WINDOW = 2000
"""Lines of a log that are read at each poll."""


async def watch(client: ServiceClient, job_uuid: str, interval: float = 1.0, output: TextIO | None = None) -> int:
    """Show a job's progress until it has ended: one line that changes on a terminal, a line per change elsewhere.

    Returns:
        0 completed, 1 failed, 2 cancelled.
    """
    display = _Display(output or sys.stdout)
    status = await client.status(job_uuid)
    while status["status"] not in EXIT_STATUS:
        display.show(status)
        await asyncio.sleep(interval)
        status = await _again(client, job_uuid, interval, display)
    display.end(status)
    return EXIT_STATUS[status["status"]]


async def follow_log(client: ServiceClient, job_uuid: str, rank: str, tail: int, interval: float = 1.0) -> None:
    """Print the end of a log, then its new lines until the job has ended."""
    display = _Display(sys.stdout)
    path = job_path(job_uuid, "/logs")
    shown: list[str] | None = None
    while True:
        # Requested before the log is read, so that the log includes everything a finished job wrote.
        status = (
            await _again(client, job_uuid, interval, display) if shown is not None else await client.status(job_uuid)
        )
        ended = status["status"] in EXIT_STATUS
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
            print(line, flush=True)
        shown = whole
        if ended:
            return
        await asyncio.sleep(interval)


def new_lines(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """What was appended to a text between two polls of its last lines."""
    # The service strips white space off the beginning and the end of a log.
    known, found = [line.strip() for line in before], [line.strip() for line in after]
    for overlap in range(min(len(known), len(found)), 0, -1):
        if found[:overlap] == known[len(known) - overlap :]:
            return after[overlap:]
    return after


async def _again(client: ServiceClient, job_uuid: str, interval: float, display: _Display) -> Any:
    """Poll the status until the service answers."""
    noted = False
    while True:
        try:
            return await client.status(job_uuid)
        except (ServiceUnreachable, ServiceRefusal) as error:
            if isinstance(error, ServiceRefusal) and error.status < 500:
                raise
            if not noted:
                display.note(f"{error} (retrying every {interval:g} s)")
                noted = True
            await asyncio.sleep(interval)


class _Display:
    def __init__(self, output: TextIO) -> None:
        self.output = output
        self.terminal = output.isatty()
        self.last = ""

    def show(self, status: dict[str, Any]) -> None:
        percent = ((status.get("resources_allocated") or {}).get("progress") or {}).get("percent")
        line = progress_line(status)
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            self.output.write("\r" + (bar(percent) + line)[:width].ljust(width))
            self.output.flush()
        elif line != self.last:
            print(line, file=self.output, flush=True)
        self.last = line

    def note(self, text: str) -> None:
        """Print a message beside the progress, on standard error."""
        self._clear()
        print(f"trl-remote: {text}", file=sys.stderr, flush=True)

    def end(self, status: dict[str, Any]) -> None:
        self._clear()
        print(progress_line(status), file=self.output)
        error = (status.get("resources_allocated") or {}).get("error")
        if error:
            print(f"{error['reason']}: {error['message']}", file=self.output)
            if error.get("log_path"):
                print(f"log: {error['log_path']}", file=self.output)
        for checkpoint in status["checkpoints"]:
            print(f"checkpoint {checkpoint['identifier']}: {checkpoint['path']}", file=self.output)
        self.output.flush()

    def _clear(self) -> None:
        if self.terminal and self.last:
            width = shutil.get_terminal_size().columns - 1
            self.output.write("\r" + " " * width + "\r")
            self.output.flush()

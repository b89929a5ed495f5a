"""The results of checks: one JSON line each, and the Markdown table of them all. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Status(StrEnum):
    passed = "passed"
    failed = "failed"
    skipped = "skipped"
    timed_out = "timed out"


class Skipped(Exception):
    """Raised by a check that cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    passed: bool
    summary: str
    """One sentence with the numbers that matter."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Further rows of the table: case -> numbers."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """All numbers, as JSON values."""


@dataclass(frozen=True)
class Result:
    """One line of the results file."""

    mode: str
    """dry-run, 1 GPU or 2 GPUs: a line of another mode does not count."""
    check: str
    status: Status
    seconds: float
    summary: str
    rows: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    """Of the code that was checked: a file may hold results of several."""


def append(path: Path, result: Result) -> None:
    """Append a line and return when it is on disk: the machine may be taken away at any time."""
    with path.open("a+b") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.write(b"\n")  # after a line that was cut off, which would swallow this one
        file.write((json.dumps(asdict(result)) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, mode: str) -> dict[str, Result]:
    """Check -> its last result in this mode. A line that was cut off by a crash does not count."""
    found: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if values["mode"] == mode:
            found[values["check"]] = Result(**{**values, "status": Status(values["status"])})
    return found


def table(results: Iterable[Result], heading: str) -> str:
    """The Markdown table, with a line above it that names the command and the machine."""
    lines = [heading, "", "| check | result | s | found |", "|---|---|---|---|"]
    for result in results:
        lines.append(f"| {result.check} | {result.status} | {result.seconds:.0f} | {_cell(result.summary)} |")
        lines += [f"| {result.check}: {_cell(case)} | | | {_cell(text)} |" for case, text in result.rows.items()]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""Checks stored rows for their use, in a process with limits where requests are served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..errors import InvalidRows
from ..system.limited import Limited
from .limited_rows import read_within
from .row_files import read_ndjson

if TYPE_CHECKING:
    from .job import DataFormat, RowNames, RowUse


class RowsVerdict(TypedDict):
    """Whether a file of rows fits its use."""

    num_rows: int
    warnings: list[str]
    error: str | None
    """The first invalid row and its fault; None: all rows are valid."""


def check_file(path: Path, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None) -> RowsVerdict:
    """Check an NDJSON file, a row at a time. A process that serves requests calls `check_within`. Raises OSError: it
    cannot be read."""
    # Not at the top: a process that only converts starts without it in 0.1 s of CPU time, with it in 0.27.
    from .rows import check_rows

    try:
        with open(path, "rb") as file:
            report = check_rows(read_ndjson(file), use, data_format, names)
    except InvalidRows as error:
        return RowsVerdict(num_rows=0, warnings=[], error=str(error))
    return RowsVerdict(num_rows=report.num_rows, warnings=report.warnings, error=None)


def names_of(text: str) -> RowNames | None:
    """Names of columns and roles, from their JSON text; empty: none."""
    from .job import RowNames

    return RowNames.model_validate_json(text) if text else None


def check_within(
    limits: Limited, path: Path, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
) -> RowsVerdict:
    """`check_file` in another process, in 5 ms and the time of its rows. Raises InvalidRows: a row takes more than the
    limits allow; LimitReached: too many files are checked, or the machine is too busy; OSError: the file cannot be
    read, or there can be no further process."""
    advice = "split long rows, or leave out columns that are not read"
    return read_within(limits, _verdict, path, use, data_format, names, doing="checking it", advice=advice)


def _verdict(path: Path, use: RowUse, data_format: DataFormat | None, names: RowNames | None) -> Iterator[RowsVerdict]:
    yield check_file(path, use, data_format, names)

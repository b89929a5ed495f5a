"""Reads what a file of stored rows has: some rows, their lengths, duplicates and sources, in a process with limits
where requests are served."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from ..errors import InvalidRows
from ..system.limited import Limited
from .limited_rows import read_within
from .row_files import LINE_BYTES, parse_line

MOST_BYTES = 64 << 20
"""Bytes of a file that are read."""
MOST_ROWS = 500_000
"""Rows that are read: short ones take 10 us each, however few bytes they have."""
MOST_CPU_S = 5.0
"""CPU time after which no further row is read: a page has what was read by then, in place of an error."""
_CHECKED = 64
"""Rows after which the time is looked at."""
MOST_MARKS = 1024
"""Places in a file that are known: rows of further pages are read from the last one before them."""
MOST_DUPLICATES = 5
"""Duplicates that are listed."""
_MOST_SOURCES = 30
_MOST_SHOWN = 4000
"""Characters of a row that are shown."""
_SOURCES = ("source", "dataset", "origin", "subset", "category")
"""Columns that name where a row comes from: the first of them that a row has counts."""
_LONGEST_SOURCE = 80
_MOST_COLUMNS, _LONGEST_NAME = 50, 200


class OverviewRow(TypedDict):
    number: int
    """From 0."""
    columns: dict[str, str]
    """Each column as text: of other values their JSON."""
    is_cut: bool


class RowMark(TypedDict):
    """A place in a file."""

    offset: int
    number: int
    """Of the row that begins there."""


class Overview(TypedDict):
    num_rows: int
    """Rows that were read."""
    num_bytes: int
    is_cut: bool
    """Whether the file has more than was read."""
    matching: int
    """Rows that have the text that was looked for."""
    rows: list[OverviewRow]
    columns: dict[str, int]
    """Column -> rows that have it with a value."""
    lengths: list[tuple[int, int]]
    """Characters of the texts of rows, up to a power of two -> rows."""
    median: int
    longest: int
    longest_row: int
    duplicates: int
    """Rows that are equal to one before them."""
    duplicated: list[tuple[int, int]]
    """Some of them, each with the row that it is equal to."""
    source_column: str
    """Empty: no row has a column that names its source."""
    sources: list[tuple[str, int]]
    """The most frequent ones -> rows."""
    other_sources: int
    """Rows of the others."""
    marks: list[RowMark]
    """Where every `stride`-th row begins of those that have the text which was looked for, from the first one."""
    stride: int


def overview_within(limits: Limited, path: Path, search: str, first: int, count: int) -> Overview:
    """What a file of NDJSON rows has, read in another process.

    Args:
        search: only rows with this text, in any case, are shown; empty: all.
        first: of them, from 0.

    Raises:
        InvalidRows: a line is no object, or it takes more than the limits allow.
        LimitReached: the machine is too busy.
        OSError: the file cannot be read, or there can be no further process.
    """
    advice = "split long rows, or register a smaller file"
    return read_within(limits, _overview, path, search, first, count, doing="reading its rows", advice=advice)


def rows_within(
    limits: Limited, path: Path, overview: Overview, search: str, first: int, count: int
) -> list[OverviewRow]:
    """Some rows of a file whose overview with this text is known: no more is read than what leads to them. See
    `overview_within`."""
    if first >= overview["matching"] or count < 1:
        return []
    at = min(first // overview["stride"], len(overview["marks"]) - 1)
    mark, skipped = overview["marks"][at], first - at * overview["stride"]
    count = min(count, overview["matching"] - first)
    arguments = (mark["offset"], mark["number"], search, skipped, count)
    advice = "split long rows, or register a smaller file"
    return read_within(limits, _rows, path, *arguments, doing="reading its rows", advice=advice)


def _rows(path: Path, offset: int, number: int, search: str, skipped: int, count: int) -> Iterator[list[OverviewRow]]:
    with open(path, "rb") as file:
        file.seek(offset)
        yield read_rows_at(file, number, search, skipped, count)


def read_rows_at(file: BinaryIO, number: int, search: str, skipped: int, count: int) -> list[OverviewRow]:
    """Rows from where a file stands.

    Args:
        number: of the row that begins there.
        skipped: rows with the text that come before.
    """
    wanted, found = search.casefold(), list[OverviewRow]()
    while len(found) < count and (line := file.readline(LINE_BYTES + 1)):
        # Without a text every row counts: those before the wanted ones need no reading.
        row = _parsed(line, number) if wanted or not skipped else {}
        if not wanted or _has(row, wanted):
            if skipped:
                skipped -= 1
            else:
                found.append(_shown(row, number))
        number += 1
    return found


def _overview(path: Path, search: str, first: int, count: int) -> Iterator[Overview]:
    with open(path, "rb") as file:
        yield read_overview(file, search, first, count)


def read_overview(file: BinaryIO, search: str = "", first: int = 0, count: int = 20) -> Overview:
    """What a file has. See `overview_within`; memory grows with the number of rows by 200 bytes each."""
    until = time.process_time() + MOST_CPU_S
    marks, stride = list[RowMark](), 1
    wanted, rows = search.casefold(), list[OverviewRow]()
    columns, sources, lengths = Counter[str](), Counter[str](), array("q")
    seen = dict[bytes, int]()
    duplicated, source_column = list[tuple[int, int]](), ""
    number = matching = read = longest = longest_row = duplicates = 0
    while read < MOST_BYTES and number < MOST_ROWS and (line := file.readline(LINE_BYTES + 1)):
        row = _parsed(line, number)
        begin, read = read, read + len(line)
        columns.update(name for name, value in row.items() if value is not None)
        length = _length(row)
        lengths.append(length)
        if length > longest:
            longest, longest_row = length, number
        before = seen.setdefault(_digest(row), number)
        if before != number:
            duplicates += 1
            if len(duplicated) < MOST_DUPLICATES:
                duplicated.append((number, before))
        source_column = source_column or next((name for name in _SOURCES if isinstance(row.get(name), str)), "")
        if source_column and isinstance(source := row.get(source_column), str):
            sources[source[:_LONGEST_SOURCE]] += 1
        if not wanted or _has(row, wanted):
            if first <= matching < first + count:
                rows.append(_shown(row, number))
            if matching % stride == 0:
                marks.append(RowMark(offset=begin, number=number))
                if len(marks) > MOST_MARKS:
                    marks, stride = marks[::2], 2 * stride
            matching += 1
        number += 1
        if number % _CHECKED == 0 and time.process_time() > until:
            break
    frequent = sources.most_common(_MOST_SOURCES)
    return Overview(
        num_rows=number,
        num_bytes=read,
        is_cut=bool(file.read(1)),
        matching=matching,
        rows=rows,
        columns={name[:_LONGEST_NAME]: rows for name, rows in columns.most_common(_MOST_COLUMNS)},
        lengths=sorted(Counter(1 << max(0, length - 1).bit_length() for length in lengths).items()),
        median=sorted(lengths)[(number - 1) // 2] if number else 0,
        longest=longest,
        longest_row=longest_row,
        duplicates=duplicates,
        duplicated=duplicated,
        source_column=source_column,
        sources=frequent,
        other_sources=sources.total() - sum(rows for _, rows in frequent),
        marks=marks,
        stride=stride,
    )


def _parsed(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = parse_line(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise InvalidRows(f"it is no JSON ({error}): register the file again", row=number) from error
    if not isinstance(row, dict):
        raise InvalidRows(f"found a {type(row).__name__}, expected an object with named columns", row=number)
    return row


def _has(row: dict[str, Any], wanted: str) -> bool:
    return any(wanted in text.casefold() for text in _texts(row))


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, without names of columns."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += reversed(one.values())
        elif isinstance(one, list):
            waiting += reversed(one)


def _length(row: dict[str, Any]) -> int:
    return sum(map(len, _texts(row)))


def _digest(row: dict[str, Any]) -> bytes:
    text = json.dumps(row, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _shown(row: dict[str, Any], number: int) -> OverviewRow:
    left, found, is_cut = _MOST_SHOWN, dict[str, str](), False
    for name, value in row.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        is_cut = is_cut or len(text) > left
        found[name[:_LONGEST_NAME]] = text[:left]
        left -= min(left, len(text))
        if not left:
            break
    return OverviewRow(number=number, columns=found, is_cut=is_cut or len(found) < len(row))

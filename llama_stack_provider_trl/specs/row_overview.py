"""Reads what a file of stored rows has: some rows, their lengths, duplicates and sources, in a process with limits
where requests are served."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
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
MOST_SEARCHED, MOST_SEARCHED_ROWS = 8 << 20, 100_000
"""Bytes and rows in which a text is looked for at once: at most about a second. Who wants more looks further. Behind as
much between the rows of a page, it ends."""
_ROW_BYTES = MOST_SEARCHED // MOST_SEARCHED_ROWS
"""Bytes that take the time of a row, beside its own."""
MOST_MARKS = 1024
"""RowPlaces in a file that are known: a row of a further page is read from the last one before it."""
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
    matching: int
    """Rows before it that count."""


class RowPlaces(TypedDict):
    """Where rows of a file are, all of them or those with a text."""

    num_rows: int
    """Rows that were read."""
    num_bytes: int
    is_cut: bool
    """Whether the file has more than was read."""
    matching: int
    """Rows that count, of those that were read."""
    marks: list[RowMark]
    """Where some of them begin, the first one among them: of few rows that count all."""
    apart: int
    """Bytes, those for the time of rows among them, by which marks are apart, at least. Not every so many rows have
    one: rare ones behind many would lie far behind the marks before them."""


class Overview(RowPlaces):
    """What the beginning of a file has. Every row counts."""

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


_ADVICE = "split long rows, or register a smaller file"


def overview_within(limits: Limited, path: Path, first: int, count: int) -> Overview:
    """What a file of NDJSON rows has, read in another process. Raises InvalidRows: a line is no object, or it takes
    more than the limits allow; LimitReached: the machine is too busy; OSError: the file cannot be read, or there can be
    no further process.

    Args:
        first: of the rows that are shown, from 0.
    """
    return read_within(limits, _opened, path, read_overview, first, count, doing="reading its rows", advice=_ADVICE)


def searched_within(limits: Limited, path: Path, search: str, known: RowPlaces | None, wanted: int) -> RowPlaces:
    """Where rows of a file have a text, in any case. See `overview_within`.

    Args:
        known: where they are in the beginning of the file, which is not read again.
        wanted: rows with the text, behind which no more is read.
    """
    return read_within(
        limits, _opened, path, read_searched, search, known, wanted, doing="reading its rows", advice=_ADVICE
    )


def rows_within(
    limits: Limited, path: Path, places: RowPlaces, search: str, first: int, count: int
) -> list[OverviewRow]:
    """Some rows of a file of which is known where those with this text are: no more is read than what leads to them.
    They are fewer, and at least one, where `MOST_SEARCHED` lies between them. See `overview_within`."""
    marks, count = places["marks"], min(count, places["matching"] - first)
    if count < 1:
        return []
    needed = marks[_before(marks, first) : _before(marks, first + count - 1) + 1]
    return read_within(
        limits, _opened, path, read_rows_at, needed, search, first, count, doing="reading its rows", advice=_ADVICE
    )


def _before(marks: Sequence[RowMark], row: int) -> int:
    """The last mark that is not behind a row, which is counted among those that count."""
    return bisect_right(marks, row, key=itemgetter("matching")) - 1


def _opened[Found](path: Path, read: Callable[..., Found], *arguments: Any) -> Iterator[Found]:
    with open(path, "rb") as file:
        yield read(file, *arguments)


def read_rows_at(file: BinaryIO, marks: Sequence[RowMark], search: str, first: int, count: int) -> list[OverviewRow]:
    """Rows of a file. See `rows_within`.

    Args:
        marks: the first one is not behind the first row.
    """
    wanted, found = search.casefold(), list[OverviewRow]()
    # The file stands at row `number`, before which `at` rows count.
    number = at = between = 0
    while len(found) < count and between <= MOST_SEARCHED:
        mark = marks[_before(marks, first + len(found))]
        if mark["number"] > number or not number:
            file.seek(mark["offset"])
            number, at = mark["number"], mark["matching"]
        while line := file.readline(LINE_BYTES + 1):
            is_shown = at == first + len(found)
            # Without a text every row counts: those before the wanted ones need no reading.
            row = _parsed(line, number) if wanted or is_shown else {}
            number += 1
            if not wanted or _has(row, wanted):
                at += 1
                if is_shown:
                    found.append(_shown(row, number - 1))
                    break
            between += len(line) + _ROW_BYTES
        else:
            break
    return found


class _Marks:
    """Collects where rows begin: few of them, so that none is far behind the last one before it."""

    def __init__(self, known: RowPlaces | None = None) -> None:
        self.marks = list[RowMark]() if known is None else [*known["marks"]]
        self.apart, self.matching = (0, 0) if known is None else (known["apart"], known["matching"])

    def add(self, offset: int, number: int) -> None:
        self._mark(RowMark(offset=offset, number=number, matching=self.matching))
        self.matching += 1
        while len(self.marks) > MOST_MARKS:
            self.apart = 2 * max(self.apart, _ROW_BYTES)
            marks, self.marks = self.marks, []
            for mark in marks:
                self._mark(mark)

    def _mark(self, mark: RowMark) -> None:
        if self.marks:
            last = self.marks[-1]
            rows, size = mark["number"] - last["number"], mark["offset"] - last["offset"]
            if size + rows * _ROW_BYTES <= self.apart:
                return
        self.marks.append(mark)


def read_searched(file: BinaryIO, search: str, known: RowPlaces | None = None, wanted: int = 20) -> RowPlaces:
    """Where rows have a text. See `searched_within`."""
    number, offset = (0, 0) if known is None else (known["num_rows"], known["num_bytes"])
    marks, text = _Marks(known), search.casefold()
    most, last = offset + MOST_SEARCHED, number + MOST_SEARCHED_ROWS
    file.seek(offset)
    while offset < most and number < last and marks.matching < wanted and (line := file.readline(LINE_BYTES + 1)):
        if _has(_parsed(line, number), text):
            marks.add(offset, number)
        number, offset = number + 1, offset + len(line)
    return RowPlaces(
        num_rows=number,
        num_bytes=offset,
        is_cut=bool(file.read(1)),
        matching=marks.matching,
        marks=marks.marks,
        apart=marks.apart,
    )


def read_overview(file: BinaryIO, first: int = 0, count: int = 20) -> Overview:
    """What a file has. See `overview_within`; memory grows with the number of rows by 200 bytes each."""
    until = time.process_time() + MOST_CPU_S
    marks, rows = _Marks(), list[OverviewRow]()
    columns, sources, lengths = Counter[str](), Counter[str](), array("q")
    seen = dict[bytes, int]()
    duplicated, source_column = list[tuple[int, int]](), ""
    number = read = longest = longest_row = duplicates = 0
    while read < MOST_BYTES and number < MOST_ROWS and (line := file.readline(LINE_BYTES + 1)):
        row = _parsed(line, number)
        begin, read = read, read + len(line)
        columns.update(name for name, value in row.items() if value is not None)
        length = sum(map(len, _texts(row)))
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
        if first <= number < first + count:
            rows.append(_shown(row, number))
        marks.add(begin, number)
        number += 1
        if number % _CHECKED == 0 and time.process_time() > until:
            break
    frequent = sources.most_common(_MOST_SOURCES)
    return Overview(
        num_rows=number,
        num_bytes=read,
        is_cut=bool(file.read(1)),
        matching=number,
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
        marks=marks.marks,
        apart=marks.apart,
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

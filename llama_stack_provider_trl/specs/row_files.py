"""Rows out of files, one at a time: .jsonl, .json and .csv, of which no line is longer than a row may be."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from typing import IO, Any, BinaryIO

from ..errors import InvalidRows

LINE_BYTES = 16 << 20
"""The longest row. As Python objects JSON takes up to 30 times its size (measured, `[[],[],...]`)."""
_TOO_LONG = f"has more than {LINE_BYTES >> 20} MiB; a row may have at most that: split it"
_BOM = b"\xef\xbb\xbf"
Row = dict[str, Any]


def read_ndjson(file: BinaryIO, *, blank_lines: bool = False) -> Iterator[Row]:
    """The rows of a file with one JSON object per line.

    Args:
        blank_lines: skip them, instead of refusing them.

    Raises:
        InvalidRows: a line is not JSON, or too long; names it.
    """
    row = 0
    for number, line in enumerate(_lines(file), start=1):
        if blank_lines and line.isspace():
            continue
        try:
            yield json.loads(line.removeprefix(_BOM).decode() if number == 1 else line.decode())
        except UnicodeDecodeError as error:
            raise InvalidRows(f"is not UTF-8 text in line {number} ({error.reason})", row=row) from error
        except (ValueError, RecursionError) as error:
            raise InvalidRows(
                f"is not JSON in line {number} ({error}); expected one object per line", row=row
            ) from error
        row += 1


def read_csv(file: BinaryIO) -> Iterator[Row]:
    """The rows of a CSV file with a header. All values are text, and an empty cell is an absent value, as in Llama
    Stack's own reader.

    Raises:
        InvalidRows: the file is not CSV, or a row has more cells than the header; names the line.
    """
    csv.field_size_limit(LINE_BYTES)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(_lines(text), strict=True)
    try:
        for row, cells in enumerate(reader):
            if None in cells:
                where, named = f"in line {reader.line_num}", len(reader.fieldnames or [])
                raise InvalidRows(f"has more cells {where} than the header's {named} columns", row=row)
            yield {name: cell for name, cell in cells.items() if cell}
    except UnicodeDecodeError as error:
        raise InvalidRows(f"the file is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise InvalidRows(f"the file is not CSV after line {reader.line_num} ({error})") from error
    finally:
        text.detach()  # the caller closes the file


def read_json(file: BinaryIO) -> Iterator[Row]:
    """The rows of a .json file: a list of objects, or one object per line.

    Raises:
        InvalidRows: it is neither.
    """
    start = file.read(4096).removeprefix(_BOM).lstrip()
    file.seek(0)
    if not start.startswith(b"["):
        yield from read_ndjson(file, blank_lines=True)
        return
    try:
        yield from json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise InvalidRows(f"the file is not JSON ({error}); expected a list of objects") from error


ROW_READERS: dict[str, Callable[[BinaryIO], Iterator[Row]]] = {
    ".csv": read_csv,
    ".jsonl": lambda file: read_ndjson(file, blank_lines=True),
    ".json": read_json,
    ".ndjson": lambda file: read_ndjson(file, blank_lines=True),
}
"""By the ending of a file's name."""


def _lines[Line: (bytes, str)](file: IO[Line]) -> Iterator[Line]:
    """The lines of a file, each held in memory only up to `LINE_BYTES`: characters, where the file is text."""
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise InvalidRows(_TOO_LONG, row=number)
        yield line
        number += 1

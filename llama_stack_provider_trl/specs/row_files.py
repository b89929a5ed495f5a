"""Rows out of files, one at a time: .jsonl, .json and .csv, of which no line is longer than a row may be."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, BinaryIO

from ..errors import InvalidRows
from ..system.texts import DuplicateKey, decoded, first_duplicate, parse_json

LINE_BYTES = 16 << 20
"""The longest row. As Python objects JSON takes up to 30 times its size (measured, `[[],[],...]`)."""
_TOO_LONG = f"has more than {LINE_BYTES >> 20} MiB; a row may have at most that: split it"
_BOM = b"\xef\xbb\xbf"
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|\?xml)[\s>]", re.IGNORECASE)
_OTHER_KINDS = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer and not the file itself: run `git lfs pull`"),
    (b"\x1f\x8b", "compressed by gzip: decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it"),
    (b"BZh", "compressed by bzip2: decompress it"),
    (b"\xfd7zXZ\0", "compressed by xz: decompress it"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet: extract it, or export it as .csv"),
    (b"PAR1", "a Parquet file: give it a name that ends in .parquet"),
    (b"ARROW1", "an Arrow file: write it as Parquet"),
    (b"SQLite format 3", "a SQLite database: export its table as .csv"),
)
"""First bytes of files that are no rows, and what to do."""
Row = dict[str, Any]


def refuse_other_kind(start: bytes) -> None:
    """Return if a file may have rows, by its first bytes.

    Raises:
        InvalidRows: it is of another kind: names that.
    """
    for begin, what in _OTHER_KINDS:
        if start.startswith(begin):
            raise InvalidRows(f"the file is {what}")
    if _PAGE.match(start):
        raise InvalidRows("the file is a web page, such as the error page of a download: download it again")


def parse_line(line: str) -> Any:
    """A line of rows that are stored, and were checked. One may have the byte order mark of its file: a part of the
    rows has them in another order.

    Raises:
        ValueError: it is not JSON.
    """
    return parse_json(line.removeprefix("\ufeff"), any_digits=True)


def read_ndjson(file: BinaryIO, *, blank_lines: bool = False) -> Iterator[Row]:
    """The rows of a file with one JSON object per line.

    Args:
        blank_lines: skip them, instead of refusing them.

    Raises:
        InvalidRows: a line is not JSON, too long, or has a key twice; names it.
    """
    row = 0
    for number, line in enumerate(_lines(file), start=1):
        if blank_lines and line.isspace():
            continue
        if row == 0:
            refuse_other_kind(line)
        try:
            text = decoded(line) if number == 1 else line.decode()
        except ValueError as error:  # the first line names another encoding by its byte order mark
            reason = error.reason if isinstance(error, UnicodeDecodeError) else error
            raise InvalidRows(f"is not UTF-8 text in line {number} ({reason})", row=row) from error
        try:
            parsed = parse_json(text, any_digits=True)
        except DuplicateKey as error:
            raise InvalidRows(f"in line {number} {error}", row=row) from error
        except RecursionError as error:
            raise InvalidRows(f"is nested too deeply in line {number}: flatten it", row=row) from error
        except ValueError as error:
            raise InvalidRows(
                f"is not JSON in line {number} ({error}); expected one object per line", row=row
            ) from error
        if row == 0 and isinstance(parsed, list):
            raise InvalidRows(
                "the file is a JSON list, expected one object per line: give it a name that ends in .json"
            )
        yield parsed
        row += 1


def read_csv(file: BinaryIO) -> Iterator[Row]:
    """The rows of a CSV file with a header. All values are text, and an empty cell is an absent value, as in Llama
    Stack's own reader.

    Raises:
        InvalidRows: the file is not CSV, its header has a name twice, or a row has more cells than the header; names
            the line.
    """
    csv.field_size_limit(LINE_BYTES)
    _check_encoding(file)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(_lines(text), strict=True)
    try:
        refuse_twice([name for name in reader.fieldnames or () if name])
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
        InvalidRows: it is neither, or has a key twice.
    """
    start = file.read(4096)
    refuse_other_kind(start)
    start = start.removeprefix(_BOM).lstrip()
    file.seek(0)
    if not start.startswith(b"["):
        yield from read_ndjson(file, blank_lines=True)
        return
    try:
        yield from parse_json(file.read(), any_digits=True)
    except DuplicateKey as error:
        raise InvalidRows(f"in the file {error}") from error
    except RecursionError as error:
        raise InvalidRows("the file is nested too deeply: flatten it") from error
    except ValueError as error:
        raise InvalidRows(f"the file is not JSON ({error}); expected a list of objects") from error


ROW_READERS: dict[str, Callable[[BinaryIO], Iterator[Row]]] = {
    ".csv": read_csv,
    ".jsonl": lambda file: read_ndjson(file, blank_lines=True),
    ".json": read_json,
    ".ndjson": lambda file: read_ndjson(file, blank_lines=True),
}
"""By the ending of a file's name."""


def refuse_fields_twice(fields: Iterable[Any], where: str = "") -> None:
    """Return if all fields of a table of Arrow, and of each struct in it, have names of their own.

    Args:
        fields: a schema, or the fields of a struct.
        where: path of the column whose fields these are.

    Raises:
        InvalidRows: names the field that is there twice.
    """
    listed = list(fields)
    refuse_twice([field.name for field in listed], where)
    for field in listed:
        kind = field.type
        while hasattr(kind, "value_field"):  # lists of any kind
            kind = kind.value_field.type
        if str(kind).startswith("struct"):
            refuse_fields_twice(kind.fields, f"{where}{field.name}.")


def refuse_twice(columns: list[str], where: str = "") -> None:
    """Return if all names differ. Raises InvalidRows: names the first one that is there twice."""
    if (name := first_duplicate(columns)) is not None:
        raise InvalidRows(f"the column {where}{name} is there twice, expected each name once: rename one of them")


def _check_encoding(file: BinaryIO) -> None:
    """Return if a file is of no other kind, and has no byte order mark of another encoding than UTF-8."""
    start = file.read(512)
    file.seek(0)
    refuse_other_kind(start)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            decoded(start[:4])
        except ValueError as error:
            raise InvalidRows(f"the file cannot be read: {error}") from error


def _lines[Line: (bytes, str)](file: IO[Line]) -> Iterator[Line]:
    """The lines of a file, each held in memory only up to `LINE_BYTES`: characters, where the file is text."""
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise InvalidRows(_TOO_LONG, row=number)
        yield line
        number += 1

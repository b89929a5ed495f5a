"""Rows out of files, one at a time: .jsonl, .json and .csv, also compressed, of which no line is longer than a row may
be, and .parquet."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InvalidRows
from ..system.texts import DuplicateKey, decoded, first_duplicate, parse_json, refuse_encoding
from .compressed import PACKED, decompressed

LINE_BYTES = 16 << 20
"""The longest row. As Python objects JSON takes up to 30 times its size (measured, `[[],[],...]`)."""
_TOO_LONG = f"has more than {LINE_BYTES >> 20} MiB; a row may have at most that: split it"
_A_LIST = "the file is a JSON list, expected one object per line: give it a name that ends in .json"
_BOM = b"\xef\xbb\xbf"
_HALF = re.compile("[\udc80-\udcff]")
"""What stands for a byte that is no UTF-8 (`surrogateescape`)."""
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|\?xml)[\s>]", re.IGNORECASE)
_OTHER_KINDS = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer and not the file itself: run `git lfs pull`"),
    *(
        (kind.magic, f"compressed by {kind.name}: decompress it, or give it a name such as rows.jsonl{ending}")
        for ending, kind in PACKED.items()
    ),
    (b"BZh", "compressed by bzip2: decompress it"),
    (b"\xfd7zXZ\0", "compressed by xz: decompress it"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet: extract it, or export it as .csv"),
    (b"PAR1", "a Parquet file: give it a name that ends in .parquet"),
    (b"ARROW1", "an Arrow file: write it as Parquet"),
    (b"SQLite format 3", "a SQLite database: export its table as .csv"),
)
"""First bytes of files that are no rows, and what to do."""
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 256
_SEPARATOR_LINE = re.compile(r'"?sep=([^"\r\n])"?\s*', re.IGNORECASE)
"""The first line by which spreadsheets name the separator of a CSV file's cells."""
_OTHER_SEPARATORS = (";", "\t", "|")
Row = dict[str, Any]


def refuse_other_kind(start: bytes) -> None:
    """Return if a file may have rows, by its first bytes. Raises InvalidRows: it is of another kind: names that."""
    for begin, what in _OTHER_KINDS:
        if start.startswith(begin):
            raise InvalidRows(f"the file is {what}")
    if _PAGE.match(start):
        raise InvalidRows("the file is a web page, such as the error page of a download: download it again")


def parse_line(line: str) -> Any:
    """A line of rows that are stored, and were checked. One may have the byte order mark of its file: a part of the
    rows has them in another order. Raises ValueError: it is not JSON."""
    return parse_json(line.removeprefix("\ufeff"), any_digits=True)


def read_ndjson(file: BinaryIO, *, blank_lines: bool = False) -> Iterator[Row]:
    """The rows of a file with one JSON object per line. Raises InvalidRows: a line is not JSON, too long, or has a key
    twice; names it.

    Args:
        blank_lines: skip them, instead of refusing them.
    """
    row = 0
    for number, marked in enumerate(_lines(file), start=1):
        line = marked.removeprefix(_BOM)  # of the file, or of one that was appended to it
        if blank_lines and not line.strip():
            continue
        if row == 0:
            refuse_other_kind(line)
            _refuse_encoding(marked)
        try:
            text = line.rstrip().decode()
        except UnicodeDecodeError as error:
            raise InvalidRows(
                f"is not UTF-8 text in line {number} ({error.reason}): save it as UTF-8", row=row
            ) from error
        try:
            parsed = parse_json(text, any_digits=True)
        except DuplicateKey as error:
            raise InvalidRows(f"in line {number} {error}", row=row) from error
        except RecursionError as error:
            raise InvalidRows(f"is nested too deeply in line {number}: flatten it", row=row) from error
        except ValueError as error:
            if row == 0 and text.lstrip().startswith("["):
                raise InvalidRows(_A_LIST) from error
            found = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else error
            raise InvalidRows(
                f"is not JSON in line {number} ({found}); expected one object per line", row=row
            ) from error
        if row == 0 and isinstance(parsed, list):
            raise InvalidRows(_A_LIST)
        yield parsed
        row += 1


def read_csv(file: BinaryIO) -> Iterator[Row]:
    """The rows of a CSV file with a header. All values are text, and an empty cell is an absent value, as in Llama
    Stack's own reader. Lines without a value are skipped; a first line such as `sep=;` names the separator. A column
    without a name, as data frames write their index, has its number: "unnamed column 1". Raises InvalidRows: the file
    is not CSV, its header has a name twice, or a row has more cells than the header; names the line."""
    csv.field_size_limit(LINE_BYTES)
    _check_kind(file)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _TextLines(text)
    row: int | None = None
    begin = 1
    try:
        first = next((line for line in lines if line.strip()), "")
        separator = _SEPARATOR_LINE.fullmatch(first)
        begin = lines.number
        reader = csv.reader(
            lines if separator else chain([first], lines), delimiter=separator[1] if separator else ",", strict=True
        )
        names = next((cells for cells in reader if _has_value(cells)), [])
        refuse_twice([name for name in names if name.strip()])
        row, begin = 0, lines.number + 1
        for cells in reader:
            if _has_value(cells):
                if any(cells[len(names) :]):
                    raise InvalidRows(_too_many_cells(names, begin), row=row)
                yield _csv_row(names, cells)
                row += 1
            begin = lines.number + 1
    except csv.Error as error:
        found = f"is not CSV in the line {begin} where it begins ({error})"
        whole = "" if row is not None else "the header "
        raise InvalidRows(f"{whole}{found}: close each quote, and write one within a cell twice", row=row) from error
    finally:
        text.detach()  # the caller closes the file


def _csv_row(names: list[str], cells: list[str]) -> Row:
    found = [
        (name if name.strip() else f"unnamed column {number}", cell)
        for number, (name, cell) in enumerate(zip(names, cells, strict=False), start=1)
        if cell
    ]
    if len(row := dict(found)) != len(found):
        refuse_twice([name for name, _ in found])
    return row


def _has_value(cells: list[str]) -> bool:
    """Whether a line has more than white space and separators: spreadsheets write their empty rows, too."""
    return any(cell.strip() for cell in cells)


def _too_many_cells(names: list[str], line: int) -> str:
    found = f"has more cells in line {line} than the header's {len(names)} columns"
    other = next((one for one in _OTHER_SEPARATORS if len(names) == 1 and one in names[0]), None)
    if other is None:
        return f"{found}: put a cell that contains the separator in double quotes"
    return f"{found}, whose cells are separated by {other!r}: separate all by ',', or begin the file with sep={other}"


def read_json(file: BinaryIO) -> Iterator[Row]:
    """The rows of a .json file: a list of objects, also under the only key of an object, or one object per line. Raises
    InvalidRows: it is none of these, or has a key twice."""
    start = _check_kind(file).removeprefix(_BOM).lstrip()
    if start.startswith(b"["):
        yield from _parsed(file)
    elif start.startswith(b"{") and _is_one_object(file):
        yield from _rows_within(_parsed(file))
    else:
        yield from read_ndjson(file, blank_lines=True)


def _parsed(file: BinaryIO) -> Any:
    try:
        return parse_json(file.read(), any_digits=True)
    except DuplicateKey as error:
        raise InvalidRows(f"in the file {error}") from error
    except RecursionError as error:
        raise InvalidRows("the file is nested too deeply: flatten it") from error
    except ValueError as error:
        raise InvalidRows(f"the file is not JSON ({error}); expected a list of objects") from error


def _is_one_object(file: BinaryIO) -> bool:
    """Whether a file that begins with an object has no other one in lines of their own."""
    try:
        first = b""
        while not first.strip(_BOM + b" \t\r\n"):
            first = file.readline(LINE_BYTES + 1)
        if len(first) > LINE_BYTES:
            return True
        text = decoded(first)
        try:
            parse_json(text, any_digits=True)
        except json.JSONDecodeError as error:
            return error.pos >= len(text.rstrip())  # it continues in the next line
        return not any(line.strip() for line in iter(lambda: file.readline(LINE_BYTES), b""))
    except (ValueError, RecursionError):
        return False  # reading its lines reports it
    finally:
        file.seek(0)


def _rows_within(document: Row) -> Iterator[Row]:
    """The rows of a file that is one object: those of its only list, or the object itself. Raises InvalidRows: it has
    several lists of rows, or a table by its columns."""
    from .rows import COLUMNS  # imports what processes that only convert do not need

    lists = {key: value for key, value in document.items() if key not in COLUMNS and _is_list_of_objects(value)}
    if lists and len(lists) == len(document):
        if len(lists) == 1:
            yield from next(iter(lists.values()))
            return
        names = ", ".join(map(repr, lists))
        raise InvalidRows(f"the file has lists of rows under {names}: write one of them as a file of its own")
    if document.keys() & COLUMNS and all(_is_column(value) for value in document.values()):
        raise InvalidRows(
            "the file is a table by its columns, expected a list of rows: write it with "
            "to_json(orient='records', lines=True)"
        )
    yield document


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _is_column(value: Any) -> bool:
    """Whether a value is a column as data frames write it: `{"0": ..., "1": ...}`, or a list of texts and numbers."""
    if isinstance(value, dict):
        return bool(value) and all(key.isdecimal() for key in value)
    return isinstance(value, list) and bool(value) and not any(isinstance(one, dict) for one in value)


def read_parquet(file: BinaryIO) -> Iterator[Row]:
    """The rows of a Parquet file, in batches: as many as fit into `_BATCH_BYTES` by the file's metadata, at most 256.

    The metadata may be wrong, and a value that is stored once may occur in every row (1 KB of file, 5.7 GiB of rows in
    batches of 1024): the memory limit of the service's reader ends it then. Raises InvalidRows: a column, or a field of
    one, is there twice; the file is damaged, or of another kind; pyarrow is not installed.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InvalidRows(
            "a Parquet file is read with pyarrow, which is not installed: run `pip install pyarrow`, write the rows as "
            ".jsonl, or have the service read the file by its uri (file://)"
        ) from error

    start = file.read(512)
    file.seek(0)
    if not start.startswith(b"PAR1"):
        refuse_other_kind(start)
    with _arrow_faults(), ParquetFile(file) as table:
        refuse_fields_twice(table.schema_arrow)
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            rows = max(1, group.num_rows)
            batch = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, group.total_byte_size)))
            for rows_read in table.iter_batches(batch_size=batch, row_groups=[number], use_threads=False):
                yield from rows_of_batch(rows_read)


@contextmanager
def _arrow_faults() -> Iterator[None]:
    """While this is open, a fault of a file that Arrow finds is an InvalidRows."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise InvalidRows(f"it cannot be read: {type(error).__name__}: {str(error)[:1000]}") from error


_TEXT_READERS: dict[str, Callable[[BinaryIO], Iterator[Row]]] = {
    ".csv": read_csv,
    ".jsonl": lambda file: read_ndjson(file, blank_lines=True),
    ".json": read_json,
    ".ndjson": lambda file: read_ndjson(file, blank_lines=True),
}


def _read_packed(ending: str, packed: str, file: BinaryIO) -> Iterator[Row]:
    with decompressed(file, packed) as text:
        yield from _TEXT_READERS[ending](text)


ROW_READERS: dict[str, Callable[[BinaryIO], Iterator[Row]]] = {
    **_TEXT_READERS,
    ".parquet": read_parquet,
    **{f"{ending}{packed}": partial(_read_packed, ending, packed) for packed in PACKED for ending in _TEXT_READERS},
}
"""By the ending of a file's name (`ending_of`)."""
ENDINGS = f"{', '.join(_TEXT_READERS)}, one of these and {' or '.join(PACKED)}, or .parquet"
"""The endings, for messages."""


def ending_of(name: str) -> str:
    """The ending of a file's name by which its rows are read, in small letters: `.jsonl`, `.csv.gz`."""
    *_, before, last = ["", "", *Path(name.lower()).suffixes]
    return f"{before}{last}" if last in PACKED else last


def stem_of(name: str) -> str:
    """A file's name without its ending."""
    name = Path(name).name
    return name[: len(name) - len(ending_of(name))]


def rows_of_batch(batch: Any) -> list[Row]:
    """The rows of a batch of Arrow. A value that Python lacks, such as a date in the year 20000, becomes an object."""
    try:
        rows: list[Row] = batch.to_pylist()
        return rows
    except (ValueError, OverflowError):
        columns = {name: [_python_value(one) for one in batch.column(name)] for name in batch.schema.names}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        kind = re.split(r"[\W\d]", str(scalar.type))[0]
        return {"binary" if "string" in kind else kind: f"{type(error).__name__}: {error}"[:200]}


def refuse_fields_twice(fields: Iterable[Any], where: str = "") -> None:
    """Return if all fields of a table of Arrow, and of each struct in it, have names of their own. Raises InvalidRows:
    names the field that is there twice.

    Args:
        fields: a schema, or the fields of a struct.
        where: path of the column whose fields these are.
    """
    listed = list(fields)
    refuse_twice([field.name for field in listed], where)
    for field in listed:
        _refuse_fields_twice_in(field.type, f"{where}{field.name}.")


def _refuse_fields_twice_in(kind: Any, where: str) -> None:
    if str(kind).startswith("struct"):
        refuse_fields_twice(kind.fields, where)
    for name in ("value_field", "key_field", "item_field"):  # of lists of any kind, and of maps
        if hasattr(kind, name):
            _refuse_fields_twice_in(getattr(kind, name).type, where)


def refuse_twice(columns: list[str], where: str = "") -> None:
    """Return if all names differ. Raises InvalidRows: names the first one that is there twice."""
    if (name := first_duplicate(columns)) is not None:
        raise InvalidRows(f"the column {where}{name} is there twice, expected each name once: rename one of them")


def _check_kind(file: BinaryIO) -> bytes:
    """The first bytes of a file that is of no other kind, nor UTF-16 or UTF-32."""
    start = file.read(4096)
    file.seek(0)
    refuse_other_kind(start)
    _refuse_encoding(start)
    return start


def _refuse_encoding(start: bytes) -> None:
    try:
        refuse_encoding(start)
    except ValueError as error:
        raise InvalidRows(f"the file cannot be read: {error}") from error


class _TextLines:
    """The lines of a text file, each held in memory only up to `LINE_BYTES` characters."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file = file
        self.number = 0
        """Of the last line, from 1."""

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise InvalidRows(f"line {self.number + 1} {_TOO_LONG}")
            self.number += 1
            if not line.isascii() and _HALF.search(line):
                raise InvalidRows(f"the file is not UTF-8 text in line {self.number}: save it as UTF-8")
            yield line


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, each held in memory only up to `LINE_BYTES`."""
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise InvalidRows(_TOO_LONG, row=number)
        yield line
        number += 1

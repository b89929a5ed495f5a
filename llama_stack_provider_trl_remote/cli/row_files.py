"""Rows out of a user's file, one at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows

Row = dict[str, Any]


def read_row_file(file: Path) -> Iterator[Row]:
    """The rows of a .jsonl, .json or .csv file.

    Raises:
        InvalidRequest: another kind of file, or one that is not what its name says; names the line.
        OSError: it cannot be read.
    """
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".jsonl": _jsonl,
        ".ndjson": _jsonl,
        ".json": _json,
        ".csv": _csv,
    }
    reader = readers.get(file.suffix.lower())
    if reader is None:
        hint = "expected .jsonl, .json or .csv; parquet files and Hugging Face datasets are registered by their uri."
        raise InvalidRequest("FILE", str(file), hint)
    try:
        yield from reader(file)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "FILE", str(file), f"it is not UTF-8 text ({error.reason} at byte {error.start})."
        ) from error


def _jsonl(file: Path) -> Iterator[Row]:
    with open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InvalidRows(f"{file}, line {number}: not JSON ({error})") from error


def _json(file: Path) -> Iterator[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise InvalidRows(f"{file}: not JSON ({error}); one object per line is a .jsonl file") from error
    if not isinstance(rows, list):
        raise InvalidRows(f"{file}: found a {type(rows).__name__}, expected a list of objects")
    yield from rows


def _csv(file: Path) -> Iterator[Row]:
    with open(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row:
                    named = len(reader.fieldnames or [])
                    raise InvalidRows(f"{file}, line {reader.line_num}: more cells than the header's {named} columns")
                # An empty cell is a column that this row does not have, as Llama Stack's own reader sees it.
                yield {name: cell for name, cell in row.items() if cell}
        except csv.Error as error:
            raise InvalidRows(f"{file}, line {reader.line_num}: not CSV ({error})") from error

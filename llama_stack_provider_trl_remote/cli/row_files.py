"""Reads rows from a user's file, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.specs.row_files import READERS, Row


def read_row_file(file: Path) -> Iterator[Row]:
    """Read the rows of a .jsonl, .json or .csv file.

    Raises:
        InvalidRequest: another kind of file, or one whose content does not match its suffix; names the line.
        OSError: it cannot be read.
    """
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        hint = "expected .jsonl, .json or .csv; parquet files and Hugging Face datasets are registered by their uri."
        raise InvalidRequest("FILE", str(file), hint)
    with open(file, "rb") as source:
        try:
            yield from reader(source)
        except InvalidRows as error:
            raise InvalidRows(f"{file}: {error}") from error

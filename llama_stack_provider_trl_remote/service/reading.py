"""Reads datasets in a process of its own, so that neither their size nor their libraries weigh on the service.

    python -m llama_stack_provider_trl_remote.service.reading check FILE ALGORITHM DATA_FORMAT
    python -m llama_stack_provider_trl_remote.service.reading convert URI DIRECTORY MAX_ROWS

prints one JSON object: a `Verdict`, or `{"sha256", "num_rows"}`, or `{"error"}` with a sentence for the user.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import parse_qsl, urlsplit

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.files import put_rows
from llama_stack_provider_trl.process import die_with_parent
from llama_stack_provider_trl.recipes.rows import check_rows
from llama_stack_provider_trl.recipes.spec import Algorithm, DataFormat

HUB = "huggingface"
Row = dict[str, Any]


class Verdict(TypedDict):
    """Whether an algorithm can train on a file of rows."""

    num_rows: int
    warnings: list[str]
    error: str | None
    """What is wrong with which row; None: nothing is."""


def check_file(path: Path, algorithm: Algorithm, data_format: DataFormat | None) -> Verdict:
    """Check an NDJSON file in constant memory.

    Raises:
        OSError: it cannot be read.
    """
    try:
        report = check_rows(read_ndjson(path), algorithm, data_format)
    except InvalidRows as error:
        return Verdict(num_rows=0, warnings=[], error=str(error))
    return Verdict(num_rows=report.num_rows, warnings=report.warnings, error=None)


def read_ndjson(path: Path, *, blank_lines: bool = False) -> Iterator[Row]:
    """The rows of a file with one JSON object per line.

    Args:
        blank_lines: pass over them, instead of refusing them.

    Raises:
        InvalidRows: a line is no JSON; names it.
    """
    with open(path, "rb") as file:
        number = 0
        for line in file:
            if blank_lines and line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidRows(f"is no JSON ({error}); expected one object per line", row=number) from error
            yield row
            number += 1


def read_csv(path: Path) -> Iterator[Row]:
    """The rows of a CSV file with a header; an empty cell is an absent value, everything else is text."""
    csv.field_size_limit(1 << 30)
    with open(path, newline="", encoding="utf-8-sig") as file:
        for number, cells in enumerate(csv.DictReader(file)):
            if None in cells:
                raise InvalidRows("has more cells than the header has names", row=number)
            yield {name: cell for name, cell in cells.items() if cell}


def read_json(path: Path) -> Iterator[Row]:
    """The rows of a .json file: a list of objects, or one object per line."""
    with open(path, "rb") as file:
        start = file.read(4096).lstrip()
    if not start.startswith(b"["):
        yield from read_ndjson(path, blank_lines=True)
        return
    try:
        yield from json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidRows(f"the file is no JSON ({error}); expected a list of objects") from error


def read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def read_hub(uri: str) -> Iterable[Row]:
    """`huggingface://datasets/ORG/NAME?split=train&name=CONFIG&revision=SHA`, from the local cache when offline."""
    from datasets import load_dataset

    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query))
    return load_dataset(parts.path.strip("/"), **{"split": "train", **options})


READERS = {".csv": read_csv, ".jsonl": lambda path: read_ndjson(path, blank_lines=True), ".json": read_json}
READERS |= {".ndjson": READERS[".jsonl"], ".parquet": read_parquet}
"""By a file name's ending."""


def convert(uri: str, directory: Path, max_rows: int) -> dict[str, Any]:
    """Store the rows of a file or a hub dataset as `<directory>/<sha256>.jsonl`."""
    rows: Iterable[Row] = read_hub(uri) if uri.startswith(f"{HUB}:") else READERS[Path(uri).suffix.lower()](Path(uri))
    blob = put_rows(directory, _limited(rows, max_rows))
    return {"sha256": blob.sha256, "num_rows": blob.num_rows}


class _TooMany(Exception):
    """Raised when there are more rows than the service takes."""


def _limited(rows: Iterable[Row], limit: int) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if number >= limit:
            raise _TooMany
        yield row


def main(arguments: list[str]) -> None:
    die_with_parent(os.getppid())  # nobody waits for the answer then, and nobody minds the time it takes
    try:
        match arguments:
            case ["check", path, algorithm, data_format]:
                answer: Any = check_file(Path(path), algorithm, data_format or None)  # type: ignore[arg-type]
            case ["convert", uri, directory, max_rows]:
                answer = convert(uri, Path(directory), int(max_rows))
            case _:
                sys.exit(__doc__)
    except _TooMany:
        answer = {"too_many": True}
    except InvalidRows as error:
        answer = {"error": str(error)}
    except Exception as error:  # csv's, pyarrow's, the hub's ...: whatever a reader of some format raises
        answer = {"error": f"it cannot be read: {type(error).__name__}: {str(error)[:1000]}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Reads datasets in a process of its own with a memory limit, so that neither size nor libraries affect the service.

    python -m llama_stack_provider_trl_remote.service.datasets.reader check FILE ALGORITHM DATA_FORMAT NAMES MEMORY_MB
    python -m llama_stack_provider_trl_remote.service.datasets.reader convert URI DIRECTORY MAX_ROWS MAX_MB \
        MIN_FREE_MB MEMORY_MB [FD]

prints one JSON object: a `RowsVerdict`, or `{"sha256", "num_rows"}`, or `{"error"}` with a sentence for the user. FD is
the file of the URI, opened when it was checked: the path is not opened again.

A file's ending decides its format, and what it is compressed by. Both a Parquet file (1.6 KB hold 4 GB of rows) and a
compressed one (1 KB of gzip hold 1 MB, 1 KB of zstd 30 MB) may be bombs, so limits hold for what comes out: the number
of rows, their bytes on the disk, the length of a line, memory and time. Text is decompressed a part at a time, once:
what is in it is not decompressed again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs import row_files
from llama_stack_provider_trl.specs.row_files import Row
from llama_stack_provider_trl.specs.row_verdicts import check_file, names_of
from llama_stack_provider_trl.system.files import free_bytes, put_rows
from llama_stack_provider_trl.system.process import die_with_parent, limit_memory

HUB = "huggingface"
_TWICE = re.compile(r"Multiple matches for FieldRef\.Name\((.*?)\) in|Column\(/(.*?)\) was specified twice")
"""What Arrow reports of a Parquet and of a JSON file."""
_NUMBERED = re.compile(r"\.\d+$")
_ROWS_PER_CHECK = 16
"""Rows between two checks of the free space: 16 of the longest are 256 MiB."""


def read_hub(uri: str) -> Iterable[Row]:
    """Read `huggingface://datasets/ORG/NAME?split=train&name=CONFIG&revision=SHA`, from the local cache when
    offline.

    Raises:
        InvalidRows: a column is there twice.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query))
    try:
        found = load_dataset(parts.path.strip("/"), **{"split": "train", **options})
    except DatasetGenerationError as error:
        if name := _TWICE.search(str(error.__cause__)):
            row_files.refuse_twice([name[1] or name[2]] * 2)
        raise
    numbered = (name for name in found.column_names if _NUMBERED.search(name))
    if found.builder_name == "csv" and any(_NUMBERED.sub("", name) in found.column_names for name in numbered):
        _refuse_header_twice(parts.path.strip("/"), options, len(found.column_names))
    return found


def _refuse_header_twice(name: str, options: dict[str, str], columns: int) -> None:
    """Return if the CSV files of a dataset have no name twice, of which pandas calls the second one `prompt.1`: their
    headers are read as rows.

    Raises:
        InvalidRows: a column is there twice.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    only_first = {"names": [str(number) for number in range(columns)], "nrows": 1, "keep_default_na": False}
    try:
        headers = load_dataset(name, **{"split": "train", **options, **only_first})
    except (DatasetGenerationError, ValueError, TypeError, OSError):
        return  # only its rows are here: the files were checked when they were read
    for header in headers:
        row_files.refuse_twice([str(column) for column in header.values() if column not in (None, "")])


def convert(uri: str, directory: Path, max_rows: int, spare: int, file: int | None) -> dict[str, Any]:
    """Store the rows of a file or a hub dataset as `<directory>/<sha256>.jsonl`.

    Args:
        spare: bytes that must stay free on the disk of `directory`.
        file: descriptor of the file; None: the uri is one of the hub.
    """
    if file is None:
        return _stored(read_hub(uri), directory, max_rows, spare)
    with open(file, "rb") as source:
        return _stored(row_files.ROW_READERS[row_files.ending_of(uri)](source), directory, max_rows, spare)


def _stored(rows: Iterable[Row], directory: Path, max_rows: int, spare: int) -> dict[str, Any]:
    blob = put_rows(directory, _limited(rows, max_rows, directory, spare))
    return {"sha256": blob.sha256, "num_rows": blob.num_rows}


class _TooMany(Exception):
    """Raised when a dataset has more rows than the service accepts."""


def _limited(rows: Iterable[Row], limit: int, directory: Path, spare: int) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if number >= limit:
            raise _TooMany
        if number % _ROWS_PER_CHECK == 0 and (free := free_bytes(directory)) < spare:
            raise OSError(errno.ENOSPC, f"{free >> 20} MiB are left, expected at least {spare >> 20}")
        yield row


def _limit_written(size: int) -> None:
    """Let this process write files of at most `size` bytes; more is an OSError (EFBIG)."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = size if most == resource.RLIM_INFINITY else min(size, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def main(arguments: list[str]) -> None:
    die_with_parent(os.getppid())  # without the parent the answer has no reader
    memory_mb = 0
    try:
        match arguments:
            case ["check", path, use, data_format, named, memory]:
                limit_memory((memory_mb := int(memory)) << 20)
                answer: Any = check_file(Path(path), use, data_format or None, names_of(named))  # type: ignore[arg-type]
            case ["convert", uri, directory, max_rows, max_mb, min_free_mb, memory, *file]:
                _limit_written(int(max_mb) << 20)
                limit_memory((memory_mb := int(memory)) << 20)
                descriptor = int(file[0]) if file else None
                answer = convert(uri, Path(directory), int(max_rows), int(min_free_mb) << 20, descriptor)
            case _:
                sys.exit(__doc__)
    except _TooMany:
        answer = {"too_many": True}
    except InvalidRows as error:
        answer = {"error": str(error)}
    except MemoryError:  # pyarrow's error derives from it
        answer = {"error": too_much_memory(memory_mb)}
    except Exception as error:  # each format's library has errors of its own: csv, pyarrow, the hub
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            answer = {"disk_full": error.strerror}
        elif isinstance(error, OSError) and error.errno == errno.EFBIG:
            answer = {"too_large": True}
        else:
            cause: BaseException = error
            while cause.__cause__ is not None:  # datasets reports "an error occurred" first
                cause = cause.__cause__
            answer = {"error": f"it cannot be read: {type(cause).__name__}: {str(cause)[:1000]}"}
    print(json.dumps(answer))


def too_much_memory(memory_mb: int) -> str:
    """The message of a reader that exceeded its memory limit."""
    return (
        f"reading it takes more than {memory_mb} MiB of memory (reader_memory_mb): split long rows, or send the rows "
        "as one JSON object per line"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

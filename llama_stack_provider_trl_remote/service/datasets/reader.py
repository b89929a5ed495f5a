"""Reads datasets in a process of its own with a memory limit, so that neither size nor libraries affect the service.

    python -m llama_stack_provider_trl_remote.service.datasets.reader check FILE ALGORITHM DATA_FORMAT NAMES MEMORY_MB
    python -m llama_stack_provider_trl_remote.service.datasets.reader convert URI DIRECTORY MAX_ROWS MAX_MB \
        MIN_FREE_MB KNOWN MEMORY_MB [FD]

prints one JSON object: a `RowsVerdict`, or `{"sha256", "num_rows"}`, or `{"error"}` with a sentence for the user. FD is
the file of the URI, opened when it was checked: the path is not opened again. Rows of the hub and of buckets have a
`stamp`, which is another one when their content is: where it is KNOWN, the answer is `{"same": true}`.

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
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs import row_files
from llama_stack_provider_trl.specs.row_files import Row
from llama_stack_provider_trl.specs.row_verdicts import check_file, names_of
from llama_stack_provider_trl.system.files import free_bytes, put_rows
from llama_stack_provider_trl.system.process import die_with_parent, limit_memory

from .buckets import read_bucket
from .hub import TooLargeFiles, read_hub
from .uris import BUCKET, bucket_files, hub_dataset

_SECRET = re.compile("TOKEN|SECRET|KEY|PASSWORD")
_ROWS_PER_CHECK = 16
"""Rows between two checks of the free space: 16 of the longest are 256 MiB."""


class _RowLimits(NamedTuple):
    """What the rows of a dataset may take."""

    rows: int
    size: int
    """Bytes that are written, and of files of the hub."""
    spare: int
    """Bytes that must stay free on each disk."""


def convert(uri: str, directory: Path, limits: _RowLimits, known: str | None, file: int | None) -> dict[str, Any]:
    """Store the rows of a file, a hub dataset or files of a bucket as `<directory>/<sha256>.jsonl`.

    Args:
        known: stamp of the rows that the caller has already; None: none.
        file: descriptor of the file; None: the uri is one of the hub or a bucket.
    """
    if file is not None:
        with open(file, "rb") as source:
            return _stored(row_files.ROW_READERS[row_files.ending_of(uri)](source), directory, limits)
    scheme, _, _ = uri.partition("://")
    if scheme == BUCKET:
        listed = read_bucket(bucket_files(uri), known)
        return {"same": True} if listed is None else {**_stored(listed.rows, directory, limits), "stamp": listed.stamp}
    with TemporaryDirectory(dir=directory) as work:
        found = read_hub(hub_dataset(uri), Path(work), known, limits.size, limits.spare)
        return {"same": True} if found is None else {**_stored(found.rows, directory, limits), "stamp": found.commit}


def _stored(rows: Iterable[Row], directory: Path, limits: _RowLimits) -> dict[str, Any]:
    blob = put_rows(directory, _limited(rows, limits.rows, directory, limits.spare))
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
            case ["convert", uri, directory, max_rows, max_mb, min_free_mb, known, memory, *file]:
                _limit_written(int(max_mb) << 20)
                limit_memory((memory_mb := int(memory)) << 20)
                descriptor = int(file[0]) if file else None
                limits = _RowLimits(int(max_rows), int(max_mb) << 20, int(min_free_mb) << 20)
                answer = convert(uri, Path(directory), limits, known or None, descriptor)
            case _:
                sys.exit(__doc__)
    except _TooMany:
        answer = {"too_many": True}
    except TooLargeFiles as error:
        answer = {"too_large": True, "what": str(error)}
    except InvalidRequest as error:  # InvalidRows, or a uri
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
            answer = {"error": f"it cannot be read: {type(cause).__name__}: {_without_secrets(str(cause))[:1000]}"}
    print(json.dumps(answer))


def _without_secrets(text: str) -> str:
    """A library's message without the values of variables that hold tokens and keys."""
    secrets = [value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def too_much_memory(memory_mb: int) -> str:
    """The message of a reader that exceeded its memory limit."""
    return (
        f"reading it takes more than {memory_mb} MiB of memory (reader_memory_mb): split long rows, or send the rows "
        "as one JSON object per line"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

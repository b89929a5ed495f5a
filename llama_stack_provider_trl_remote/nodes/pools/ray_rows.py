"""The Ray job that reads a dataset: Ray Data reads its files on the cluster, and this process uploads their rows.

    python -m llama_stack_provider_trl_remote.nodes.pools.ray_rows '{"path": "/shared/pairs.parquet", ...}'

It runs in Ray's cluster, in an environment that has ray[data] and this package. The order has no secret, since Ray
shows it to everyone who may see its jobs: like an agent, this process reads the token of the service from a file. The
last line of its output is what the service reports where it fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from llama_stack_provider_trl.errors import InvalidRows, TrlError
from llama_stack_provider_trl.specs import row_files
from llama_stack_provider_trl.system.files import Blob, put_rows

from ..identity import read_token
from .ray_jobs import OURS

PARQUET = (".parquet",)
JSON = (".jsonl", ".ndjson", ".json")
"""Endings of files that Ray Data reads for us."""
_BATCH_ROWS = 256
_LINE = "line"
_MOST_FILES = 100_000


class RowsOrder(NamedTuple):
    """What is to be read, and where its rows go."""

    path: str
    """A file, or a directory of files of one kind, on the cluster's machines."""
    roots: Sequence[str]
    """Directories, below one of which it must be."""
    service_url: str
    upload: str
    """Path of the service that takes the rows, without their digest."""
    token_file: str
    max_rows: int
    max_bytes: int
    seconds: float
    """After which this process ends, whatever the service does."""


def is_beneath(path: str, roots: Iterable[str]) -> bool:
    """Whether a path is a whole one below one of these directories, by its text."""
    parts = PurePosixPath(path)
    if not parts.is_absolute() or ".." in parts.parts or "\0" in path:
        return False
    return any(parts != PurePosixPath(root) and parts.is_relative_to(root) for root in roots)


def find_files(path: str, roots: Sequence[str]) -> list[str]:
    """The files of a dataset, in the order of their names; those of a directory have one kind. Raises InvalidRows:
    there are none, of several kinds, or of another one; a symbolic link leads out of the roots."""
    real_roots = [os.path.realpath(root) for root in roots]
    found = [path]
    if os.path.isdir(path):
        found = sorted(file for file in _below(path) if Path(file).suffix.lower() in (*PARQUET, *JSON))
        if not found:
            raise InvalidRows(f"{path} has no file that ends in {', '.join((*PARQUET, *JSON))}")
    elif not os.path.exists(path):
        raise InvalidRows(f"{path} does not exist on the machine of the Ray job")
    real = [os.path.realpath(file) for file in found]
    for name, file in zip(found, real, strict=True):
        if not is_beneath(file, real_roots):
            raise InvalidRows(f"{name} leads out of the pool's dataset_roots: copy it there")
        if not os.path.isfile(file):
            raise InvalidRows(f"{name} is not a regular file")
    kinds = {Path(file).suffix.lower() in PARQUET for file in real}
    if len(kinds) > 1:
        raise InvalidRows(f"{path} has files of Parquet and of JSON: name a directory with one kind")
    if odd := next((file for file in real if Path(file).suffix.lower() not in (*PARQUET, *JSON)), None):
        raise InvalidRows(f"{odd}: expected a file that ends in {', '.join((*PARQUET, *JSON))}")
    return real


def _below(directory: str) -> Iterator[str]:
    """Files below a directory, without hidden ones and what systems write beside data (`_SUCCESS`). Raises InvalidRows:
    there are too many."""
    number = 0
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith((".", "_"))]
        for name in files:
            if not name.startswith((".", "_")):
                number += 1
                if number > _MOST_FILES:
                    raise InvalidRows(f"{directory} has more than {_MOST_FILES} files: name a smaller directory")
                yield os.path.join(parent, name)


def limited(rows: Iterable[dict[str, Any]], directory: Path, max_rows: int, max_bytes: int) -> Iterator[dict[str, Any]]:
    """The rows, while they are written below a directory. Raises InvalidRows: they are too many, or too large."""
    for number, row in enumerate(rows):
        if number >= max_rows:
            raise InvalidRows(f"the dataset has more than {max_rows} rows (max_rows): split it")
        if number % _BATCH_ROWS == 0:
            check_size(sum(file.stat().st_size for file in directory.iterdir()), max_bytes)
        yield row


def check_size(size: int, most: int) -> None:
    """Refuse rows that take more bytes than the service accepts. Raises InvalidRows."""
    if size > most:
        raise InvalidRows(f"its rows take more than {most >> 20} MiB (max_upload_mb): split it")


def read_with_ray(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of files in their order, read by tasks of Ray Data."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    for number in (signal.SIGTERM, signal.SIGALRM):  # after Ray's own: the temporary files are removed
        signal.signal(number, lambda *_: sys.exit(1))
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    if Path(files[0]).suffix.lower() in PARQUET:
        for batch in ray.data.read_parquet(list(files)).iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow"):
            row_files.refuse_fields_twice(batch.schema)
            yield from row_files.rows_of_batch(batch)
        return
    # Ray's own reader of JSON gives every row the columns of all, and decodes a file at once; ours does neither.
    named = ray.data.from_items([{"file": file} for file in files], override_num_blocks=len(files))
    lines = named.map_batches(json_lines, batch_size=1)
    for batch in lines.iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow"):
        for line in batch.column(_LINE).to_pylist():
            yield json.loads(line)


def json_lines(batch: Mapping[str, Sequence[str]]) -> Iterator[dict[str, list[str]]]:
    """In a task of Ray Data: batches of the rows of one file, each row as JSON. Raises InvalidRows."""
    (name,) = batch["file"]
    lines: list[str] = []
    size = 0
    with open(name, "rb") as file:
        try:
            for row in row_files.ROW_READERS[Path(name).suffix.lower()](file):
                lines.append(json.dumps(row))
                size += len(lines[-1])
                if len(lines) >= _BATCH_ROWS or size >= row_files.LINE_BYTES:
                    yield {_LINE: lines}
                    lines, size = [], 0
        except InvalidRows as error:
            raise InvalidRows(f"{name}: {error}") from error
    if lines:
        yield {_LINE: lines}


def read(order: RowsOrder) -> Blob:
    """Read the rows of an order, and upload them. Returns their file, which is removed. Raises TrlError: the token file
    or the dataset cannot be read, or the service does not take the rows; OSError, and those of Ray."""
    from ...client import ServiceClient  # imports aiohttp, which a service that reads this module does not need

    client = ServiceClient(order.service_url, read_token(order.token_file))
    files = find_files(order.path, order.roots)
    report(f"Ray reads {len(files)} file{'s' if len(files) > 1 else ''}; this needs a free CPU of the cluster")
    with tempfile.TemporaryDirectory(prefix="trl-rows-") as directory:
        home = Path(directory)
        blob = put_rows(home, limited(read_with_ray(files), home, order.max_rows, order.max_bytes))
        check_size(blob.num_bytes, order.max_bytes)
        asyncio.run(client.put_blob(blob.sha256, blob.path, order.upload))
    return blob


def sentence(error: BaseException) -> str:
    """What was wrong. Ray wraps the error of a task, several times."""
    causes = [error]
    while (cause := getattr(causes[-1], "cause", None) or causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    ours = next((one for one in causes if isinstance(one, TrlError)), None)
    if ours is not None:
        return " ".join(str(ours).split())
    last = causes[-1]
    text = str(last).strip().splitlines()[-1:]
    return f"it cannot be read: {type(last).__name__}: {''.join(text)[:300]}"


def report(line: str) -> None:
    print(f"{OURS}{line}", flush=True)


def main(arguments: list[str]) -> int:
    order = RowsOrder(**json.loads(arguments[0]))
    signal.alarm(max(1, int(order.seconds)))  # the end of this process ends what Ray does for it
    try:
        blob = read(order)
    except Exception as error:  # each format's library, and Ray, have errors of their own
        report(sentence(error))
        return 1
    finally:
        signal.alarm(0)
    report(f"{blob.num_rows} rows, {blob.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Registers rows in a process of its own, so that their number does not load the service.

    python -m llama_stack_provider_trl_remote.service.datasets.registration BODY DIRECTORY MAX_ROWS

parses a body of POST /v1/datasets, stores its rows below DIRECTORY and prints one JSON object: `{"body", "sha256",
"num_rows"}` with the body without its rows, or the error.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fastapi import HTTPException
from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRows, shortage_behind
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl.system.offload import FairSlots, entered
from llama_stack_provider_trl.system.process import child_environment, die_with_parent
from llama_stack_provider_trl.system.texts import DuplicateKey, parse_json

from ..http.dataset_bodies import RegisterDataset, RowsSource
from ..http.errors import sentence
from ..http.received import TOO_DEEP, BodyMemory, is_too_deep, unstored
from ..space import Space, Use
from .children import OutOfTime, run

log = logging.getLogger(__name__)
MODULE = "llama_stack_provider_trl_remote.service.datasets.registration"
STAGING = ".incoming-"
"""Prefix of the names of received files, beside the stored rows."""
_CHILDREN = 2
"""Processes that parse at once."""
_SPOOLED = 16
"""Bodies that are received into files at once."""
_OVERHEAD = 256 << 20
_BYTES_PER_BYTE = 24
"""Bytes of memory for each byte of a body: `[[],[],` takes 20."""
_ROWS_PER_BODY = 3
"""Bytes of rows for each byte of a body at most: two bytes of UTF-8 become six (`\\u00e9`)."""
_SHOWN = 300


class StoredRows(NamedTuple):
    """Rows that a child has stored beside the body, not yet under their digest."""

    path: Path
    sha256: str
    num_rows: int


class Registration:
    """Receives bodies with many rows into files, which children parse.

    Args:
        directory: for the files, on the file system of the stored rows.
        space: of its disk.
        per_caller: children of one caller at once; None: all.
    """

    def __init__(
        self,
        directory: Path,
        max_rows: int,
        timeout: float,
        space: Space,
        per_caller: int | None = None,
    ) -> None:
        self._directory, self._max_rows, self._timeout = directory, max_rows, timeout
        self._space = space
        self._children = FairSlots(_CHILDREN, per_caller or _CHILDREN)
        self._spools = BodyMemory(_SPOOLED)

    @asynccontextmanager
    async def spool(self, size: int, caller: str) -> AsyncIterator[BinaryIO]:
        """A file for a body; it and its related files are removed when the request has been answered. Raises
        HTTPException: 503, the number of files is at its limit; 507, the disk is full.

        Args:
            size: bytes that the body may have.
        """
        async with self._spools.reserved(1, caller), entered(self._spooled(size)) as file:
            yield file

    async def parse(self, file: Path) -> tuple[Any, StoredRows]:
        """Parse a spooled body. Returns it without its rows, and the rows' file.

        Raises:
            HTTPException: the message that a small body would get; 507, the disk is full.
            JSONDecodeError.
        """
        async with self._children.taken(), entered(self._parsing(file)):
            found = await self._child(file)
        if "not_json" in found:
            raise json.JSONDecodeError(found["not_json"], "", found["position"])
        if "detail" in found:
            raise HTTPException(found["status"], found["detail"], found.get("headers"))
        stored = StoredRows(file.parent / f"{found['sha256']}.jsonl", found["sha256"], found["num_rows"])
        return found["body"], stored

    @contextmanager
    def _spooled(self, size: int) -> Iterator[BinaryIO]:
        with (
            self._reserved(size),
            tempfile.TemporaryDirectory(dir=self._directory, prefix=STAGING, ignore_cleanup_errors=True) as home,
            open(Path(home) / "body", "wb") as file,
        ):
            yield file

    @contextmanager
    def _parsing(self, file: Path) -> Iterator[None]:
        with self._reserved(_ROWS_PER_BODY * file.stat().st_size):
            yield

    @contextmanager
    def _reserved(self, size: int) -> Iterator[None]:
        """Reserve space. Raises HTTPException: 507."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._space.arriving(Use.ordered, self._directory, size, whole=True))
            except OSError as error:
                raise unstored(error) from error
            yield

    async def _child(self, file: Path) -> dict[str, Any]:
        argv = [sys.executable, "-m", MODULE, str(file), str(file.parent), str(self._max_rows)]
        environ = child_environment(os.environ, {})
        try:
            done = await run(argv, cwd=file.parent, environ=environ, limit=self._timeout)
        except OutOfTime:
            return _problem(413, f"its rows could not be read in {self._timeout:.0f} s (convert_timeout): {_INSTEAD}")
        try:
            answer: dict[str, Any] = json.loads(done.output)
        except ValueError:
            log.error("rows could not be read, the reader ended with %s: %s", done.exit_code, done.errors)
            return _problem(413, f"its rows take more memory than the service has for them: {_INSTEAD}")
        return answer


_INSTEAD = "upload rows with PUT /v1/blobs/SHA256 and register that"


def _problem(status: int, detail: str) -> dict[str, Any]:
    return {"status": status, "detail": detail}


def _read(body: Path, directory: Path, max_rows: int) -> dict[str, Any]:
    try:
        found = parse_json(body.read_bytes())
    except json.JSONDecodeError as error:
        return {"not_json": error.msg, "position": error.pos}
    except DuplicateKey as error:
        return _problem(400, f"in the body {error}")
    except RecursionError:
        return _problem(400, TOO_DEEP)
    except ValueError as error:
        return _problem(400, f"the body cannot be read: {error}")
    if is_too_deep(found):
        return _problem(400, TOO_DEEP)
    try:
        dataset = RegisterDataset.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        shown = _Shown(repr(first["input"])[:_SHOWN])
        return _problem(400, sentence({**first, "loc": ("body", *first["loc"]), "input": shown}, RegisterDataset))
    if not isinstance(dataset.source, RowsSource):
        return _problem(413, f"the body is larger than 1 MiB and holds no rows: {_INSTEAD}")
    if len(dataset.source.rows) > max_rows:
        return _problem(413, f"the dataset has more than {max_rows} rows (max_rows): split it")
    stored = put_rows(directory, dataset.source.rows)
    found["source"]["rows"] = []
    return {"body": found, "sha256": stored.sha256, "num_rows": stored.num_rows}


class _Shown:
    """A text whose `repr` is the text itself."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def main(arguments: list[str]) -> None:
    die_with_parent(os.getppid())
    gc.disable()  # all parsed objects are kept: searching them for cycles takes more time than parsing
    body, directory, max_rows = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    size = _OVERHEAD + _BYTES_PER_BYTE * body.stat().st_size
    with suppress(OSError, ValueError):  # macOS
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    try:
        answer = _read(body, directory, max_rows)
    except MemoryError:
        answer = _problem(413, f"its rows take more than {size >> 20} MiB of memory: {_INSTEAD}")
    except InvalidRows as error:
        answer = _problem(400, str(error))
    except OSError as error:
        shortage = shortage_behind(error)
        answer = {**_problem(shortage.status, shortage.described(error)), "headers": shortage.headers}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])

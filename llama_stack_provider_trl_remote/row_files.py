"""Rows of a user: read from a file, stored for an upload, and registered with the service."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.specs.row_files import ENDINGS, ROW_READERS, Row, ending_of
from llama_stack_provider_trl.system.files import Blob, put_rows

from .client import ServiceClient


class UploadedRows(NamedTuple):
    """Rows that the service has under a name."""

    dataset_id: str
    num_rows: int
    sha256: str


def read_row_file(file: Path) -> Iterator[Row]:
    """Read the rows of a .jsonl, .ndjson, .json or .csv file, also compressed (.gz, .zst), or of a .parquet file.

    Raises:
        InvalidRequest: another kind of file, or one whose content does not match its suffix; names the line.
        OSError: it cannot be read.
    """
    reader = ROW_READERS.get(ending_of(file.name))
    if reader is None:
        hint = f"expected a name that ends in {ENDINGS}; Hugging Face datasets are registered by their uri."
        raise InvalidRequest("FILE", str(file), hint)
    with open(file, "rb") as source:
        try:
            yield from reader(source)
        except InvalidRows as error:
            raise InvalidRows(f"{file}: {error}") from error


@contextmanager
def stored_rows(rows: Path | Iterable[Row]) -> Iterator[Blob]:
    """Rows of a file, or given ones, in a temporary file as they are uploaded. Raises InvalidRequest: as
    `read_row_file`, or a row that JSON cannot hold; OSError: the file cannot be read, or the temporary one written."""
    with tempfile.TemporaryDirectory(prefix="trl-remote-") as directory:
        yield put_rows(Path(directory), read_row_file(rows) if isinstance(rows, Path) else rows)


async def register_rows(client: ServiceClient, blob: Blob, dataset_id: str) -> UploadedRows:
    """Upload stored rows, unless the service has them, and register them. The same again changes nothing. Raises
    ServiceRefusal: 409, other rows are registered under this id; ServiceUnreachable."""
    await client.upload_rows(blob)
    source = {"type": "blob", "sha256": blob.sha256}
    body = {"dataset_id": dataset_id, "purpose": "post-training/messages", "source": source}
    await client.post("/v1/datasets", body)
    return UploadedRows(dataset_id, blob.num_rows, blob.sha256)


async def register_uri(client: ServiceClient, uri: str, dataset_id: str) -> None:
    """Register rows that the service reads itself once a job needs them. The same again changes nothing.

    Raises:
        ServiceRefusal: 400, the service reads no such uri; 409, another dataset has this id.
        ServiceUnreachable.
    """
    body = {"dataset_id": dataset_id, "purpose": "post-training/messages", "source": {"type": "uri", "uri": uri}}
    await client.post("/v1/datasets", body)


def name_by_content(stem: str, blob: Blob) -> str:
    """A dataset id that the same rows have again, and other rows never."""
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', stem)[:100]}-{blob.sha256[:12]}"


def has_preferences(stored: Path) -> bool:
    """Whether stored rows are pairs for DPO, by the first of them."""
    with open(stored, "rb") as rows:
        # Not at the top: commands that read no rows start without pydantic.
        from llama_stack_provider_trl.specs.rows import holds_pairs

        return holds_pairs(json.loads(rows.readline()))

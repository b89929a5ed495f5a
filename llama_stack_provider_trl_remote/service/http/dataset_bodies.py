"""Bodies and answers of the calls on datasets. Both providers behind the external API have these routes, and need no
other body of the service."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, StringConstraints

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.requests.options import RESERVED
from llama_stack_provider_trl.specs.names import CheckedNames, FreeText, problem_of_name

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Purpose = Literal["post-training/messages", "eval/question-answer", "eval/messages-answer"]


class RequestBody(Documented, CheckedNames):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class RowsSource(RequestBody):
    type: Literal["rows"]
    rows: Annotated[list[dict[str, Any]], FailFast(), FreeText()]
    """One object per row. Answers leave them out."""


class UriSource(RequestBody):
    type: Literal["uri"]
    uri: str = Field(max_length=4096)
    """An absolute path or file:// below one of the configured dataset_roots (.csv, .jsonl, .ndjson, .json, these
    also with .gz or .zst behind it, .parquet),
    huggingface://datasets/ORG/NAME?split=train&revision=COMMIT (also hf://datasets/ORG/NAME@COMMIT), s3://BUCKET/PATH
    below one of the configured dataset_buckets, or ray:///PATH below the dataset_roots of a pool of kind ray."""


class BlobSource(RequestBody):
    type: Literal["blob"]
    sha256: Sha256
    """Digest of rows that were uploaded to the training service (PUT /v1/blobs/{sha256})."""


Source = Annotated[RowsSource | UriSource | BlobSource, Field(discriminator="type")]


_METADATA = 65_536


def _plain(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    for key in metadata or ():
        if problem := problem_of_name(key):
            raise ValueError(f"a key: {problem}")
        if key == RESERVED:
            raise ValueError(f"the key {key!r} is reserved for files of OpenAI's API: choose another one")
    try:
        size = len(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be kept as JSON: {error}") from error
    if size > _METADATA:
        raise ValueError(f"it has {size} bytes as JSON, expected {_METADATA} at most")
    return metadata


class RegisterDataset(RequestBody):
    dataset_id: str | None = Field(None, min_length=1, max_length=512)
    """Name of the dataset; generated where it is left out."""
    purpose: Purpose = "post-training/messages"
    """As Llama Stack has it. Rows of any accepted shape can be trained on, whatever it is."""
    source: Source
    """Location of the rows."""
    metadata: Annotated[dict[str, Any] | None, AfterValidator(_plain), FreeText()] = None
    """Any JSON; returned unchanged, with `num_rows` and `sha256` once they are known. The key `openai` is reserved."""
    dataset_type: str | None = Field(None, max_length=512)
    """Kept in the metadata."""


class Dataset(BaseModel):
    """Llama Stack's own shape of a dataset."""

    identifier: str
    provider_id: str = "trl"
    provider_resource_id: str | None = None
    type: Literal["dataset"] = "dataset"
    owner: None = None
    purpose: Purpose
    source: Source
    metadata: dict[str, Any]


class ListDatasetsResponse(BaseModel):
    data: list[Dataset]
    next: str | None = None
    """Cursor: pass it as `after` for the next page; null: this is the last one."""

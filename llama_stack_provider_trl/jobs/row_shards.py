"""Parts of the rows of a dataset, each stored as rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import InvalidRequest
from ..requests.data import SHARDS
from ..specs.job import DatasetRef, ShardSpec
from ..system.files import Blob, put_lines


def refuse_more_shards(dataset_id: str, shard: ShardSpec, rows: int) -> None:
    """Refuse parts of which some would be empty. Raises InvalidRequest."""
    if shard.count > rows:
        hint = f"dataset {dataset_id!r} has at most {rows} rows, and each part needs one: send at most {rows}"
        raise InvalidRequest(SHARDS, shard.count, hint)


def stored_shard(
    dataset: DatasetRef, shard: ShardSpec, put: Callable[[Path, Iterable[bytes]], Blob] = put_lines
) -> DatasetRef:
    """Store a part of a dataset beside it, with its rows in their order.

    Args:
        put: stores rows, as `put_lines` does.

    Raises:
        InvalidRequest: there are more parts than rows.
        OSError: the part cannot be written.
    """
    refuse_more_shards(dataset.dataset_id, shard, dataset.num_rows)
    with open(dataset.path, "rb") as file:
        lines = (line for number, line in enumerate(file) if number % shard.count == shard.index)
        blob = put(dataset.path.parent, lines)
    return dataset.model_copy(update={"path": blob.path, "sha256": blob.sha256, "num_rows": blob.num_rows})

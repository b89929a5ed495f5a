"""What jobs that have not ended will write: which models they train, in which way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .database import Database


class Unfinished(NamedTuple):
    """Jobs that have not ended, and whose checkpoints are alike."""

    job_uuid: str
    """Of one of them."""
    model: str
    revision: str | None
    dtype: str
    is_adapter: bool
    merges: bool
    """Besides the adapter, the merged model is written."""
    work: str | None
    """What they do in place of training."""
    directory: str
    """In which the directories of their checkpoints lie."""


def unfinished(database: Database) -> Sequence[Unfinished]:
    """The kinds of jobs that have not ended. Raises StoreError."""
    return [
        Unfinished(*row)._replace(is_adapter=bool(row["is_adapter"]), merges=bool(row["merges"]))
        for row in database.select("select_unfinished", {})
    ]

"""The request and the answer of a preview."""

from __future__ import annotations

from pydantic import BaseModel, Field

from llama_stack_provider_trl.specs.events import InferenceCounts, PreviewedRow

from .bodies import PreflightBody, RowCounts

NOT_OF_JOBS = ("algorithm", "first_row", "rows")
"""Fields of these bodies that a job's body lacks."""


class PreviewBody(PreflightBody):
    """The body of a job of either kind, and which of its rows to show."""

    first_row: int = Field(0, ge=0, le=2**53)
    """The first row to show, counted from 0, of a mixture through all its datasets. Counts and histogram begin there,
    too."""
    rows: int = Field(10, ge=1, le=100)
    """Rows to show; of 8000 tokens and 100 pairs or sequences in all, further ones have counts only."""


class PreviewCounts(RowCounts):
    """The histogram has the lengths before the cut."""

    read: int
    """Rows behind the other counts: from `first_row` on, at most 2000, or fewer that have a million tokens."""


class PreviewResponse(BaseModel):
    max_seq_length: int
    data: PreviewCounts
    inference: InferenceCounts
    """Of the same rows: whether what is trained is what inference renders."""
    rows: list[PreviewedRow]
    warnings: list[str]

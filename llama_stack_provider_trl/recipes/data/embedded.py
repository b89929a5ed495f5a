"""Refuses token ids that a model has no embedding for: on the CPU they end in an IndexError, on a GPU in an assert.

A tokenizer may have more tokens than its model: some were added, and the model was not resized.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import JobFailure
from ...specs.events import Reason
from .token_texts import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_embedded(
    ids: Iterable[int],
    embeddings: int,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    reason: Reason = Reason.invalid_model,
) -> None:
    """Return if a model has an embedding for each token. Raises JobFailure: names the token, its id and the number of
    embeddings."""
    largest = max(ids, default=-1)
    if largest < embeddings:
        return
    token = TokenTexts(tokenizer).of([largest])[0]
    raise JobFailure(
        reason,
        f"{name}: the tokenizer gives id {largest} for the token {token!r}, and the model has {embeddings} embeddings. "
        "Resize the model (resize_token_embeddings) and save it again, or leave that token out.",
    )

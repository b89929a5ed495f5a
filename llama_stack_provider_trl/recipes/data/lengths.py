"""Lengths of prepared rows in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from datasets import Dataset


def row_lengths(dataset: Dataset) -> list[int]:
    """Tokens of each prepared row; of a pair, of its longer half with the prompt."""

    def of(column: str) -> Iterator[int]:
        # From Arrow's offsets, so that the ids do not become Python numbers.
        return chain.from_iterable(chunk.value_lengths().to_pylist() for chunk in dataset.data.column(column).chunks)

    if "input_ids" in dataset.column_names:
        return list(of("input_ids"))
    sides = zip(of("prompt_ids"), of("chosen_ids"), of("rejected_ids"), strict=True)
    return [prompt + max(chosen, rejected) for prompt, chosen, rejected in sides]

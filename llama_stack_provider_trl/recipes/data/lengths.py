"""Lengths of prepared rows in tokens, from Arrow's offsets: no token id is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import Dataset


def row_lengths(dataset: Dataset) -> torch.Tensor:
    """Tokens of each prepared row, or packed sequence, shape (rows,); of a pair, of its longer half with the prompt;
    of a prompt to answer, without the answer, as the model or its teacher reads it, whichever is longer."""
    if "input_ids" in dataset.column_names:
        return list_lengths(dataset, "input_ids")
    if "completion_ids" in dataset.column_names:
        return list_lengths(dataset, "prompt_ids") + list_lengths(dataset, "completion_ids")
    if "teacher_ids" in dataset.column_names:
        return torch.maximum(list_lengths(dataset, "prompt_ids"), list_lengths(dataset, "teacher_ids"))
    if "chosen_ids" not in dataset.column_names:
        return list_lengths(dataset, "prompt_ids")
    prompt, chosen, rejected = (list_lengths(dataset, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return prompt + torch.maximum(chosen, rejected)


def lengths_before_packing(dataset: Dataset) -> torch.Tensor:
    """Tokens of each row of a dataset that may be packed, in the order of the sequences, shape (rows,)."""
    if "seq_lengths" not in dataset.column_names:
        return row_lengths(dataset)
    values = [chunk.flatten().to_numpy() for chunk in dataset.data.column("seq_lengths").chunks]
    return torch.cat([torch.tensor(lengths) for lengths in values]).long()


def num_rows(dataset: Dataset) -> int:
    """Rows before packing, or of a dataset that is not packed."""
    if "seq_lengths" not in dataset.column_names:
        return len(dataset)
    return int(list_lengths(dataset, "seq_lengths").sum())


def list_lengths(dataset: Dataset, column: str) -> torch.Tensor:
    """Lengths of the lists of a column, shape (rows,)."""
    data = dataset.data if dataset._indices is None else dataset.flatten_indices().data
    found = [torch.tensor(chunk.value_lengths().to_numpy()) for chunk in data.column(column).chunks]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *found])


def histogram(lengths: torch.Tensor | Sequence[int]) -> list[dict[str, int]]:
    """Rows by length, in powers of two: those of more than `up_to` / 2 tokens and at most `up_to`."""
    counts: dict[int, int] = {}
    for length, rows in zip(*torch.as_tensor(lengths).unique(return_counts=True), strict=True):
        up_to = 1 << max(0, int(length) - 1).bit_length()
        counts[up_to] = counts.get(up_to, 0) + int(rows)
    return [{"up_to": up_to, "rows": counts[up_to]} for up_to in sorted(counts)]

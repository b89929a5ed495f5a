"""Packs several rows into one sequence: less padding, the same loss. `recipes.model.packing_check` keeps them apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import batched
from typing import Any

from datasets import Dataset, concatenate_datasets

IGNORED = -100
"""Label of a token outside the loss (the default of PyTorch's cross-entropy)."""
_CHUNK = 1000
"""Sequences that are built at a time, which bounds the size of their Python lists."""


def pack(dataset: Dataset, limit: int) -> Dataset:
    """Pack rows into sequences of at most `limit` tokens, by best fit decreasing (arXiv:2404.10830), as TRL's `bfd`.

    Args:
        dataset: the columns `input_ids` and `labels`; no row is longer than `limit`.

    Returns:
        The columns `input_ids`, `labels` and `seq_lengths`, the tokens of each row in the sequence. A row's first token
        has no label: nothing in its own row predicts it. Sequences are in the order of their first rows, and rows keep
        their order within a sequence.
    """
    lengths = [len(ids) for ids in dataset["input_ids"]]
    bins = sorted(best_fit(lengths, limit))
    return concatenate_datasets([_join(dataset, chunk) for chunk in batched(bins, _CHUNK)])


def best_fit(lengths: Iterable[int], limit: int) -> list[list[int]]:
    """Indices of the rows of each bin: the longest row first, each into the fullest bin that it fits into."""
    rows = sorted(enumerate(lengths), key=lambda item: (-item[1], item[0]))
    bins: list[list[int]] = []
    bins_by_free: dict[int, list[int]] = {}
    """Free tokens -> bins with so many."""
    free_sizes: list[int] = []
    """Its keys, ascending: at most `limit` of them for any number of rows."""
    for row, length in rows:
        position = bisect_left(free_sizes, length)
        if position == len(free_sizes):
            free, index = limit, len(bins)
            bins.append([])
        else:
            free = free_sizes[position]
            index = bins_by_free[free].pop()
            if not bins_by_free[free]:
                del bins_by_free[free], free_sizes[position]
        bins[index].append(row)
        left = free - length
        if left > 0:
            if left not in bins_by_free:
                insort(free_sizes, left)
            bins_by_free.setdefault(left, []).append(index)
    return [sorted(members) for members in bins]


def _join(dataset: Dataset, bins: tuple[list[int], ...]) -> Dataset:
    members = dataset[[row for rows in bins for row in rows]]
    ids, labels = iter(members["input_ids"]), iter(members["labels"])
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "seq_lengths": []}
    for rows in bins:
        parts = [(next(ids), next(labels)) for _ in rows]
        columns["input_ids"].append([token for one, _ in parts for token in one])
        columns["labels"].append([label for _, own in parts for label in (IGNORED, *own[1:])])
        columns["seq_lengths"].append([len(one) for one, _ in parts])
    features = dataset.features.copy()
    features["seq_lengths"] = features["input_ids"]
    return Dataset.from_dict(columns, features=features)


def num_rows(dataset: Dataset) -> int:
    """Rows before packing, or of a dataset that is not packed."""
    if "seq_lengths" not in dataset.column_names:
        return len(dataset)
    return sum(len(lengths) for lengths in dataset["seq_lengths"])

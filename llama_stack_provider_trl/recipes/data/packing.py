"""Packs several rows into one sequence: less padding, the same loss. `recipes.model.packing_check` keeps them apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import batched, chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from .lengths import row_lengths
from .tables import IGNORED, PACKED_COLUMNS, in_memory, schema

Numbers = np.ndarray[Any, np.dtype[np.int32]]
_CHUNK_TOKENS = 1 << 22
"""Tokens that are copied at a time, at most: 32 MiB of ids and labels."""


def pack(dataset: Dataset, limit: int) -> Dataset:
    """Pack rows into sequences of at most `limit` tokens, by best fit decreasing (arXiv:2404.10830), as TRL's `bfd`.
    Returns the columns `input_ids`, `labels` and `seq_lengths`, the tokens of each row in the sequence. A row's first
    token has no label: nothing in its own row predicts it. Sequences are in the order of their first rows, and rows
    keep their order within a sequence.

    Args:
        dataset: the columns `input_ids` and `labels`; no row is longer than `limit`.
    """
    return in_memory(packed_tables(dataset, limit))


def packed_tables(dataset: Dataset, limit: int) -> Iterator[pa.Table]:
    """The sequences of `pack`, in memory a part at a time, beside a number or two for each row."""
    bins = sorted(best_fit(row_lengths(dataset), limit))
    ids, labels = _Lists(dataset, "input_ids"), _Lists(dataset, "labels")
    for members in batched(bins, max(1, _CHUNK_TOKENS // limit)):
        yield _join(ids, labels, members)


def best_fit(lengths: torch.Tensor | Sequence[int], limit: int) -> list[list[int]]:
    """Indices of the rows of each bin: the longest row first, each into the fullest bin that it fits into."""
    tokens = torch.as_tensor(lengths)
    rows = tokens.argsort(descending=True, stable=True)
    bins: list[list[int]] = []
    bins_by_free: dict[int, list[int]] = {}
    """Free tokens -> bins with so many."""
    free_sizes: list[int] = []
    """Its keys, ascending: at most `limit` of them for any number of rows."""
    for row, length in zip(rows.tolist(), tokens[rows].tolist(), strict=True):
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


class _Lists:
    """A column of lists, of which rows are read from Arrow's memory without a copy."""

    def __init__(self, dataset: Dataset, column: str) -> None:
        chunks = dataset.data.column(column).chunks
        self._starts = np.cumsum([0, *map(len, chunks)])
        self._offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._values = [chunk.values.to_numpy() for chunk in chunks]

    def take(self, rows: Sequence[int]) -> list[Numbers]:
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        numbers = np.asarray(rows) - self._starts[chunks]
        found = []
        for chunk, number in zip(chunks.tolist(), numbers.tolist(), strict=True):
            offsets = self._offsets[chunk]
            found.append(self._values[chunk][offsets[number] : offsets[number + 1]])
        return found


def _join(ids: _Lists, labels: _Lists, bins: Sequence[list[int]]) -> pa.Table:
    rows = list(chain.from_iterable(bins))
    parts = ids.take(rows)
    sizes = np.array([len(part) for part in parts], dtype=np.int32)
    ends = np.cumsum(sizes, dtype=np.int32)
    trained = np.concatenate(labels.take(rows)).astype(np.int32)
    trained[(ends - sizes)[sizes > 0]] = IGNORED
    of_bins = np.cumsum([0, *map(len, bins)], dtype=np.int32)
    tokens = np.concatenate([[0], ends]).astype(np.int32)[of_bins]
    of = schema(PACKED_COLUMNS)
    columns = ((tokens, np.concatenate(parts).astype(np.int32)), (tokens, trained), (of_bins, sizes))
    return pa.Table.from_arrays(
        [pa.ListArray.from_arrays(offsets, values, type=of.field(0).type) for offsets, values in columns], schema=of
    )

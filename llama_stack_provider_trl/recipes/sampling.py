"""Which rows an epoch sees, and in which order: a function of (seed, epoch) and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """Row indices of one epoch.

    Each epoch is a fresh permutation of all rows (or their order as given), of which the first `rows_per_epoch` are
    used. With `max_steps_per_epoch` an epoch thus ends early, and the next one shuffles all rows again, so that later
    rows are not shut out.

    Args:
        num_rows: rows in the dataset.
        rows_per_epoch: how many of them an epoch takes; None: all.
        shuffle: False keeps the given order in every epoch.
        seed: with the epoch's number, decides the permutation on every machine alike.
    """

    def __init__(self, num_rows: int, rows_per_epoch: int | None, *, shuffle: bool, seed: int) -> None:
        self.num_rows, self.shuffle, self.seed = num_rows, shuffle, seed
        self.rows_per_epoch = num_rows if rows_per_epoch is None else min(num_rows, rows_per_epoch)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows_per_epoch

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.rows_per_epoch))
        # A CPU generator: the same numbers whatever the training device is.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.num_rows, generator=generator)[: self.rows_per_epoch].tolist())

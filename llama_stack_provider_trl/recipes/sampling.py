"""Which rows an epoch sees, and in which order: a function of (seed, epoch) and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

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
        multiple_of: several ranks take equal shares of so many rows; what is missing at the end of an epoch is filled
            up with index `num_rows`, a row without a loss (`recipes.data.with_filler`).
    """

    def __init__(
        self, num_rows: int, rows_per_epoch: int | None, *, shuffle: bool, seed: int, multiple_of: int = 1
    ) -> None:
        self.num_rows, self.shuffle, self.seed = num_rows, shuffle, seed
        self.rows_per_epoch = num_rows if rows_per_epoch is None else min(num_rows, rows_per_epoch)
        self.num_fillers = -self.rows_per_epoch % multiple_of
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows_per_epoch + self.num_fillers

    def __iter__(self) -> Iterator[int]:
        return chain(self._rows(), repeat(self.num_rows, self.num_fillers))

    def _rows(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.rows_per_epoch))
        # A CPU generator: the same numbers whatever the training device is.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.num_rows, generator=generator)[: self.rows_per_epoch].tolist())

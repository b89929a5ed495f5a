"""Which rows an epoch sees, in which order, and which of them an optimizer step takes: a function of (seed, epoch) and
the rows per step, and of nothing else. How many processes share a step out does not matter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import Sampler


class Position(NamedTuple):
    """How far a training is in its data, counted in rows and not in batches."""

    epoch: int
    """0-based."""
    row: int
    """Rows of the epoch's order that have been seen: the index in it of the first unseen one."""


@dataclass(frozen=True)
class Share:
    """How the processes of an attempt share out the rows of one optimizer step.

    `rows_per_step` is the job's, whatever the attempt looks like; where batches and processes do not divide it, the
    slots that are left over take a row without a loss.
    """

    rows_per_step: int
    """The global batch: rows (SFT) or pairs (DPO) per optimizer step, over all processes."""
    batch_size: int
    """Rows per process and micro step."""
    world_size: int = 1

    @classmethod
    def of(cls, rows_per_step: int, batch_size: int, world_size: int) -> Share:
        """Batches are never larger than needed to give every process its part."""
        return cls(rows_per_step, min(batch_size, -(-rows_per_step // world_size)), world_size)

    @property
    def accumulation_steps(self) -> int:
        """Micro steps per optimizer step."""
        return -(-self.rows_per_step // (self.batch_size * self.world_size))

    @property
    def slots_per_step(self) -> int:
        """Rows that the processes take together in one optimizer step, with those that have no loss."""
        return self.accumulation_steps * self.batch_size * self.world_size

    @property
    def needs_filler(self) -> bool:
        """Whether a row without a loss must be at hand."""
        return self.world_size > 1 or self.slots_per_step != self.rows_per_step


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
            up with index `num_rows`, a row without a loss (`recipes.data.prepare.with_filler`).
        share: how each optimizer step is shared out; every one but an epoch's last is filled up to its slots. None:
            there are no steps, as in an evaluation.
    """

    def __init__(
        self,
        num_rows: int,
        rows_per_epoch: int | None,
        *,
        shuffle: bool,
        seed: int,
        multiple_of: int = 1,
        share: Share | None = None,
    ) -> None:
        self.num_rows, self.shuffle, self.seed = num_rows, shuffle, seed
        self.rows_per_epoch = num_rows if rows_per_epoch is None else min(num_rows, rows_per_epoch)
        self.rows_per_step = share.rows_per_step if share else max(1, self.rows_per_epoch)
        self._fillers_per_step = share.slots_per_step - share.rows_per_step if share else 0
        full_steps, rest = divmod(self.rows_per_epoch, self.rows_per_step)
        if not share:
            full_steps, rest = 0, self.rows_per_epoch
        self._fillers_at_end = -rest % multiple_of
        self.num_fillers = full_steps * self._fillers_per_step + self._fillers_at_end
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps."""
        return -(-self.rows_per_epoch // self.rows_per_step)

    def position(self, step: int) -> Position:
        """Where a training is after `step` optimizer steps. The last step of an epoch may be short."""
        epoch, steps = divmod(step, self.steps_per_epoch)
        return Position(epoch, steps * self.rows_per_step)

    def rows_of_step(self, step: int) -> int:
        """How many rows the optimizer step after the first `step` takes."""
        return min(self.rows_per_step, self.rows_per_epoch - self.position(step).row)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows_per_epoch + self.num_fillers

    def __iter__(self) -> Iterator[int]:
        rows = self._rows()
        for start in range(0, self.rows_per_epoch, self.rows_per_step):
            of_step = rows[start : start + self.rows_per_step]
            yield from of_step
            is_full = self._fillers_per_step and len(of_step) == self.rows_per_step
            yield from [self.num_rows] * (self._fillers_per_step if is_full else 0)
        yield from [self.num_rows] * self._fillers_at_end

    def _rows(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.rows_per_epoch))
        # A CPU generator: the same numbers whatever the training device is.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        rows: list[int] = torch.randperm(self.num_rows, generator=generator)[: self.rows_per_epoch].tolist()
        return rows

"""The order of an epoch's rows, and which of them each optimizer step takes.

Both are a function of the seed, the epoch and the rows per step. The number of processes does not change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from ...specs.job import JobSpec
from .mixture import Mixture

_BLOCK = 1 << 16
"""Rows whose numbers are Python objects at a time."""


class Position(NamedTuple):
    """How far a training is in its data, counted in rows."""

    epoch: int
    """0-based."""
    row: int
    """Rows of the epoch that have been seen: the index, in the epoch's order, of the first unseen one."""


@dataclass(frozen=True)
class BatchPlan:
    """How the processes of an attempt divide the rows of one optimizer step into batches.

    `rows_per_step` is the job's in every attempt. Where batches and processes do not divide it, the remaining slots
    take a filler: a row without a loss.
    """

    rows_per_step: int
    """The global batch: rows (SFT) or pairs (DPO) per optimizer step, over all processes."""
    batch_size: int
    """Rows per process and micro step."""
    world_size: int = 1
    sharers: int = 1
    """Processes that take the same rows (`recipes.fast.context_parallel`)."""

    @classmethod
    def of(cls, rows_per_step: int, batch_size: int, world_size: int, sharers: int = 1) -> BatchPlan:
        """A plan with batches of at most `batch_size` rows, and no larger than an equal part for every process."""
        return cls(rows_per_step, min(batch_size, -(-rows_per_step * sharers // world_size)), world_size, sharers)

    def with_batches_of(self, batch_size: int) -> BatchPlan:
        """The plan of the same steps with batches of at most so many rows."""
        return BatchPlan.of(self.rows_per_step, batch_size, self.world_size, self.sharers)

    @classmethod
    def of_job(cls, spec: JobSpec) -> BatchPlan:
        """The plan that the job's own fields give."""
        return cls.of(spec.rows_per_step, spec.data.batch_size, spec.ranks, spec.context_parallel_size)

    def applied(self, spec: JobSpec) -> JobSpec:
        sizes = {"batch_size": self.batch_size, "gradient_accumulation_steps": self.accumulation_steps}
        return spec.changed(ranks=self.world_size, **sizes)

    @property
    def groups(self) -> int:
        """Processes, or groups of processes that share rows, that take different rows."""
        return self.world_size // self.sharers

    @property
    def accumulation_steps(self) -> int:
        return -(-self.rows_per_step // (self.batch_size * self.groups))

    @property
    def slots_per_step(self) -> int:
        """Rows per optimizer step over all processes, fillers included."""
        return self.accumulation_steps * self.batch_size * self.groups

    @property
    def needs_filler(self) -> bool:
        return self.world_size > 1 or self.slots_per_step != self.rows_per_step


class EpochSampler(Sampler[int]):
    """Row indices of one epoch.

    Each epoch is a new permutation of all rows (or the given order), of which the first `rows_per_epoch` are used.
    With `max_steps_per_epoch` an epoch ends early. The next one shuffles all rows again, so that every row can occur.

    Args:
        rows_per_epoch: how many of them an epoch takes; None: all.
        shuffle: False keeps the given order in every epoch.
        seed: determines the permutation together with the epoch's number, identically on every machine.
        multiple_of: rows that all ranks take together per batch. The end of an epoch is filled up to a multiple of it
            with index `num_rows`, the filler row (`recipes.data.prepare.with_filler`).
        batch_plan: the batches of each optimizer step; every step but an epoch's last is filled up to its slots. None:
            there are no optimizer steps, as in an evaluation.
        mixture: of the datasets that the rows are of; None: there is one, of which an epoch takes each row once.
        lengths: of each row, in tokens: the rows of a step are taken longest first, so that those of a batch, and of
            the batches that ranks compute at the same time, are padded least. None: in the epoch's order.
        repeated: rows of a batch, and how many ranks take it: accelerate gives each rank the next batch. Batches are
            full then, by `multiple_of`.
    """

    def __init__(
        self,
        num_rows: int,
        rows_per_epoch: int | None,
        *,
        shuffle: bool,
        seed: int,
        multiple_of: int = 1,
        batch_plan: BatchPlan | None = None,
        mixture: Mixture | None = None,
        lengths: torch.Tensor | Sequence[int] | None = None,
        repeated: tuple[int, int] = (1, 1),
    ) -> None:
        self._repeated = repeated
        self._lengths = None if lengths is None else torch.as_tensor(lengths)
        self.num_rows, self.shuffle, self.seed = num_rows, shuffle, seed
        self._mixture = mixture.capped(rows_per_epoch) if mixture else None
        most = self._mixture.rows_per_epoch if self._mixture else num_rows
        self.rows_per_epoch = most if rows_per_epoch is None else min(most, rows_per_epoch)
        self.rows_per_step = batch_plan.rows_per_step if batch_plan else max(1, self.rows_per_epoch)
        self._fillers_per_step = batch_plan.slots_per_step - batch_plan.rows_per_step if batch_plan else 0
        full_steps, rest = divmod(self.rows_per_epoch, self.rows_per_step)
        if not batch_plan:
            full_steps, rest = 0, self.rows_per_epoch
        self._fillers_at_end = -rest % multiple_of
        self.num_fillers = full_steps * self._fillers_per_step + self._fillers_at_end
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows_per_epoch // self.rows_per_step)

    def position(self, step: int) -> Position:
        """The position after `step` optimizer steps. The last step of an epoch may be short."""
        epoch, steps = divmod(step, self.steps_per_epoch)
        return Position(epoch, steps * self.rows_per_step)

    def rows_of_step(self, step: int) -> int:
        """Rows of the optimizer step that follows the first `step` ones."""
        return min(self.rows_per_step, self.rows_per_epoch - self.position(step).row)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return (self.rows_per_epoch + self.num_fillers) * self._repeated[1]

    def __iter__(self) -> Iterator[int]:
        size, ranks = self._repeated
        for batch in batched(self._filled(), size):
            for _ in range(ranks):
                yield from batch

    def _filled(self) -> Iterator[int]:
        for of_step in self._steps():
            yield from of_step
            is_full = self._fillers_per_step and len(of_step) == self.rows_per_step
            yield from [self.num_rows] * (self._fillers_per_step if is_full else 0)
        yield from [self.num_rows] * self._fillers_at_end

    def _steps(self) -> Iterator[list[int]]:
        rows = self._rows()
        size = max(1, _BLOCK // self.rows_per_step) * self.rows_per_step
        for begin in range(0, self.rows_per_epoch, size):
            of_block = rows[begin : begin + size]
            tokens = None if self._lengths is None else self._lengths[of_block].tolist()
            block = of_block.tolist()
            for start in range(0, len(block), self.rows_per_step):
                step = range(start, min(start + self.rows_per_step, len(block)))
                if tokens is not None:
                    yield [block[number] for number in sorted(step, key=tokens.__getitem__, reverse=True)]
                else:
                    yield block[step.start : step.stop]

    def _rows(self) -> torch.Tensor:
        mixed = None
        if self._mixture is not None:
            mixed = self._mixture.rows(self.epoch, self.seed, shuffle=self.shuffle)
        if not self.shuffle:
            return torch.arange(self.rows_per_epoch) if mixed is None else mixed
        # On the CPU, so that the numbers do not depend on the training device.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.num_rows if mixed is None else len(mixed), generator=generator)
        return order[: self.rows_per_epoch] if mixed is None else mixed[order]


class MismatchingSampler(EpochSampler):
    """Pairs each row of an optimizer step with another one of the same step, whose answer its prompt does not have.

    In the order of the dataset each row gets the one before it, and the first one the last: every answer once. Which
    ranks and micro steps the rows are in changes nothing. A row that a mixture has twice in a step gets the same other
    one each time. An evaluation is one such step. Yields `number_of_pair`.
    """

    def _steps(self) -> Iterator[list[int]]:
        for of_step in super()._steps():
            ordered = sorted(set(of_step))
            before = dict(zip(ordered, [ordered[-1], *ordered[:-1]], strict=True))
            yield [number_of_pair(row, before[row], self.num_rows) for row in of_step]


def number_of_pair(row: int, other: int, num_rows: int) -> int:
    """One number for two rows: what a sampler may yield. A filler, row `num_rows`, is its own number."""
    return row + other * (num_rows + 1)


def pair_of_number(number: int, num_rows: int) -> tuple[int, int]:
    """The two rows of `number_of_pair`."""
    other, row = divmod(number, num_rows + 1)
    return row, other


def epoch_of_job(spec: JobSpec, rows: int, batch_plan: BatchPlan, mixture: Mixture | None = None) -> EpochSampler:
    """An epoch of a job in the given order, by which its steps are planned.

    Args:
        rows: that are trained on; of a packed job, sequences.
        mixture: of the datasets that they are of; None: there is one.
    """
    cap = None if spec.train.max_steps_per_epoch is None else spec.train.max_steps_per_epoch * batch_plan.rows_per_step
    return EpochSampler(rows, cap, shuffle=False, seed=spec.data.seed, batch_plan=batch_plan, mixture=mixture)

"""The rows of each epoch, optimizer step and batch: Trainer's samplers replaced by ours."""

from __future__ import annotations

from typing import Any

from ..data.lengths import num_rows, row_lengths
from ..data.sampling import EpochSampler
from .job_trainer import JobTrainer


class DataOrder(JobTrainer):
    sampler_class: type[EpochSampler] = EpochSampler
    _train_sampler: EpochSampler

    @property
    def num_rows(self) -> int:
        """Rows that are trained on; of packed sequences, the rows in them."""
        return num_rows(self.train_dataset) - self.batch_plan.needs_filler

    def rows_of(self, dataset: Any) -> int:
        """Rows (or packed sequences) of a dataset that count: without the filler."""
        return len(dataset) - self.batch_plan.needs_filler

    @property
    def rows_of_step(self) -> int:
        """Rows (SFT) or pairs (DPO) of the optimizer step at hand, over all ranks and micro steps."""
        return self._train_sampler.rows_of_step(self.state.global_step)

    @property
    def groups_by_length(self) -> bool:
        """Whether the rows of an optimizer step are put into batches by length. Its numbers do not depend on which
        rows share a batch, unless something is averaged over a batch."""
        spec, batch_plan = self.spec, self.batch_plan
        has_batch_means = spec.method.has_batch_means or self.aux_loss_enabled or spec.data.packed
        several = batch_plan.groups * batch_plan.accumulation_steps > 1
        # Rank 0 gets the longest rows of every step: one worker would never see short ones.
        return spec.data.group_by_length and several and not has_batch_means and spec.train.averaging is None

    def begin_epoch(self, epoch: int) -> None:
        """Set the sampler's epoch. accelerate does not reach it through a dataloader that skips batches on several
        ranks: a job resumed in the middle of a later epoch would continue with the first epoch's order."""
        self._train_sampler.set_epoch(epoch)

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        steps = self.spec.train.max_steps_per_epoch
        cap = None if steps is None else steps * self.batch_plan.rows_per_step
        dataset = self.train_dataset if train_dataset is None else train_dataset
        lengths = row_lengths(dataset) if self.groups_by_length else None
        self._train_sampler = self._sampler(
            dataset,
            cap,
            shuffle=self.spec.train.shuffle,
            batch_plan=self.batch_plan,
            mixture=self.mixture,
            lengths=lengths,
            batch_size=self.spec.data.batch_size,
        )
        return self._train_sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> EpochSampler:
        return self._sampler(eval_dataset, None, shuffle=False, batch_size=self.spec.data.evaluated_batch_size)

    def _sampler(
        self, dataset: Any, cap: int | None, *, shuffle: bool, batch_size: int, **of_steps: Any
    ) -> EpochSampler:
        world, sharers = self.args.world_size, self.batch_plan.sharers
        multiple = world // sharers * batch_size if world > 1 else 1
        return self.sampler_class(
            self.rows_of(dataset),
            cap,
            shuffle=shuffle,
            seed=self.spec.data.seed,
            multiple_of=multiple,
            repeated=(batch_size, sharers),
            **of_steps,
        )

"""The micro steps of a job: how many there are, the largest batch of one, which are computed together, and whether
attention adds in a fixed order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset

from ..specs.job import JobSpec
from .data.lengths import list_lengths, row_lengths
from .data.mixture import Mixture
from .data.sampling import BatchPlan, epoch_of_job
from .distributed import ranks
from .fast.attention import LARGEST_ACCUMULATORS, LARGEST_HEAD, largest_head
from .fast.batches import first_largest, largest_groups
from .fast.larger_batches import larger_plans, why_separate
from .memory.estimate import estimate, fixed_order_limits
from .memory.messages import gib
from .memory.nearest import Capacity
from .memory.trace import Batch

SHARE_FOR_MERGED = 0.7
"""Of a device's memory, for the estimate of merged micro batches. Nobody asked for them: an estimate that is too low
may not end the job."""
GIVEN_UP = "given_up"
"""Of a memory check's `fixed_order`: what is free does not hold what attention would take for it."""


@dataclass(frozen=True)
class StepPlan:
    epochs: int
    steps_per_epoch: int
    total_steps: int
    global_batch: int
    """Rows (SFT) or pairs (DPO) per optimizer step."""
    batch: Batch


def plan_steps(
    spec: JobSpec,
    lengths: torch.Tensor | Sequence[int],
    batch_plan: BatchPlan | None = None,
    mixture: Mixture | None = None,
) -> StepPlan:
    """Compute the steps that the trainer will do with a job's rows.

    Args:
        lengths: tokens of each row that is trained on; of a pair, those of its longer half; of a packed job, of each
            sequence.
        batch_plan: the batches of each optimizer step; None: those that the job's own fields give.
        mixture: of the datasets that they are of; None: there is one.
    """
    batch_plan = batch_plan or BatchPlan.of_job(spec)
    epoch = epoch_of_job(spec, len(lengths), batch_plan, mixture)
    steps = epoch.steps_per_epoch
    return StepPlan(
        spec.train.n_epochs,
        steps,
        steps * spec.train.n_epochs,
        batch_plan.rows_per_step,
        _largest_batch(spec, batch_plan, epoch.rows_per_epoch, int(torch.as_tensor(lengths).max())),
    )


def _largest_batch(spec: JobSpec, batch_plan: BatchPlan, rows: int, tokens: int) -> Batch:
    """The batch with the longest row, which pads all others to its length. With fillers no batch is short."""
    size = batch_plan.batch_size if batch_plan.needs_filler else min(batch_plan.batch_size, rows)
    tokens += spec.method.answer_tokens or 0
    return Batch(size * spec.sequences_per_row, min(tokens, spec.data.max_seq_length))


def with_groups(batch: Batch, spec: JobSpec, dataset: Dataset, mixture: Mixture | None) -> Batch:
    """A job's largest batch, where it is in one sequence with the rows that have the most tokens together."""
    if not spec.compute.padding_free:
        return batch
    if (answer := spec.method.answer_tokens) is not None:
        prompts = list_lengths(dataset, "prompt_ids")
        largest = prompts[first_largest(prompts, batch.sequences // spec.sequences_per_row)].tolist()
        most = spec.data.max_seq_length - answer
        answers = (answer - 1,) * spec.sequences_per_row  # the last token predicts nothing
        groups = tuple((min(prompt, most), answers) for prompt in largest)
        return replace(batch, groups=groups, scored=len(groups) * answer * len(answers))
    rows = batch.sequences // (2 if spec.has_pairs else 1)
    groups, scored = largest_groups(dataset, rows, mixture.most_repeats if mixture else 1)
    return replace(batch, groups=groups, scored=scored)


@dataclass(frozen=True)
class MicroBatches:
    spec: JobSpec
    batch_plan: BatchPlan
    steps: int = 1
    """Micro steps of the request in each of its own."""
    reason: str = ""
    """Why none are merged, although the job's option allows it."""
    unmerged: MicroBatches | None = None
    """The job before they were merged; None: none are."""

    def because(self, reason: str) -> MicroBatches:
        return replace(self, reason=reason)

    @property
    def shown(self) -> dict[str, Any]:
        if self.steps > 1:
            return {"merged_micro_steps": self.steps}
        return {"micro_steps": f"not merged: {self.reason}"} if self.reason else {}


@dataclass(frozen=True)
class RowsOnDevice:
    """What decides about a job's micro steps beside the job itself: its rows, and the device that computes them."""

    dataset: Dataset
    device: str
    """Its type."""
    measured: Callable[[], tuple[Capacity, int]]
    """The machines' memory, and all that a device has (`preflight.memory_of`); called on rank 0."""
    mixture: Mixture | None = None
    """Of the datasets that the rows are of; None: there is one."""

    def largest_batch(self, spec: JobSpec, batch_plan: BatchPlan) -> Batch:
        planned = plan_steps(spec, row_lengths(self.dataset), batch_plan, self.mixture)
        return with_groups(planned.batch, spec, self.dataset, self.mixture)


def merge_micro_steps(
    spec: JobSpec, batch_plan: BatchPlan, rows_on_device: RowsOnDevice, trained: int | None = None
) -> MicroBatches:
    """Merge micro steps of a job where its option allows it. A collective: rank 0's memory estimate decides.

    Args:
        spec: as this attempt's ranks train it.
        trained: on rank 0, rows of a micro batch of the attempt that this one continues, which are taken again where
            the device can hold them: other batches round differently. None: there was none.
    """
    unmerged = MicroBatches(spec, batch_plan)
    if batch_plan.accumulation_steps == 1 or not spec.may_merge(rows_on_device.device):
        return unmerged
    if spec.preflight == "off":
        return unmerged.because("the memory of the job is not estimated")
    if reason := why_separate(spec):
        return unmerged.because(reason)
    plans = larger_plans(spec, batch_plan, rows_on_device.dataset, rows_on_device.device)
    if not plans:
        return unmerged.because("their rows have many tokens")
    chosen = -1
    if ranks.rank() == 0 and trained != batch_plan.batch_size:
        chosen = _chosen(spec, plans, rows_on_device, trained)
    chosen = ranks.broadcast_number(chosen)
    if chosen < 0:
        why = "the attempt before had these" if trained == batch_plan.batch_size else "larger ones may not fit"
        return unmerged.because(why)
    plan = plans[chosen]
    merged = plan.applied(spec).changed(unmerged_batch_size=batch_plan.batch_size)
    times = batch_plan.accumulation_steps // plan.accumulation_steps
    return MicroBatches(merged, plan, times, unmerged=unmerged)


def _chosen(spec: JobSpec, plans: Sequence[BatchPlan], rows_on_device: RowsOnDevice, trained: int | None) -> int:
    """The index of the plan that the attempt before had, where it fits, else of the largest that fits; -1: none does.

    By the device's whole memory, and not by what is free at the moment: a later attempt decides the same, and so does
    one that begins before the memory of the last one is released.
    """
    try:
        capacity, total = rows_on_device.measured()

        def fits(plan: BatchPlan, share: float) -> bool:
            merged = plan.applied(spec)
            memory = estimate(
                merged, rows_on_device.largest_batch(merged, plan), rows_on_device.device, capacity.baseline
            )
            return replace(capacity, device=int(share * total)).holds(memory)

        before = next((index for index, plan in enumerate(plans) if plan.batch_size == trained), None)
        if before is not None and fits(plans[before], 1):
            return before
        # The largest one may accumulate no gradients, and then fit where a smaller one does not. Of the others each
        # takes less than the one before it. An estimate takes seconds, in which the other ranks wait.
        if fits(plans[0], SHARE_FOR_MERGED):
            return 0
        found = bisect_left(plans, True, lo=1, key=lambda plan: fits(plan, SHARE_FOR_MERGED))
    except Exception:  # `before_training` reports it, where the other ranks wait for no answer
        return -1
    return found if found < len(plans) else -1


def fix_order(
    spec: JobSpec,
    batch_plan: BatchPlan,
    rows_on_device: RowsOnDevice,
    *,
    gpu: torch.device | None = None,
    may_raise: bool = True,
) -> tuple[JobSpec, str]:
    """Let attention's backward pass take what adding in a fixed order takes for the longest rows, where the memory
    estimate fits with it. A collective: rank 0's estimate decides, by the device's whole memory, so that a later
    attempt decides the same.

    Args:
        spec: with the micro batches that it trains.
        gpu: whose kernels are asked what they take; None: there is none here, and any may train it.
        may_raise: whether it may take more than `LARGEST_ACCUMULATORS`: not after a lack of memory.

    Returns:
        The job, and for its record whether the same job has the same bits again.
    """
    if spec.method.answered_by_vllm is not None:
        return spec, "up to rounding: vLLM answers, which promises no equal ones"
    device, dataset = rows_on_device.device, rows_on_device.dataset
    if device == "cpu":
        return spec, "bit for bit"
    if device != "cuda" or spec.compute.dtype == "fp32" or not spec.compute.padding_free:
        why = "padding_free is not used" if not spec.compute.padding_free else f"{spec.compute.dtype} on {device}"
        return spec, f"up to rounding: {why}, and attention adds in an order of its own"
    batch = rows_on_device.largest_batch(spec, batch_plan)
    head = ranks.broadcast_number(LARGEST_HEAD if gpu is None else largest_head(gpu))
    limits = fixed_order_limits(spec, batch, device, head, _packed(batch, dataset) if spec.data.packed else None)
    if not limits:
        where = f"flash attention of its GPU takes heads up to {head}" if head else "its GPU has no flash attention"
        why = f": {where}" if head < LARGEST_HEAD else ""
        return spec, f"up to rounding: no kernel for its layers is known to add in a fixed order{why}"
    larger, allowed = [limit for limit in limits if limit > LARGEST_ACCUMULATORS], 0
    if not larger:
        return spec, "bit for bit"
    if ranks.rank() == 0 and spec.preflight != "off" and may_raise:
        allowed = _allowed(spec, batch, larger, rows_on_device)
    allowed = ranks.broadcast_number(allowed)
    if allowed:
        spec = spec.changed(accumulator_bytes=allowed)
    if max(allowed, LARGEST_ACCUMULATORS) >= limits[-1]:
        return spec, "bit for bit"
    why = "and the memory of the job is not estimated" if spec.preflight == "off" else "which its device does not have"
    return spec, _without_order(limits[-1], why if may_raise else "and an attempt before ran out of memory")


def keep_order(spec: JobSpec, repeats: str, memory: dict[str, Any] | None) -> tuple[JobSpec, str]:
    """What `fix_order` returned, or the job without what was allowed there, where rank 0's memory check gave that up.
    A collective."""
    allowed = spec.compute.accumulator_bytes
    if allowed is None or not ranks.broadcast_number(memory is not None and memory.get("fixed_order") == GIVEN_UP):
        return spec, repeats
    why = "and other processes hold memory of its device"
    return spec.changed(accumulator_bytes=None), _without_order(allowed, why)


def _without_order(needed: int, why: str) -> str:
    return f"up to rounding: attention would take {gib(needed)} to add in a fixed order, {why}"


def _packed(batch: Batch, dataset: Dataset) -> tuple[int, int]:
    chunks = dataset.data.column("seq_lengths").chunks
    longest = max(int(chunk.flatten().to_numpy().max(initial=0)) for chunk in chunks)
    return longest - 1, batch.sequences * int(list_lengths(dataset, "seq_lengths").max())


def _allowed(spec: JobSpec, batch: Batch, limits: Sequence[int], rows_on_device: RowsOnDevice) -> int:
    try:
        capacity, total = rows_on_device.measured()
        whole = replace(capacity, device=total)
        return next(
            (
                limit
                for limit in limits
                if whole.holds(
                    estimate(spec.changed(accumulator_bytes=limit), batch, rows_on_device.device, capacity.baseline)
                )
            ),
            0,
        )
    except Exception:  # `before_training` reports it, where the other ranks wait for no answer
        return 0

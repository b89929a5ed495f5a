"""Smaller batches on the CPU, whose caches do not hold the activations of a large one."""

from __future__ import annotations

from datasets import Dataset

from ...specs.job import JobSpec
from ..data.lengths import list_lengths
from ..data.sampling import BatchPlan
from ..model.fsdp import is_sharded

TOKENS = 2048
"""Of a batch on average. A step of 4 pairs of 900 tokens takes 12.0 s in batches of 1 or 2 pairs and 13.9 in one of 4,
with half the memory (10M parameters, 2 cores). Batches of fewer tokens would make small matrix products."""


def in_parts(spec: JobSpec, batch_plan: BatchPlan, dataset: Dataset, device: str) -> tuple[JobSpec, BatchPlan]:
    """The job with its batches divided into equal parts of at most `TOKENS` tokens on average, and so much more
    accumulation that each optimizer step has the same rows: the same numbers up to rounding.

    Jobs on GPUs, with padding, with means over a batch, whose model answers prompts, on sharded ranks, which would
    gather their weights for every part, or with `oom_retry`, which halves the batch itself, are returned as they are.

    Args:
        dataset: prepared rows, without a filler.
        device: its type.
    """
    if (
        device != "cpu"
        or not spec.compute.padding_free
        or spec.method.has_batch_means
        or spec.method.answer_tokens is not None
        or is_sharded(spec)
        or spec.lifecycle.oom_retry
    ):
        return spec, batch_plan
    sizes = [size for size in range(1, spec.data.batch_size + 1) if spec.data.batch_size % size == 0]
    tokens = mean_tokens(dataset)
    size = max((size for size in sizes if size * tokens <= TOKENS), default=1)
    if size == spec.data.batch_size:
        return spec, batch_plan
    batch_plan = batch_plan.with_batches_of(size)
    return batch_plan.applied(spec.with_batches_of(size)), batch_plan


def mean_tokens(dataset: Dataset) -> float:
    """Tokens of a row, or of a pair with its prompt once."""
    columns = [
        name
        for name in ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")
        if name in dataset.column_names
    ]
    return sum(float(list_lengths(dataset, name).double().mean()) for name in columns)

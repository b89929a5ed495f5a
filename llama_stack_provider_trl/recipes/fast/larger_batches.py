"""Larger micro batches: several micro steps of an optimizer step are computed as one. The reverse of `smaller_batches`.

A micro step of few tokens leaves a GPU waiting for the CPU, which queues as many kernels for it as for a large one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from ...errors import JobFailure
from ...specs.job import JobSpec
from ..data.sampling import BatchPlan
from ..model.loading import load_config
from .smaller_batches import TOKENS as TOKENS_ON_CPU
from .smaller_batches import mean_tokens

TOKENS = {"cuda": 16_384, "cpu": TOKENS_ON_CPU}
"""Of a micro batch on average, by the type of the device: beyond this an H100 gains nothing (a step of 1B reaches 38 %
of it by arithmetic with 4,096 tokens, 45 % with 16,384)."""

_DROPOUT = "dropout would leave out other units"
_ROUTING = "the routing of its experts is random, and would choose others"
_RANDOM = re.compile("drop|jitter|noise")
"""In the names of settings of a model that are 0 where it draws no random numbers."""
_RANDOM_ROUTING = ("phimoe",)
"""Types of models that draw some in training whatever their settings are."""


def why_separate(spec: JobSpec) -> str:
    """Why the micro steps of a job stay as they are: its numbers would change by more than rounding. Empty: they need
    not."""
    if not spec.compute.padding_free:
        return "batches have padding"
    if spec.method.has_batch_means:
        return "the loss has means over a batch"
    if spec.method.answer_tokens is not None:
        return "the model answers the prompts of a batch together"
    if spec.method.installed is not None:
        return "the loss of an installed method may depend on the batch"
    if spec.train.averaging is not None:
        return "other workers would train on other rows"
    return why_random(spec)


def larger_plans(spec: JobSpec, batch_plan: BatchPlan, dataset: Dataset, device: str) -> list[BatchPlan]:
    """Plans with fewer, larger micro batches of at most `TOKENS` tokens on average, the largest first.

    Each optimizer step has the same rows: the same numbers up to rounding.

    Args:
        spec: one without a reason to keep its micro steps (`why_separate`).
        dataset: prepared rows, without a filler.
        device: its type.
    """
    most = TOKENS.get(device, 0) / max(1.0, mean_tokens(dataset))
    steps, size = batch_plan.accumulation_steps, batch_plan.batch_size
    merged = [times for times in range(steps, 1, -1) if steps % times == 0 and times * size <= most]
    return [batch_plan.with_batches_of(times * size) for times in merged]


def why_random(spec: JobSpec) -> str:
    """Why a forward of the model in training draws random numbers, which depend on the batch; empty: it draws none."""
    if spec.lora and spec.lora.dropout:
        return _DROPOUT
    try:
        config: Any = load_config(spec.source).get_text_config()
    except JobFailure:
        return ""  # loading the model reports it
    if config.model_type in _RANDOM_ROUTING:
        return _ROUTING
    names = " ".join(_rates(config.to_dict()))
    return _DROPOUT if "drop" in names else _ROUTING if names else ""


def _rates(values: dict[Any, Any]) -> Iterator[str]:
    """The names of the settings of a configuration, and of those within it, by which it draws random numbers."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _rates(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and _RANDOM.search(str(name)):
            yield str(name)

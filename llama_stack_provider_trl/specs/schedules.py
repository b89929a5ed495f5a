"""What a schedule of learning rates does in a job of so many optimizer steps."""

from __future__ import annotations

import math

from .job import OptimizerSpec


def warmup_steps(optimizer: OptimizerSpec, total_steps: int) -> int:
    """Optimizer steps of linear warmup, as transformers computes them: a share is rounded up."""
    return optimizer.warmup_steps or math.ceil(total_steps * optimizer.warmup_ratio)


def problem_of_warmup(optimizer: OptimizerSpec, total_steps: int) -> str | None:
    """A warning where the warmup leaves no step at the learning rate; None: there is one.

    The rate of step n (from 1) of a warmup of w steps is (n - 1) / w of the learning rate.
    """
    warmup = warmup_steps(optimizer, total_steps)
    if warmup < total_steps or not warmup:
        return None
    most = optimizer.learning_rate * (total_steps - 1) / warmup
    return (
        f"the warmup of {warmup} steps is not shorter than the job of {total_steps} optimizer steps: the learning rate "
        f"reaches {most:.3g} of {optimizer.learning_rate:g}. Lower num_warmup_steps (warmup_ratio), or train longer"
    )

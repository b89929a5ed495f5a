"""Step checkpoints, from which a job goes on after a crash, a pause or a restart: the room that they need."""

from __future__ import annotations

import errno

import torch

from ..files import free_bytes
from .spec import JobSpec


def need_space(spec: JobSpec, num_bytes: int) -> None:
    """Raises what a full disk raises where `num_bytes` more would not leave `min_free_bytes` free."""
    free = free_bytes(spec.checkpoint_dir)
    if free < num_bytes + spec.min_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the next checkpoint takes about {num_bytes >> 20} MiB in {spec.checkpoint_dir}, {free >> 20} MiB are "
            f"free and {spec.min_free_bytes >> 20} MiB must stay free",
        )


def step_bytes(model: torch.nn.Module, spec: JobSpec) -> int:
    """About how large a step checkpoint is: the trained weights and the optimizer's moments of them."""
    moments = 0 if spec.optimizer.name == "sgd" else 2
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return sum(weight.numel() * (weight.element_size() + moments * 4) for weight in weights)

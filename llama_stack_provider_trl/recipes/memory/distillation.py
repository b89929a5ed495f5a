"""The step of a distillation, as the memory trace runs it: the teacher's forward, then the divergence in the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from ..fast.head import Head
from ..trainer.divergence import Divergence, head_of
from ..trainer.trl_patches import computing_heads


def traced_divergence_loss(
    forward: Callable[[], Any],
    teacher: Callable[[], object],
    *,
    answer_tokens: int,
    beta: float,
    temperature: float,
    copied: bool,
) -> torch.Tensor:
    """The loss of `recipes.trainer.distillation` on fake tensors, of which none has values to choose positions by.

    Args:
        forward: of the model that is trained; returns what a fused head gives.
        teacher: its forward.
        answer_tokens: of the whole batch: positions that are compared.
        copied: as in `head_of`.
    """
    head = head_of(teacher, copied=copied)

    def compare(own: Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = min(answer_tokens, len(targets))
        one, two = (replace(each, hidden=each.hidden[:count].clone()) for each in (own, head))
        found = Divergence(beta, temperature, None).between(one, two)
        return pad(found, (0, len(targets) - count)), torch.zeros_like(targets, dtype=torch.bool)

    with computing_heads(compare):
        divergences: torch.Tensor = forward().log_probs
    return divergences.sum()

"""The step of a distillation, as the memory trace runs it: the teacher's forward, then both models are compared in the
head of the one that is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from ...specs.methods import DistillationSpec
from ..fast.head import Head
from ..trainer.divergence import Divergence, head_of
from ..trainer.trl_patches import computing_heads
from ..trainer.uld import Side, UniversalDistance, Vocabularies


def traced_divergence_loss(
    forward: Callable[[], Any],
    teacher: Callable[[], object],
    *,
    answer_tokens: int,
    beta: float,
    temperature: float,
    copied: bool,
) -> torch.Tensor:
    """The loss of `recipes.trainer.distillation` on fake tensors, of which none has values to choose positions by. What
    the teacher has computed is freed before the backward pass, as there.

    Args:
        forward: of the model that is trained; returns what a fused head gives.
        answer_tokens: of the whole batch: positions that are compared.
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


def traced_span_loss(
    forward: Callable[[], Any],
    teacher: Callable[[], object],
    *,
    answer_tokens: int,
    method: DistillationSpec,
    copied: bool,
    counting: Callable[[], AbstractContextManager[None]],
) -> torch.Tensor:
    """The loss of `recipes.trainer.gold` on fake tensors: each token of the answers is a span of its own, and as many
    tokens as can be are of both vocabularies.

    Args:
        forward: of the model that is trained; returns what a fused head gives.
        answer_tokens: of the whole batch.
        counting: opened around what is computed of logits.
    """
    if method.uld is None:
        raise AssertionError("a teacher with the same vocabulary")
    uld, other = method.uld, head_of(teacher, copied=copied)

    def side(head: Head, count: int, temperature: float) -> Side:
        rows = replace(head, hidden=head.hidden[:count].clone())
        return Side(rows, torch.zeros(count, dtype=torch.long, device=head.hidden.device), temperature)

    def compare(own: Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = len(own.weight), len(other.weight)
        vocabularies = Vocabularies(sizes)
        if uld.hybrid:
            pairs = [(number, number) for number in range(min(sizes))]
            vocabularies = Vocabularies.of(sizes, pairs, own.hidden.device)
        count = min(answer_tokens, len(targets), len(other.hidden))
        one, two = side(own, count, uld.student_temperature), side(other, count, uld.teacher_temperature)
        distance = UniversalDistance(uld, method.beta, vocabularies, counting)
        found = distance.between(one, two, [(at, at + 1, at, at + 1) for at in range(count)])
        return pad(found[0], (0, len(targets) - count)), torch.zeros_like(targets, dtype=torch.bool)

    with computing_heads(compare):
        distances: torch.Tensor = forward().log_probs
    return distances.sum()

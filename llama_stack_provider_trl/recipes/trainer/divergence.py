"""How far a model's distribution of the next token is from a teacher's, from what their heads compute the logits of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..fast.head import Head
from .trl_patches import computing_heads, divergence_of_hidden


class Divergence:
    """The divergence of each token of the answers in a batch, computed in the model's own head, in tiles.

    Args:
        beta: 1: KL(model || teacher). 0: KL(teacher || model). Between: the generalized Jensen-Shannon divergence.
        temperature: divides the logits of both.
        scored: whether a position is one of an answer's tokens, shape (positions,); None: all are.
    """

    def __init__(self, beta: float, temperature: float, scored: torch.Tensor | None) -> None:
        self._beta, self._temperature, self._scored = beta, temperature, scored
        self.entropy = torch.zeros(())
        """Sum of the entropies of the model's distributions."""

    def between(self, own: Head, teacher: Head) -> torch.Tensor:
        """Of each position that the heads have, shape (positions,); 0 where it is not scored."""
        # Heads leave out what is not scored on GPUs only (TRL's `compact`).
        scored = self._scored if self._scored is not None and len(own.hidden) == len(self._scored) else None
        hidden, other = (own.hidden, teacher.hidden) if scored is None else (own.hidden[scored], teacher.hidden[scored])
        # Embeddings may have more rows than the tokenizer has tokens, to fill them up to a multiple: unlike numbers of
        # such rows are no tokens of either.
        size = min(len(own.weight), len(teacher.weight))
        one, two = _cut(replace(own, hidden=hidden), size), _cut(replace(teacher, hidden=other), size)
        found, entropies = divergence_of_hidden(one, two, self._beta, self._temperature)
        self.entropy = entropies.detach().sum()
        if scored is None:
            return found
        # Connected with the model where nothing is scored, too: a rank with fillers only goes through its backward.
        return found.new_zeros(len(scored)).masked_scatter(scored, found)

    @contextmanager
    def in_head(self, teacher: Head) -> Iterator[None]:
        """While this is open, a fused head gives these divergences in place of log-probabilities."""

        def compare(own: Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.between(own, teacher), torch.zeros_like(targets, dtype=torch.bool)

        with computing_heads(compare):
            yield


def head_of(forward: Callable[[], object], *, copied: bool) -> Head:
    """What a model's fused head computes the logits of a batch from.

    Args:
        copied: its weight is freed after the forward, and is copied before.
    """
    kept: list[Head] = []

    def keep(head: Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = None if head.bias is None else head.bias.detach()
        weight = head.weight.detach()
        if copied:
            weight, bias = weight.clone(), None if bias is None else bias.clone()
        kept.append(replace(head, hidden=head.hidden.detach(), weight=weight, bias=bias))
        return torch.zeros(len(targets), device=targets.device), torch.zeros_like(targets, dtype=torch.bool)

    with torch.no_grad(), computing_heads(keep):
        forward()
    (head,) = kept
    return head


def _cut(head: Head, size: int) -> Head:
    if len(head.weight) == size:
        return head
    return replace(head, weight=head.weight[:size], bias=None if head.bias is None else head.bias[:size])

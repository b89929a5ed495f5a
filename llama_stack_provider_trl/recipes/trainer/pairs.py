"""Batches of preference pairs as TRL's collator makes them: all chosen sequences, then all rejected ones, padded."""

from __future__ import annotations

from typing import Any

import torch

from ...specs.job import JobSpec
from ..model.attention import passes_padding_mask


class PaddedPairs:
    """The reference for `recipes.fast.batches.FlatPairs`, and for models that cannot be trained on those."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def forward_arguments(self, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a forward of `model` that scores the answers: log-probabilities of shape (2 * pairs, tokens)."""
        passes = passes_padding_mask(self._spec, model, inputs["input_ids"].device.type)
        mask = {"attention_mask": inputs["attention_mask"]} if passes else {}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        return {"input_ids": inputs["input_ids"], "labels": labels, "use_cache": False, "fused_lm_head": True, **mask}

    def log_probs(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of whole answers, chosen then rejected, shape (2 * pairs,)."""
        log_probs: torch.Tensor = outputs.log_probs.sum(dim=1)
        return log_probs

    def lengths(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Scored tokens of each answer, chosen then rejected, shape (2 * pairs,)."""
        lengths: torch.Tensor = inputs["completion_mask"][:, 1:].sum(dim=1)
        return lengths

    def num_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Tokens of both sequences of each pair, shape (pairs,)."""
        tokens: torch.Tensor = inputs["attention_mask"].sum(dim=1).view(2, -1).sum(dim=0)
        return tokens

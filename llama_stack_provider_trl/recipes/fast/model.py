"""Prepares a model for batches in one sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import NAME
from .cpu_attention import NAME_ON_CPU


def use_rows(model: PreTrainedModel, kind: str) -> None:
    """Have a model compute batches in one sequence, and its head no other tokens than the scored ones.

    The decoder then returns the states that its argument `scored` lists, where it has one. A state may be listed
    twice: the last token of a shared prompt predicts the first of both answers.

    Args:
        kind: of the device: cuda, mps or cpu.
    """
    model.set_attn_implementation(NAME_ON_CPU if kind == "cpu" else NAME)
    model.base_model.register_forward_hook(_select_scored, with_kwargs=True)


def _select_scored(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    scored = kwargs.get("scored")
    if scored is not None:
        output.last_hidden_state = output.last_hidden_state[:, scored]
    return output

"""Prepares a model for batches in one sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import NAME


def use_rows(model: PreTrainedModel) -> None:
    """Have a model compute batches in one sequence, and its head no other tokens than the scored ones.

    The decoder then returns the states that its argument `scored` lists, where it has one. A state may be listed
    twice: the last token of a shared prompt predicts the first of both answers. `last_tokens` lists each once; the
    feed-forward network of the last block computes only these.
    """
    model.set_attn_implementation(NAME)
    model.base_model.register_forward_hook(_select_scored, with_kwargs=True)
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks and isinstance(getattr(blocks[-1], "mlp", None), torch.nn.Module):
        _LastNetwork().attach(blocks[-1])


def _select_scored(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    scored = kwargs.get("scored")
    if scored is not None:
        output.last_hidden_state = output.last_hidden_state[:, scored]
    return output


class _LastNetwork:
    """Leaves tokens out of a block's feed-forward network: nothing follows that would mix tokens.

    Of a preference pair most tokens are its prompt's. 6 blocks then compute 5 % less, 30 blocks 1 %.
    """

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None
        self._states: torch.Tensor | None = None

    def attach(self, block: torch.nn.Module) -> None:
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.mlp.register_forward_pre_hook(self._select)
        block.mlp.register_forward_hook(self._spread)

    def _begin(self, block: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._tokens = kwargs.get("last_tokens")

    def _select(self, network: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._tokens is None:
            return None
        self._states, *others = args
        return self._states[:, self._tokens], *others

    def _spread(self, network: torch.nn.Module, args: Any, output: Any) -> Any:
        if self._tokens is None or self._states is None:
            return output
        shape, self._states = self._states.shape, None
        computed, *others = output if isinstance(output, tuple) else (output,)
        whole = computed.new_zeros(shape).index_copy(1, self._tokens, computed)
        return (whole, *others) if isinstance(output, tuple) else whole

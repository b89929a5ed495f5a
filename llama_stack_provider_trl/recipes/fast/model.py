"""Prepares a model for batches in one sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import NAME
from .cpu_attention import NAME_ON_CPU
from .elementwise import use_fewer_passes


def use_rows(model: PreTrainedModel, kind: str) -> None:
    """Have a model compute batches in one sequence, and its head no other tokens than the scored ones.

    The decoder then returns the states that its argument `scored` lists, where it has one. A state may be listed
    twice: the last token of a shared prompt predicts the first of both answers. `last_tokens` lists each once; the
    last block computes its layers but those of keys and values for these only.

    Args:
        kind: of the device: cuda, mps or cpu.
    """
    if kind == "cpu":
        use_cpu_kernels(model)
    else:
        model.set_attn_implementation(NAME)
    model.base_model.register_forward_hook(_select_scored, with_kwargs=True)
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks:
        _LastBlock().attach(blocks[-1])


def use_cpu_kernels(model: PreTrainedModel) -> None:
    """The part of `use_rows` for CPUs: attention with fewer products, norms and rotations with fewer passes."""
    model.set_attn_implementation(NAME_ON_CPU)
    use_fewer_passes(model)


def _select_scored(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    scored = kwargs.get("scored")
    if scored is not None:
        output.last_hidden_state = output.last_hidden_state[:, scored]
    return output


class _LastBlock:
    """Leaves tokens out of a block but for their keys and values: nothing follows that would mix tokens.

    It knows `mlp`, and the layers of `self_attn` that are in `_OF_QUERIES`. Others compute all tokens, as adapters do.
    Of a preference pair most tokens are its prompt's. The feed-forward network of 6 blocks then computes 5 % less, that
    of 30 blocks 1 %.
    """

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None
        self._num_tokens = 0

    def attach(self, block: torch.nn.Module) -> None:
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        attention = getattr(block, "self_attn", None)
        for part in (getattr(block, "mlp", None), *(getattr(attention, name, None) for name in _OF_QUERIES)):
            if isinstance(part, torch.nn.Module):
                part.register_forward_pre_hook(self._select)
                part.register_forward_hook(self._spread)

    def _begin(self, block: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._tokens = kwargs.get("last_tokens")
        states = args[0] if args else kwargs["hidden_states"]
        self._num_tokens = states.shape[1]
        if self._tokens is None or len(self._tokens) > _WORTH_CHOOSING * self._num_tokens:
            self._tokens = None
            return args, kwargs
        return args, {**kwargs, "unread": kwargs["layout"].unread}

    def _select(self, part: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._tokens is None:
            return None
        states, *others = args
        return states[:, self._tokens], *others

    def _spread(self, part: torch.nn.Module, args: Any, output: Any) -> Any:
        if self._tokens is None:
            return output
        computed, *others = output if isinstance(output, tuple) else (output,)
        whole = computed.new_zeros(computed.shape[0], self._num_tokens, *computed.shape[2:])
        whole = whole.index_copy(1, self._tokens, computed)
        return (whole, *others) if isinstance(output, tuple) else whole


_WORTH_CHOOSING = 0.9
"""Of all tokens: where more of them are needed, choosing takes longer than computing all."""
_OF_QUERIES = ("q_proj", "o_proj")
"""Layers of an attention module that compute each token by itself, and for its query only."""

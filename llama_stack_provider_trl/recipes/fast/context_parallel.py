"""Context parallelism: the ranks of a group train the same rows, each on its share of their tokens.

Everything in a decoder but attention computes each token by itself. Attention exchanges heads for tokens: each rank
gets some heads of all tokens, attends to whole rows with the kernels of one rank, and gives back its heads of the
others' tokens (DeepSpeed-Ulysses, arXiv:2309.14509). The sum of the ranks' gradients is that of one rank with the whole
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, PreTrainedModel

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ..data.tables import IGNORED
from ..model.loading import load_config
from .batches import Inputs, collate_rows
from .layout import Layout

PROVEN = ("llama", "qwen2", "qwen3")
"""Types of models whose numbers were compared with those of one rank."""
_FILLER = 0
"""Id of the tokens that make all shares equally long. They are a row of their own, without a loss."""


def refuse_unshareable(spec: JobSpec, padded: str) -> None:
    """Raise where the ranks of a job cannot share its rows.

    Args:
        padded: why its batches are padded; empty: they are not.

    Raises:
        JobFailure: invalid_request.
    """
    size = spec.context_parallel_size
    if size == 1:
        return
    config: Any = load_config(spec.source).get_text_config()
    found = ""
    if padded:
        found = f"needs batches without padding, and here {padded}"
    elif config.model_type not in PROVEN:
        found = f"is proven for {', '.join(PROVEN)}, and this model is a {config.model_type}"
    elif config.num_attention_heads % size:
        found = f"divides the heads of attention, and this model has {config.num_attention_heads}"
    if found:
        hint = "Leave it out: nproc_per_node then divides rows among the ranks, and not their tokens."
        raise JobFailure(Reason.invalid_request, f"context_parallel_size {size} {found}. {hint}")


def collate_share(size: int, position: int, rows: Sequence[Mapping[str, Any]]) -> Inputs:
    """The share of a rank in a batch: as many tokens as every other one has, and what they predict.

    `layout` is that of the whole sequence. `num_tokens` counts on the first rank only.

    Args:
        position: of this one in their order.
    """
    whole = collate_rows(rows)
    ids, positions, scored, labels = (whole[name] for name in ("input_ids", "position_ids", "scored", "shift_labels"))
    fillers = -ids.shape[1] % size
    length = (ids.shape[1] + fillers) // size
    begin = position * length
    first, end = torch.searchsorted(scored, torch.tensor([begin, begin + length])).tolist()
    has_scored = first < end
    own_labels = labels[:, first:end] if has_scored else torch.tensor([[IGNORED]])
    groups = [*whole["layout"].groups, *([(0, (fillers,))] if fillers else [])]
    return {
        "input_ids": torch.nn.functional.pad(ids, (0, fillers), value=_FILLER)[:, begin : begin + length],
        "position_ids": torch.cat([positions, torch.arange(fillers)[None]], dim=1)[:, begin : begin + length],
        "scored": scored[first:end] - begin if has_scored else torch.tensor([0]),
        "shift_labels": own_labels,
        "labels": own_labels,
        "layout": Layout(groups),
        "num_tokens": whole["num_tokens"] if position == 0 else torch.tensor(0),
    }


def attend_across_ranks(model: PreTrainedModel, group: Any, size: int) -> None:
    """Have a model that computes batches in one sequence (`fast.model`) compute shares of them.

    Args:
        group: of the ranks that share a batch, by their positions in it.
    """
    name = model.config._attn_implementation
    attend: Callable[..., Any] = AttentionInterface()[name]

    def attend_to_whole_rows(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        layout: Layout | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """See `fast.attention.attend_in_rows`. Without a layout, as for prompts, every rank has the whole sequence."""
        if layout is None:
            return attend(module, query, key, value, attention_mask, **options)
        query, key, value = with_whole_rows(query, key, value, group, size)
        attended, _ = attend(module, query, key, value, attention_mask, layout=layout, **options)
        return with_all_heads(attended, group, size), None

    shared = f"{name}_across_ranks"
    AttentionInterface.register(shared, attend_to_whole_rows)
    model.set_attn_implementation(shared)


def with_whole_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, size: int
) -> tuple[torch.Tensor, ...]:
    """This rank's heads of all tokens, from all heads of its own tokens, each of shape (1, heads, tokens, head size).

    Fewer heads of keys than ranks are repeated. One exchange for all three: queries and keys are cast as
    `attend_in_rows` does.
    """
    repeats = size // math.gcd(size, key.shape[1])
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    parts = [tensor[0].to(value.dtype).unflatten(0, (size, -1)) for tensor in (query, key, value)]
    received = _AllToAll.apply(torch.cat(parts, dim=1), group)  # (ranks, heads, tokens, head size)
    whole = received.transpose(0, 1).flatten(1, 2)
    return tuple(one[None] for one in whole.split([part.shape[1] for part in parts]))


def with_all_heads(attended: torch.Tensor, group: Any, size: int) -> torch.Tensor:
    """All heads of this rank's tokens, from its heads of all tokens, both of shape (1, tokens, heads, head size)."""
    received = _AllToAll.apply(attended[0].unflatten(0, (size, -1)).contiguous(), group)
    return received.transpose(0, 1).flatten(1, 2)[None]


class _AllToAll(torch.autograd.Function):
    """Rank r gets the r-th part of every rank's tensor, in their order. So do the gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients[0].contiguous(), ctx.group), None


def _exchanged(parts: torch.Tensor, group: Any) -> torch.Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received

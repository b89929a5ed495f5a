"""Activation checkpointing that keeps the outputs of attention, so that the backward pass computes only the rest again.

In long rows attention is the most expensive operation of a block: of the forward pass of 8B a quarter of all products
at 16,384 tokens, seven tenths at 131,072. Its output is one tensor of the size of the block's input.

torch has contexts for it (`create_selective_checkpoint_contexts`). They count every operation, and fail where the
backward pass has more of them, as where autocast cast the weights of a second forward in one step before. They also
keep attention that draws random numbers, after which the rest of the block would draw others. These look at attention
alone, and only where it draws none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...specs.job import JobSpec
from .attention import NAME
from .compiled import why_eager
from .mlp import LONG

KEPT = "used"
"""How the record begins where outputs of attention are kept."""
_NAMES = (
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_PLACES_OF_DROPOUT = {
    operator: [argument.name for argument in operator._schema.arguments].index("dropout_p")
    for operator in (getattr(torch.ops.aten, name).default for name in _NAMES)
}
"""torch's operators of attention, with the place of their dropout among the arguments."""


def why_not_kept(spec: JobSpec, device: str) -> str:
    """Why a job's backward pass computes attention again; empty: it need not, where the memory is there.

    Args:
        device: its type.
    """
    option = spec.compute.keep_attention
    if not spec.keeps_attention(device):
        return f"keep_attention is {option!r}" + (f" and the device is {device}" if option == "auto" else "")
    if device not in ("cpu", "cuda"):
        return f"attention on {device} is several operations"
    if option == "auto" and spec.data.max_seq_length <= LONG:
        return f"rows have at most {spec.data.max_seq_length:,} tokens"
    if spec.compute.attn_implementation not in (None, "sdpa"):
        return f"attn_implementation is {spec.compute.attn_implementation!r}"
    return "" if why_eager(spec, device) else "compile_blocks is 'always'"


def chooses_to_keep(spec: JobSpec, device: str) -> bool:
    """Whether the memory estimate decides if a job keeps outputs of attention."""
    is_open = spec.compute.gradient_checkpointing and spec.compute.keep_attention == "auto"
    return is_open and not why_not_kept(spec, device)


def checkpoint_arguments(spec: JobSpec, device: str) -> dict[str, Any]:
    """Arguments of torch's checkpoint for the blocks of a job, once it is decided what is kept."""
    arguments: dict[str, Any] = {"use_reentrant": False}
    if spec.compute.keep_attention == "always" and not why_not_kept(spec, device):
        arguments["context_fn"] = _contexts
    return arguments


def described(spec: JobSpec, device: str, requested: JobSpec, implementation: str) -> str:
    """What is kept, for the job's record.

    Args:
        spec: as this attempt trains it.
        requested: the same before the memory estimate decided.
        implementation: of the attention of its model, once that is loaded.
    """
    if reason := why_not_kept(requested, device):
        return f"not used: {reason}"
    if not implementation.startswith((NAME, "sdpa")):
        return f"not used: the attention of the model is {implementation!r}"
    if spec.compute.keep_attention == "always":
        return KEPT
    why = "the memory of the job is not estimated" if spec.preflight == "off" else "its device does not have the memory"
    return f"not used: {why}"


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For the forward pass of a checkpointed block, and for the one in the backward pass."""
    kept: list[Any] = []
    return _Keep(kept), _TakeKept(kept)


def _is_without_dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is of attention that draws no random numbers: the rest of the block draws others without it."""
    place = _PLACES_OF_DROPOUT.get(operator)
    if place is None:
        return False
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


class _Keep(TorchDispatchMode):
    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_without_dropout(func, args, kwargs or {}):
            # Of its own: autograd makes the output itself a part of the graph, which would hold it.
            self._kept.append(tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        return output


class _TakeKept(TorchDispatchMode):
    """What was kept takes the place of the same call. Each is taken once; a further time it is computed."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept
        self._calls = 0

    def __enter__(self) -> Any:
        self._calls = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute: Callable[..., Any] = func
        if _is_without_dropout(func, args, kwargs or {}):
            call, self._calls = self._calls, self._calls + 1
            if call < len(self._kept) and self._kept[call] is not None:
                output, self._kept[call] = self._kept[call], None
                return output
        return compute(*args, **(kwargs or {}))

"""The attention of a batch in one sequence (`fast.layout`), as an implementation of transformers' attention.

transformers calls it by its name, and makes no mask for a name that it has no function of masks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils import deterministic
from transformers import AttentionInterface

from .layout import Layout, Places

NAME = "rows_in_one_sequence"
"""Of this implementation, in the configuration of a model that trains. Checkpoints do not contain it."""
_OTHER_SCORES = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments with which an architecture asks for other scores than those of the scaled product."""


def attend_in_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row.

    Args:
        query: shape (sequences, heads, tokens, head size); with a layout of one sequence.
        key: shape (sequences, key heads, tokens, head size), as `value`.
        sliding_window: tokens that a token attends to, itself included; None: all before it in its row.
        layout: where the rows are; None: each sequence is a row.

    Returns:
        The output, shape (sequences, tokens, heads, head size), and no weights.

    Raises:
        ValueError: the architecture asks for something else.
    """
    check_scores(module, attention_mask, others)
    # As autocast would: rotary embeddings leave queries and keys in fp32 under it, which kernels without a mask refuse.
    query, key = query.to(value.dtype), key.to(value.dtype)
    attend = _Attend(layout or Layout([]), scaling, dropout, sliding_window, query.shape[1] != key.shape[1])
    if layout is None:
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    sizes = layout.sizes()
    if dropout == 0.0 and has_kernel_of_rows(query, value) and (sliding_window is not None or _fits(query, len(sizes))):
        # A call for each row needs masks for a window. Without gradients the choice is the same: a reference model has
        # to have the numbers of the policy.
        attended, _ = attend_in_one_kernel(query, key, value, layout, scaling, sliding_window)
        return repeatable(attended, len(sizes))[None], None
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = []
    for prefix, continuations in layout.groups:
        queries, keys, values = next(parts)
        outputs.append(attend(queries, keys, values))
        shared = keys[:, :, :prefix], values[:, :, :prefix]
        for _ in continuations[1:]:
            queries, *own = next(parts)
            keys, values = (torch.cat(both, dim=2) for both in zip(shared, own, strict=True))
            outputs.append(attend(queries, keys, values))
    outputs = [output.transpose(1, 2) for output in outputs]
    return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def check_scores(module: torch.nn.Module, attention_mask: torch.Tensor | None, others: Mapping[str, Any]) -> None:
    """Raises ValueError where an architecture asks for other than causal attention by scaled products."""
    unknown = [name for name in _OTHER_SCORES if others.get(name) is not None]
    if unknown:
        raise ValueError(f"its attention has {unknown[0]}")
    if attention_mask is not None or not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise ValueError("its attention is not causal, or has a mask of its own")


LARGEST_HEAD = 256
"""Of flash attention; a multiple of 8."""
_LARGEST_HEAD_OF_SMALL_GPUS = 192
"""Of its backward pass on GPUs with less shared memory: torch refuses larger ones there, up to 224."""
_GPUS_FOR_LARGE_HEADS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities."""
_flash_attention = torch.ops.aten._flash_attention_forward.default
_flash_attention_backward = torch.ops.aten._flash_attention_backward.default


def has_kernel_of_rows(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether one kernel computes all rows of a sequence on this device, in this dtype and release of torch."""
    if not _is_on_gpu(query) or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if query.shape[-1] != value.shape[-1]:  # multi-head latent attention, as in DeepSeek-V3
        return False
    return query.shape[-1] <= largest_head(query.device) and query.shape[-1] % 8 == 0


@cache
def largest_head(device: torch.device) -> int:
    """Of flash attention of rows of different lengths, which torch has for NVIDIA GPUs from Ampere on; 0: none."""
    if torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return 0
    arguments = {one.name for one in _flash_attention._schema.arguments}
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0) or not {"cum_seq_q", "window_size_left"} <= arguments:
        return 0
    return LARGEST_HEAD if capability in _GPUS_FOR_LARGE_HEADS else _LARGEST_HEAD_OF_SMALL_GPUS


def attend_in_one_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scaling: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention of sequences of different lengths; its causal mask is aligned to the last query and key of a row.

    torch 2.11 documents it as `torch.nn.attention.varlen.varlen_attn`, which has the same bits, and whose forward and
    backward pass go by way of Python: an operator that is written so and computes nothing takes 0.1 ms of CPU time.

    Returns:
        The output, shape (tokens, heads, head size), and the logarithms of the sums, shape (heads, tokens).
    """
    places = layout.places(query.device)
    tensors, options = _for_one_kernel(query, key, value, places, scaling, window)
    attended, log_sums, *_ = _flash_attention(*tensors, *places[:4], 0.0, return_debug_mask=False, **options)
    return attended, log_sums


def differentiate_one_kernel(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    layout: Layout,
    scaling: float | None,
    window: int | None,
) -> list[torch.Tensor]:
    """The gradients of `attend_in_one_kernel`, as autograd has them there, added in a fixed order where that fits.

    Args:
        gradient: of its output, in the shape of `attended`.

    Returns:
        Those of query, key and value, each of shape (tokens, its heads, head size) and contiguous.
    """
    places = layout.places(query.device)
    tensors, options = _for_one_kernel(query, key, value, places, scaling, window)
    # Without dropout its state is not read.
    unread = {"rng_state": torch.zeros(2, dtype=torch.uint64, device=query.device), "unused": query.new_empty(0)}
    with ExitStack() as stack:
        if _fits(query, len(places.query_bounds) - 1):
            stack.enter_context(_fixed_order())
        of_query, *of_others = _flash_attention_backward(
            gradient.contiguous(), *tensors, attended, log_sums, *places[:4], 0.0, **unread, **options
        )
        if places.keys is not None:
            whole = [key.new_zeros(key.shape[2], *one.shape[1:]) for one in of_others]
            of_others = [sums.index_add_(0, places.keys, one) for sums, one in zip(whole, of_others, strict=True)]
    return [one.contiguous() for one in (of_query, *of_others)]


def _for_one_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: Places,
    scaling: float | None,
    window: int | None,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Queries, keys and values of shape (tokens, heads, head size), each row with its own keys, and the options."""
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if places.keys is not None:
        keys, values = keys.index_select(0, places.keys), values.index_select(0, places.keys)
        if places.adds_many:
            for copied in (keys, values):
                _repeat(copied)
    left = -1 if window is None else window - 1
    options = {"is_causal": window is None, "scale": scaling, "window_size_left": left, "window_size_right": 0}
    return [queries, keys, values], options


class _Attend(NamedTuple):
    """Causal attention of the last queries of a row to all of its keys."""

    layout: Layout
    scaling: float | None
    dropout: float
    window: int | None
    is_grouped: bool
    """Whether several heads of queries share a head of keys."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        queries, keys = query.shape[2], key.shape[2]
        is_causal, mask = False, None
        if self.window is not None and keys > self.window:
            mask = self.layout.mask(query, keys, self.window)
        elif queries == keys:
            is_causal = queries > 1
        elif queries > 1:
            # GPUs have a kernel that computes this without a mask.
            mask = causal_lower_right(queries, keys) if _is_on_gpu(query) else self.layout.mask(query, keys, keys)
        if self.is_grouped and _is_on_gpu(query) and (query.dtype is not torch.bfloat16 or type(mask) is torch.Tensor):
            # Only the flash kernels take shared heads without holding all scores: in half precision, without a mask.
            repeats = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=is_causal,
            scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return repeatable(attended) if _is_on_gpu(query) else attended


_REPEATABLE = "FlashAttention"
"""In the names of the nodes of the backward pass whose kernels add in a fixed order on request. Others raise then."""
LARGEST_ACCUMULATORS = 512 << 20
"""Bytes that a fixed order may take, unless the device has more for long rows (`limit_accumulators`)."""
_limit = [LARGEST_ACCUMULATORS]
"""The same of the job of this process."""
_MOST_MULTIPROCESSORS = 160
"""Of a GPU (B200: 148), for an estimate without one."""


def limit_accumulators(most: int | None) -> None:
    """Set the bytes that a fixed order may take in this process; None: `LARGEST_ACCUMULATORS`."""
    _limit[0] = LARGEST_ACCUMULATORS if most is None else most


def accumulator_bytes(sizes: Sequence[int], heads: int, head_size: int, limit: int | None = None) -> int:
    """The most that the backward pass of flash attention takes for its sums, on any GPU.

    Args:
        limit: bytes that a fixed order may take; None: `LARGEST_ACCUMULATORS`.
    """
    calls = [(size, 1) for size in sizes]  # where this GPU has no kernel of rows, or it would take too much
    calls.append((sum(sizes), len(sizes)))
    limit = LARGEST_ACCUMULATORS if limit is None else limit
    return max(_most_of_call(_sums(*call, heads, head_size), heads, call[1], limit) for call in calls)


def fixed_order_bytes(
    sizes: Sequence[int], heads: int, head_size: int, packed: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Bytes with which the backward pass of flash attention adds in a fixed order on any GPU: where one call computes
    all rows of a batch, and where each row has a call. Of any batch of some of these rows.

    Args:
        packed: where rows are packed, so that batches of as many tokens have other rows: the tokens of the longest row
            of any batch, and the most rows of one.
    """

    def needed(tokens: int, rows: int) -> int:
        return _sums(tokens, rows, heads, head_size) * _copies(_MOST_MULTIPROCESSORS, heads, rows)

    if packed is not None:
        tokens = sum(sizes) + len(sizes)  # of each row one is not computed, and others may have fewer rows
        return max(needed(tokens, rows) for rows in range(1, packed[1] + 1)), needed(packed[0], 1)
    longest = sorted(sizes, reverse=True)
    together = max(needed(tokens, rows) for rows, tokens in enumerate(accumulate(longest), start=1))
    return together, needed(longest[0], 1)


def _sums(tokens: int, rows: int, heads: int, head_size: int) -> int:
    """Bytes of the queries' gradients in fp32, as torch's `mha_varlen_bwd` holds them for one copy."""
    multiple = 32 if head_size <= 128 else 64
    return 4 * (tokens + 128 * rows) * heads * math.ceil(head_size / multiple) * multiple


def _most_of_call(sums: int, heads: int, rows: int, limit: int) -> int:
    """The most that one call takes, whose sums take so many bytes once: as many copies as `repeatable` allows."""
    return sums * max(1, min(_copies(_MOST_MULTIPROCESSORS, heads, rows), limit // max(1, sums)))


def _copies(multiprocessors: int, heads: int, rows: int) -> int:
    """Blocks of keys add to copies of the queries' gradients in fp32, as many as keep all multiprocessors busy."""
    return math.ceil(multiprocessors / (rows * heads))


def repeatable(attended: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Have the backward pass of flash attention add in a fixed order, so that a job repeats and resumes bit for bit.

    torch has a switch for the whole process only, with which other operations that have no fixed order raise. It is on
    while this tensor's own node runs. (`use_deterministic_algorithms` imports torch's compiler, which takes 2 s.)

    Args:
        attended: shape (tokens, heads, head size) or (1, heads, tokens, head size).
        rows: that one kernel computes.
    """
    node = attended.grad_fn
    if node is not None and _REPEATABLE in type(node).__name__ and _fits(attended, rows):
        _repeat(attended)
    return attended


def _repeat(computed: torch.Tensor) -> None:
    """Have the node of the backward pass that computed a tensor add in a fixed order, if there is one."""
    node = computed.grad_fn
    if node is None:
        return
    opened: list[ExitStack] = []

    def switch_on(*_: Any) -> None:
        opened.append(ExitStack())
        opened[-1].enter_context(_fixed_order())

    node.register_prehook(switch_on)
    node.register_hook(lambda *_: opened.pop().close())


@contextmanager
def _fixed_order() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    # The kernel writes all that it allocates: filling it with NaN first would be six more kernels.
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        mode, deterministic.fill_uninitialized_memory = before
        torch.set_deterministic_debug_mode(mode)


def _fits(attended: torch.Tensor, rows: int) -> bool:
    """Whether the backward pass of a call may add in a fixed order, by the memory that this takes.

    Args:
        attended: or queries, of a shape that `repeatable` takes.
    """
    heads, head_size = attended.shape[1], attended.shape[-1]
    sums = _sums(attended.numel() // (heads * head_size), rows, heads, head_size)
    return sums * _copies(_multiprocessors(attended.device), heads, rows) <= _limit[0]


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


AttentionInterface.register(NAME, attend_in_rows)

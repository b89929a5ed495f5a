"""The attention of a batch in one sequence, for fp32 on CPUs, whose flash kernel has no causal mask for fewer queries
than keys.

With a mask it computes every product, and half of those within an answer are hidden. Here the queries of a row meet
the shared prefix in one call without a mask, and their own tokens in another, which is causal; the two outputs are
merged by the logarithms of their sums (flash attention, arXiv:2205.14135; cascade inference does the same). Nothing is
concatenated. Rows of one length that follow each other are one call: the kernel's backward pass divides the heads of a
call among threads, and two threads have 3 and 2 of 5 heads of one row, but 10 each of four rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from .attention import NAME, attend_in_rows, check_scores
from .layout import Layout

NAME_ON_CPU = f"{NAME}_on_cpu"
"""Of this implementation, in the configuration of a model that trains."""


def attend_on_cpu(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What `attend_in_rows` does, with the same arguments. That computes what this cannot."""
    check_scores(module, attention_mask, options)
    is_fp32 = query.dtype is key.dtype is value.dtype is torch.float32
    # What `scaled_dot_product_attention` checks before it calls this kernel.
    is_known = query.shape[-1] == value.shape[-1] and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    window = options.get("sliding_window")
    if (
        layout is None
        or not (is_fp32 and is_known)
        or options.get("dropout")
        or (window is not None and layout.longest > window)
    ):
        return attend_in_rows(module, query, key, value, attention_mask, layout=layout, **options)
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    attended: torch.Tensor = _Attention.apply(query, key, value, planned(layout), options.get("scaling"))
    return attended, None


class _Span(NamedTuple):
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class _Queries(NamedTuple):
    """The queries of a row, or of rows of one length. Each attends to all tokens of a shared prefix, and of its own row
    to those up to itself."""

    own: _Span
    shared: _Span
    """A prefix that another part of the sequence has; empty: there is none."""
    rows: int = 1
    """How many rows of one length `own` has, which attend to nothing before them."""

    def calls(self) -> Iterator[tuple[_Span, bool]]:
        """The keys of each call of the kernel, and whether it is causal; the first one is."""
        yield self.own, True
        if self.shared.size:
            yield self.shared, False

    def can_be_joined_with(self, row: _Queries) -> bool:
        """Whether a later row can be computed in the same call."""
        look_back = self.shared.size or row.shared.size
        return not look_back and self.own.end == row.own.begin and self.own.size == self.rows * row.own.size


def planned(layout: Layout) -> list[_Queries]:
    queries: list[_Queries] = []
    end = 0
    for prefix, continuations in layout.groups:
        shared = _Span(end, end + prefix)
        for number, size in enumerate(continuations):
            begin, end = end, end + size + (0 if number else prefix)
            if begin < end:
                row = _Queries(_Span(begin, end), shared if number else _Span(0, 0))
                if queries and queries[-1].can_be_joined_with(row):
                    last = queries.pop()
                    row = last._replace(own=_Span(last.own.begin, end), rows=last.rows + 1)
                queries.append(row)
    return queries


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: list[_Queries],
        scaling: float | None,
    ) -> torch.Tensor:
        attended, log_sums = attend_to_plan(query, key, value, plan, scaling)
        ctx.save_for_backward(query, key, value, attended, log_sums)
        ctx.plan, ctx.scaling = plan, scaling
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, log_sums = ctx.saved_tensors
        found = differentiate_plan(gradients[0], query, key, value, attended, log_sums, ctx.plan, ctx.scaling)
        return *found, None, None


def attend_to_plan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: list[_Queries], scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, shape (1, tokens, heads, head size), and the logarithms of the sums, shape (1, tokens, heads).

    Args:
        query: shape (1, heads, tokens, head size), as `key` and `value`.
    """
    _, heads, tokens, size = query.shape
    attended, log_sums = query.new_empty(1, tokens, heads, size), query.new_empty(1, tokens, heads)
    for queries in plan:
        rows, own = queries.rows, _cut(query, queries.own, queries.rows)
        found = (
            _forward(own, _cut(key, span, rows), _cut(value, span, rows), 0.0, is_causal, scale=scaling)
            for span, is_causal in queries.calls()
        )
        output, log_sum = reduce(_merged, found)
        for part, whole in ((output, attended), (log_sum, log_sums)):
            whole[0, slice(*queries.own)] = part.transpose(1, 2).flatten(0, 1)
    return attended, log_sums


def differentiate_plan(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    plan: list[_Queries],
    scaling: float | None,
) -> list[torch.Tensor]:
    """The gradients of query, key and value of `attend_to_plan`, in their shapes.

    Args:
        gradient: of its output.
    """
    # As the layers before have them: the heads of a token next to each other.
    of_all = [query.new_empty(attended.shape).transpose(1, 2) for _ in range(3)]
    of_query, *of_others = of_all
    gradient, attended, log_sums = (tensor.transpose(1, 2) for tensor in (gradient, attended, log_sums))
    for queries in plan:
        rows = queries.rows
        given, own, *sums = (_cut(tensor, queries.own, rows) for tensor in (gradient, query, attended, log_sums))
        for span, is_causal in queries.calls():
            # With the sums over all keys, each call gives its part of the gradients.
            parts = _backward(
                given, own, _cut(key, span, rows), _cut(value, span, rows), *sums, 0.0, is_causal, scale=scaling
            )
            places = (_cut(of_query, queries.own, rows), *(_cut(whole, span, rows) for whole in of_others))
            for part, place in zip(parts, places, strict=True):
                # The causal call of a row comes first, and that of a prefix before those of the rows that share it.
                place.copy_(part) if is_causal else place.add_(part)
    return of_all


_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""What `scaled_dot_product_attention` calls on a CPU; it does not return the logarithms of the sums."""


def _cut(tensor: torch.Tensor, span: _Span, rows: int) -> torch.Tensor:
    """Tokens of a tensor of shape (1, heads, tokens, ...), as a view of shape (rows, heads, tokens of a row, ...)."""
    return tensor[0, :, slice(*span)].unflatten(1, (rows, -1)).transpose(0, 1)


type _Found = tuple[torch.Tensor, torch.Tensor]
"""The attention of queries to some keys, shape (rows, heads, queries, head size), and the logarithms of its sums."""


def _merged(one: _Found, other: _Found) -> _Found:
    """The attention of queries to two sets of keys. Overwrites neither output: one may be kept (`kept_attention`)."""
    both = torch.logaddexp(one[1], other[1])
    weights = [(log_sum - both).exp_()[..., None] for _, log_sum in (one, other)]
    return (one[0] * weights[0]).addcmul_(other[0], weights[1]), both


AttentionInterface.register(NAME_ON_CPU, attend_on_cpu)
